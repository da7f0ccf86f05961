"""Each product, checkpoints of PyTorch, and schedules with Megatron's markers: bit for bit."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers.saving import one_rank
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    by_autograd_functions,
    by_functions,
    check,
    drawn,
    gradients,
    group,
    make_backend,
    session,
)
from helpers.toy import ROWS, WIDTH, Block, Net, inputs, sines, train
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import (
    OffloadActivations,
    OffloadHiddenStates,
    OffloadModel,
    PipelineOffloadManager,
    attach,
    checkpoint,
    checkpoint_wrapper,
    fine_grained_offloading_group_flush_delayed_groups,
    offload_layers,
)

pytestmark = pytest.mark.smoke

kinds = pytest.mark.parametrize("kind", ["late", "threads"])

LAYERS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


Product = Callable[[Any, nn.Sequential], tuple[Any, Any]]
"""Makes of a backend and a model what is called, and a context around each forward, or None."""


def in_a_context(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    return model, OffloadActivations(min_offload_size=1, max_fwd_stash_size=5, backend=backend)


def checkpointed(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, offload_inputs=True, min_offload_size=1, backend=backend)
        return x

    return run, None


def wrapped(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    wrap = partial(checkpoint_wrapper, offload_to_cpu=True, backend=backend)
    return nn.Sequential(*map(wrap, model)), None


def hidden_states(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    for layer in model:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(torch_checkpoint, use_reentrant=False)
    return model, OffloadHiddenStates(model, min_offload_size=1, backend=backend)


def sliced(backend: Any, model: nn.Sequential, is_recomputed: bool = False) -> tuple[Any, Any]:
    options: dict[str, Any] = {"checkpoint_activation": is_recomputed, "backend": backend}
    return OffloadModel(model, backend.device, num_slices=2, **options), None


def streamed(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    whole = nn.Sequential(OrderedDict(layers=model))
    offload_layers(whole, "layers", backend=backend)
    return whole, None


PRODUCTS = [
    in_a_context,
    checkpointed,
    wrapped,
    hidden_states,
    sliced,
    partial(sliced, is_recomputed=True),
    streamed,
]


def step(model: nn.Module, run: Any, around: Any) -> list[Tensor]:
    """Losses and gradients of two microbatches in flight, and the parameters behind an update."""
    graphs = []
    for number in range(2):
        x = drawn(ROWS, WIDTH, seed=number).requires_grad_()
        with around or nullcontext():
            graphs.append((x, run(x).square().mean()))
    results: list[Tensor] = []
    for x, loss in graphs:
        loss.backward()
        results += [loss.detach(), *gradients(x)]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results += gradients(*model.parameters())
    return results + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.field("F11")
@kinds
@pytest.mark.parametrize("product", PRODUCTS)
def test_steps_are_those_of_the_plain_model(kind: str, product: Product) -> None:
    plain, model, backend = make_model(), make_model(), make_backend(kind)
    with backend.activate():
        run, around = product(backend, model)
        for number in range(3):
            expected = step(plain, plain, None)
            assert_same(step(model, run, around), expected, f"step {number}")
            if around is not None:
                assert around.statistics().bytes_offloaded > 0
                assert_idle(around)


# With PyTorch's checkpoints


def in_the_middle(x: Tensor, group: Any, region: Any) -> Any:
    return region(lambda h: group(h.exp(), sines).cos().sin(), x)


REGIONS: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "nested": lambda x, group, region: region(
        lambda h: in_the_middle(group(h, sines, name="outer"), group, region).cos(), x
    ),
    "on both sides": lambda x, group, region: group(
        region(lambda h: group(h, sines, name="inside").cos(), group(x, sines, name="before")),
        sines,
        name="behind",
    ),
    "around": lambda x, group, region: group(
        x, lambda h: in_the_middle(h.sin(), group, region).exp()
    ),
}
"""Where groups are. The commit inside is not of the group around, which has the same name."""


@pytest.mark.field("F28")
@pytest.mark.parametrize(("kind", "early_stop"), [("late", True), ("threads", False)])
@pytest.mark.parametrize("where", REGIONS)
def test_groups_and_checkpoint_regions(kind: str, early_stop: bool, where: str) -> None:
    """Gradients are right; whether a group inside a region offloads is not said."""
    region = partial(torch_checkpoint, use_reentrant=False, early_stop=early_stop)

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(ROWS, WIDTH).requires_grad_()
        h = x * 3
        for _ in range(2):
            h = REGIONS[where](h, partial(group, is_on=is_on), region)
        h.square().sum().backward()
        return gradients(x)

    check(run, kind, steps=3, moves=False)


# Orders of one rank: chunks and virtual stages


@pytest.mark.field("F13")
@kinds
@pytest.mark.parametrize(("stages", "ahead"), [(1, 3), (2, 1), (3, 3)])
@pytest.mark.parametrize("last_first", [False, True], ids=["fifo", "lifo"])
def test_pipeline_orders_of_virtual_stages(
    kind: str, stages: int, ahead: int, last_first: bool
) -> None:
    nets = [Net(("attn",), layers=1 + n % 2, seed=n) for n in range(stages)]
    options = {"ahead": ahead, "last_first": last_first}
    check(lambda on: train(nets, inputs(4), on, **options), kind, steps=3)  # type: ignore[arg-type]


def test_the_backward_queue_of_virtual_stages() -> None:
    """The last stage goes backward first; looking does not take."""
    with session("late") as manager:
        net, chunks, graphs = Net(("attn",)), [], []
        for stage in range(2):
            begin_microbatch(stages=2, stage=stage)
            chunks.append(manager.cur_forward_chunk())
            graphs.append(net(drawn(ROWS, WIDTH, seed=stage).requires_grad_()))
        manager.flush()
        for chunk in reversed(chunks):
            assert manager.front_backward_chunk("attn") is chunk
            assert manager.front_backward_chunk("mlp") is None
            assert manager.pop_backward_chunk("attn") is chunk
        assert manager.pop_backward_chunk() is None


# Markers


delayed = partial(group, delay_offload=True)
switched_off = partial(group, is_on=False)


@kinds
@pytest.mark.parametrize(
    "mark", [group, by_functions, by_autograd_functions, delayed, switched_off]
)
def test_markers(kind: str, mark: Callable[..., Tensor]) -> None:
    """Of four groups, the last two of which are delayed if any are."""

    def program(is_on: bool) -> list[Tensor]:
        x = h = drawn(ROWS, WIDTH).requires_grad_()
        for number in range(4):
            h = mark(h, sines, name=f"part {number % 2}") if is_on else sines(h)
        fine_grained_offloading_group_flush_delayed_groups()
        h.sum().backward()
        return gradients(x)

    check(program, kind, moves=mark is not switched_off, steps=3)


# By module names, and real pipelines


@pytest.mark.field("F52")
def test_the_forward_that_infers_shapes_leaves_nothing() -> None:
    """A schedule runs one in each step behind ``clear_runtime_states``."""

    def run(is_on: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        outputs: list[weakref.ref[Tensor]] = []
        model.register_forward_hook(lambda module, args, y: outputs.append(weakref.ref(y)))
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule, results = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss()), list[Tensor]()
        with attach(schedule, {"linear": "1"}) if is_on else nullcontext():
            for step in range(2):
                x = drawn(8, WIDTH, seed=step)
                schedule.step(x, target=x.flip(0), losses=results)
                results += gradients(*model.parameters())
                stage.clear_runtime_states()
                assert_idle(PipelineOffloadManager.get_instance())
        assert len(outputs) > 4 * 2, "no forward inferred shapes"
        assert not any(ref() is not None for ref in outputs)
        return [result.detach() for result in results]

    with one_rank(), session("late") as manager:
        assert_same(run(True), run(False))
        assert manager.statistics().bytes_offloaded > 0
