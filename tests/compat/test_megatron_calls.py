"""Calls as Megatron-LM's main writes them: bit for bit without offload, with bytes moved."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from helpers.captures import manager_of
from helpers.toy import assert_idle, same_bits
from main_layer import (
    GROUPS,
    assert_steps_equal,
    batches,
    begin,
    exp_in_a_group,
    in_group,
    models,
    step,
)
from torch import Tensor

from pp_offload import OffloadError, PipelineOffloadManager, RaceError
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.testing.copies import unwatched


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
    assert same_bits(step(on, batches(device)), step(off, batches(device)))
    on.delay()
    before = manager.statistics().bytes_offloaded
    assert_steps_equal(on, off, device)
    assert manager.statistics().bytes_offloaded > before
    assert_idle(manager)


@pytest.mark.parametrize("in_replay", [False, True])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_commits_are_delayed_in_a_replay(
    manager: PipelineOffloadManager, in_replay: bool, is_given_up: bool
) -> None:
    """Else bytes leave with the commit. A replay ends where its step is given up."""
    begin()
    x = torch.ones(9).to(manager.backend.device).requires_grad_()
    if in_replay:
        off_interface.enter_replay()
    if is_given_up:
        manager.abort()
        begin()
    y = in_group(x, lambda y: (y * 2).exp(), delay_offload=True)
    assert (manager.statistics().bytes_offloaded > 0) is (is_given_up or not in_replay)
    off_interface.exit_replay()
    off_interface.flush_delayed_groups()
    assert manager.statistics().bytes_offloaded > 0
    y.sum().backward()


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (0, 0), (1, 1), (2, 2)])
def test_so_many_offloads_of_a_name_are_in_flight(most: int | None, expected: int) -> None:
    """Of each name: what has another one is not waited for."""
    with manager_of("late", rematerialize="none") as (manager, _):
        begin(most)
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
    plans = []
    for is_given in (True, False):
        options = {
            "delta_offload_bytes_across_pp_ranks": delta,
            "activation_offload_fraction": fraction,
        }
        with manager_of("late", **({} if is_given else options)) as (manager, device):
            model, _ = models(manager, pp_rank=2, **(options if is_given else {}))
            for seed in range(2):
                step(model, batches(device.device, seed=seed))
            plans.append((manager.offloader.plan.kept, manager.statistics().bytes_offloaded))
    assert plans[0] == plans[1]
    assert plans[0][0]


class Discarded:
    """A function whose output is emptied once it was saved, and computed again in backward.

    As Megatron-LM's ``CheckpointWithoutOutput``.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.output = self.compute().requires_grad_()

    def compute(self) -> Tensor:
        return torch.sin(self.x * 2)

    def discard_until_gradient_of(self, later: Tensor) -> None:
        storage = self.output.untyped_storage()
        storage.resize_(0)

        def restore(_: Tensor) -> None:
            again = self.compute().untyped_storage()
            storage.resize_(again.nbytes())
            storage.copy_(again)

        later.register_hook(restore)


def test_what_is_discarded_after_its_copy_is_right(manager: PipelineOffloadManager) -> None:
    x = torch.linspace(-1, 1, 600).to(manager.backend.device)
    begin(0)
    norm = Discarded(x)
    out = in_group(norm.output, lambda saved: saved * saved) * 1
    norm.discard_until_gradient_of(out)
    others = [torch.full_like(x, 7.0) for _ in range(4)]  # into the memory that is free now
    out.sum().backward()
    del others
    assert manager.statistics().bytes_offloaded > 0
    leaf = Discarded(x).output
    (leaf * leaf).sum().backward()
    assert same_bits([norm.output.grad], [leaf.grad])


@pytest.mark.parametrize("is_filled_again", [False, True])
@pytest.mark.parametrize("is_seen_early", [False, True])
def test_what_is_discarded_before_its_copy_is_an_error(
    is_filled_again: bool, is_seen_early: bool
) -> None:
    """Also where it is back before anybody looks: the copy may have read what others had there."""
    with manager_of("late") as (manager, _):
        begin()
        x = torch.ones(9, requires_grad=True) * 1
        y = in_group(x, lambda x: x * x, "qkv_linear")
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
