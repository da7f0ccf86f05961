"""Calls as Megatron-LM's main writes them: bit for bit without offload, with bytes moved."""

from __future__ import annotations

import pytest
import torch
from helpers.captures import manager_of
from helpers.sessions import assert_idle
from helpers.toy import same_bits
from main_layer import GROUPS, assert_steps_equal, batches, begin, in_group, models, step

from pp_offload import OffloadError, PipelineOffloadManager
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
            y = in_group(y, torch.sin, name)
        assert len(queue) == expected
        other = in_group(y, torch.sin, "b")
        assert len(queue) == (0 if most == 0 else expected + 1)
        other.sum().backward()


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("delta", [0, 1000])
def test_options_of_the_plan_do_what_those_of_the_config_do(fraction: float, delta: int) -> None:
    plans = []
    options = {
        "delta_offload_bytes_across_pp_ranks": delta,
        "activation_offload_fraction": fraction,
    }
    for is_given in (True, False):
        with manager_of("late", **({} if is_given else options)) as (manager, device):
            model, _ = models(manager, pp_rank=2, **(options if is_given else {}))
            for seed in range(2):
                step(model, batches(device.device, seed=seed))
            plans.append((manager.offloader.plan.kept, manager.statistics().bytes_offloaded))
    assert plans[0] == plans[1]
    assert plans[0][0]


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_what_is_discarded_before_its_copy_is_an_error(is_filled_again: bool) -> None:
    """Also where it is back before anybody looks: the copy may have read what others had there."""
    with manager_of("late"):
        begin()
        x = torch.ones(9, requires_grad=True) * 1
        y = in_group(x, lambda x: x * x, "qkv_linear")
        x.untyped_storage().resize_(0)
        others = [torch.full((9,), 7.0) for _ in range(20)]
        if is_filled_again:
            with unwatched():  # else the simulated device would report the race itself
                x.untyped_storage().resize_(2 * x.nbytes)  # elsewhere
                x.detach().fill_(1)
        with pytest.raises(OffloadError, match="'qkv_linear'.*its storage emptied"):
            y.sum().backward()
        del others
