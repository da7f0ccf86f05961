"""Calls as Megatron-LM's main writes them: bit for bit without offload, with bytes moved."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.toy import assert_idle, same_bits
from main_layer import GROUPS, Model, assert_steps_equal, batches, exp_in_a_group, step
from torch import Tensor

from pp_offload import OffloadConfig, OffloadError, PipelineOffloadManager, RaceError, use_backend
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.testing import SimulatedBackend
from pp_offload.testing.copies import unwatched


def models(manager: PipelineOffloadManager, **options: Any) -> tuple[Model, Model]:
    device = manager.backend.device
    on, off = Model(device), Model(device, is_on=False)
    on.options.update(options)
    return on, off


@pytest.mark.parametrize("most", [None, 0, 1])
def test_steps(manager: PipelineOffloadManager, most: int | None) -> None:
    on, off = models(manager, max_inflight_offloads=most)
    assert_steps_equal(on, off, manager.backend.device)
    assert manager.offload_summary_bytes.keys() <= set(GROUPS)
    assert manager.offload_summary_total_bytes > 0
    if most is not None:  # else sources that are still there may be taken back
        assert manager.statistics().bytes_reloaded > 0
    assert_idle(manager)


def test_replays_with_delayed_groups(manager: PipelineOffloadManager) -> None:
    on, off = models(manager)
    device = manager.backend.device
    assert_steps_equal(on, off, device)
    on.delay()
    before = manager.statistics().bytes_offloaded
    assert_steps_equal(on, off, device)
    assert manager.statistics().bytes_offloaded > before
    assert_idle(manager)


def moved_at_each_end(manager: PipelineOffloadManager, *, in_replay: bool) -> list[bool]:
    """Whether bytes have left after the commit, and after the flush."""
    off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0)
    x = torch.ones(9).to(manager.backend.device).requires_grad_()
    if in_replay:
        off_interface.enter_replay()
    group = off_interface(True, x, "moe_act")
    with group as y:
        y = (y * 2).exp()
    y = group.group_offload(y, delay_offload=True)
    off_interface.exit_replay()
    moved = [manager.statistics().bytes_offloaded > 0]
    off_interface.flush_delayed_groups()
    moved.append(manager.statistics().bytes_offloaded > 0)
    y.sum().backward()
    return moved


@pytest.mark.parametrize("in_replay", [False, True])
def test_commits_are_delayed_in_a_replay(manager: PipelineOffloadManager, in_replay: bool) -> None:
    assert moved_at_each_end(manager, in_replay=in_replay) == [not in_replay, True]


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (0, 0), (1, 1), (2, 2)])
def test_so_many_offloads_of_a_name_are_in_flight(most: int | None, expected: int) -> None:
    """Of each name: what has another one is not waited for."""
    config = OffloadConfig(min_offloaded_tensor_size=1, rematerialize="none")
    with use_backend(SimulatedBackend("late"), config=config) as manager:
        off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0, most)
        queue = manager.offloader.engine.mover.in_flight.queue
        y = torch.ones(9, requires_grad=True) * 1
        for name in ("a", "a", "a"):
            y = exp_in_a_group(y, name)
        assert len(queue) == expected
        other = exp_in_a_group(y, "b")
        assert len(queue) == (0 if most == 0 else expected + 1)
        other.sum().backward()


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("delta", [0, 1000])
def test_options_of_the_plan_do_what_those_of_the_config_do(fraction: float, delta: int) -> None:
    device = torch.device("cpu")
    plans = []
    for is_given in (True, False):
        options = {
            "delta_offload_bytes_across_pp_ranks": delta,
            "activation_offload_fraction": fraction,
        }
        config = OffloadConfig(min_offloaded_tensor_size=1, **({} if is_given else options))
        with use_backend(SimulatedBackend("late"), config=config) as manager:
            model = Model(device)
            model.options.update(options if is_given else {}, pp_rank=2)
            for seed in range(2):
                step(model, batches(device, seed=seed))
            plans.append((manager.offloader.plan.kept, manager.statistics().bytes_offloaded))
    assert plans[0] == plans[1]
    assert plans[0][0]


class Discarded:
    """A function whose output is emptied once it was saved, and computed again in backward.

    As Megatron-LM's ``CheckpointWithoutOutput``.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        with torch.no_grad():
            made = self.compute()
        self.output = made.requires_grad_()

    def compute(self) -> Tensor:
        return torch.sin(self.x.detach() * 2)

    def discard_until_gradient_of(self, later: Tensor) -> None:
        self.output.untyped_storage().resize_(0)
        later.register_hook(lambda _: self._restore())

    def _restore(self) -> None:
        with torch.no_grad():
            again = self.compute().untyped_storage()
            self.output.untyped_storage().resize_(again.nbytes())
            self.output.untyped_storage().copy_(again)


def gradients_with_a_discarded_input(device: torch.device, is_on: bool, most: int | None) -> Any:
    leaf = torch.linspace(-1, 1, 600, requires_grad=True)
    x = leaf.detach().to(device)
    if is_on:
        off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0, most)
    norm = Discarded(x)
    group = off_interface(is_on, norm.output, "qkv_linear")
    with group as saved:
        y = saved * saved
    out = group.group_offload(y) * 1
    if is_on:
        norm.discard_until_gradient_of(out)
    others = [torch.full_like(x, 7.0) for _ in range(4)]  # into the memory that is free now
    out.sum().backward()
    del others
    return [norm.output.grad]


def test_what_is_discarded_after_its_copy_is_right(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    got = gradients_with_a_discarded_input(device, True, 0)
    assert manager.statistics().bytes_offloaded > 0
    assert same_bits(got, gradients_with_a_discarded_input(device, False, 0))


@pytest.mark.parametrize("is_filled_again", [False, True])
@pytest.mark.parametrize("is_seen_early", [False, True])
def test_what_is_discarded_before_its_copy_is_an_error(
    is_filled_again: bool, is_seen_early: bool
) -> None:
    """Also where it is back before anybody looks: the copy may have read what others had there."""
    simulated = SimulatedBackend("late")
    with use_backend(simulated, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0)
        x = torch.ones(9, requires_grad=True) * 1
        group = off_interface(True, x, "qkv_linear")
        with group as x:
            y = x * x
        y = group.group_offload(y)
        storage, nbytes, address = x.untyped_storage(), x.nbytes, x.data_ptr()
        storage.resize_(0)
        others = [torch.full((9,), 7.0) for _ in range(20)]
        if is_filled_again:
            with unwatched():  # else the simulated device would report the race itself
                storage.resize_(nbytes)
                if storage.data_ptr() == address:  # it is elsewhere while the old memory is there
                    storage.resize_(2 * nbytes)
                storage.copy_(torch.ones(storage.nbytes() // 4).untyped_storage())
        if is_seen_early:
            with suppress(RaceError):  # the simulated device sees that its copy reads nothing
                manager.backend.synchronize()
            manager.offloader.engine.mover.poll()
        with pytest.raises(OffloadError, match="'qkv_linear'.*(given up|its storage emptied)"):
            y.sum().backward()
        del others
