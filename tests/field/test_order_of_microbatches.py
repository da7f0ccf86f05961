"""F49: what autograd holds is bound to its microbatch; nobody asks which one is current."""

from __future__ import annotations

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, part, run_moves, schedule
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

pytestmark = pytest.mark.field("F49")

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


def pair(device: torch.device, names: tuple[str, ...] = ("a", "b"), seed: int = 1) -> list[Chain]:
    return [Chain(names, 2, is_on=b, device=device, seed=seed) for b in (True, False)]


def forward(model: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    """A new chunk's loss and its leaf."""
    if model.is_on:
        off_interface.init_chunk_handler(None, None, 1)
    leaf = x.clone().requires_grad_()
    return model(leaf).square().mean(), leaf


def gradients(model: Chain, leaves: list[Tensor]) -> list[Tensor]:
    got = [t.grad.clone() for t in (*leaves, *model.parameters()) if t.grad is not None]
    model.zero_grad()
    return got


def start(model: Chain) -> None:
    if model.is_on:
        off_interface.reset()


def sum_of_losses(model: Chain, inputs: list[Tensor]) -> list[Tensor]:
    start(model)
    losses, leaves = zip(*(forward(model, x) for x in inputs), strict=True)
    sum(losses[1:], start=losses[0]).backward()
    return gradients(model, list(leaves))


def last_in_first_out(model: Chain, inputs: list[Tensor]) -> list[Tensor]:
    start(model)
    done = [forward(model, x) for x in inputs]
    for loss, _ in reversed(done):
        loss.backward()
    return gradients(model, [leaf for _, leaf in done])


def shuffled(model: Chain, inputs: list[Tensor]) -> list[Tensor]:
    start(model)
    done = [forward(model, x) for x in inputs]
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(len(inputs)))
    for index in order.tolist():
        done[index][0].backward()
    return gradients(model, [leaf for _, leaf in done])


def first_forgotten(model: Chain, inputs: list[Tensor]) -> list[Tensor]:
    start(model)
    done = [forward(model, x) for x in inputs]
    for loss, _ in done[1:]:
        loss.backward()
    return gradients(model, [leaf for _, leaf in done])


def fewer_then_more(model: Chain, inputs: list[Tensor]) -> list[Tensor]:
    return last_in_first_out(model, inputs[:1]) + sum_of_losses(model, inputs)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "program", [sum_of_losses, last_in_first_out, shuffled, first_forgotten, fewer_then_more]
)
def test_order_of_backward(manager: PipelineOffloadManager, program) -> None:
    device = manager.backend.device
    on, off = pair(device)
    for step in range(3):
        inputs = make_inputs(4, step=step, device=device)
        assert same_bits(program(on, inputs), program(off, inputs)), step
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0


def test_order_changes_every_step(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    on, off = pair(device)
    programs = (sum_of_losses, last_in_first_out, shuffled, first_forgotten, last_in_first_out)
    for step, program in enumerate(programs):
        inputs = make_inputs(3 + step % 2, step=step, device=device)
        assert same_bits(program(on, inputs), program(off, inputs)), step
        assert_idle(manager)


def test_output_unused_in_one_microbatch(manager: PipelineOffloadManager) -> None:
    """The side group of microbatch 1 takes no part in its loss."""
    device = manager.backend.device

    def run(is_on: bool, step: int) -> list[Tensor]:
        trunk, side = (Chain(("a",), 2, is_on=is_on, device=device, seed=s) for s in (1, 2))
        start(trunk)
        losses, leaves = [], []
        for m, x in enumerate(make_inputs(3, step=step, device=device)):
            if is_on:
                off_interface.init_chunk_handler(None, None, 1)
            leaves.append(x.requires_grad_())
            h = trunk(leaves[-1])
            extra = part("side", h, side.weights[0], is_on)
            h = part("b", h, side.weights[1], is_on)
            losses.append((h if m == 1 else h * extra).square().mean())
            del h, extra
        for loss in losses:
            loss.backward()
        del loss
        losses.clear()
        return gradients(trunk, leaves) + gradients(side, [])

    for step in range(3):
        assert same_bits(run(True, step), run(False, step)), step
        assert_idle(manager)


@pytest.mark.parametrize("counts", [(4, 3, 4), (4, 1), (1, 4)])
@pytest.mark.parametrize("kind", BACKENDS)
def test_interleaved_order_changes(kind: str, counts: tuple[int, ...]) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        device = manager.backend.device
        pairs = [pair(device, seed=stage) for stage in range(2)]
        on, off = ([p[i] for p in pairs] for i in range(2))
        for step, count in enumerate(counts):
            inputs = make_inputs(count, step=step, device=device)
            moves = schedule(count, 3, 2, 2)
            expected = run_moves(off, inputs, moves, False)
            assert same_bits(run_moves(on, inputs, moves, True), expected), step
            assert_idle(manager)


def test_two_models_in_one_manager(manager: PipelineOffloadManager) -> None:
    """Chunks of both are in flight together, with the same group names."""
    device = manager.backend.device
    ons, offs = zip(pair(device, seed=1), pair(device, ("b", "a"), seed=2), strict=True)

    def run(models: tuple[Chain, ...], step: int) -> list[Tensor]:
        start(models[0])
        inputs = make_inputs(3, step=step, device=device)
        done = [[forward(model, x) for model in models] for x in inputs]
        for first, second in done:
            second[0].backward()
            first[0].backward()
        leaves = [leaf for both in done for _, leaf in both]
        return gradients(models[0], leaves) + gradients(models[1], [])

    for step in range(3):
        assert same_bits(run(ons, step), run(offs, step)), step
        assert_idle(manager)


@pytest.mark.parametrize("kind", BACKENDS)
def test_two_managers(kind: str) -> None:
    """A manager's tensors come back while another is the current one."""
    device = make_backend(kind).device
    backends = [make_backend(kind), make_backend(kind)]
    managers = [PipelineOffloadManager(config=CONFIG, backend=b) for b in backends]
    ons, offs = zip(pair(device, seed=1), pair(device, seed=2), strict=True)

    def run(models: tuple[Chain, ...], step: int) -> list[Tensor]:
        inputs = make_inputs(3, step=step, device=device)
        for manager in managers:
            manager.reset()
        done = []
        for x in inputs:
            for model, manager in zip(models, managers, strict=True):
                PipelineOffloadManager.OFFLOAD_MGR = manager
                done.append(forward(model, x))
        for loss, _ in done:
            loss.backward()
        leaves = [leaf for _, leaf in done]
        return gradients(models[0], leaves) + gradients(models[1], [])

    for step in range(3):
        assert same_bits(run(ons, step), run(offs, step)), step
        for manager in managers:
            assert_idle(manager)
            assert manager.statistics().bytes_offloaded > 0
