"""F26: disabling and enabling, wherever it happens, leaves no hook behind and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from field_checks import Chain, hook_depth, make_inputs
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    PipelineOffloadManager,
    fine_grained_offloading_disable_offload,
    fine_grained_offloading_enable_offload,
    fine_grained_offloading_group_start,
)
from pp_offload._groups.chunk import Chunk
from pp_offload.errors import GroupStateError

pytestmark = pytest.mark.field("F26")

PLACES = (
    "before start",
    "inside, first",
    "inside, between",
    "inside, last",
    "before commit",
    "after commit",
    "in backward",
)


Switch = Callable[[str], None]


def run(device: torch.device, is_on: bool, switch: Switch) -> list[Tensor]:
    """Two groups; ``switch`` is called at every place of the first, which the plan lets leave."""
    (x,) = make_inputs(1, device=device)
    x.requires_grad_()
    if is_on:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
    h = x * 2
    switch("before start")
    with off_interface(is_on, h, "a") as h:
        switch("inside, first")
        y = h.sin()
        switch("inside, between")
        y = y.exp().tanh()
        switch("inside, last")
    switch("before commit")
    y = off_interface.group_commit(y, name="a") if is_on else y
    switch("after commit")
    with off_interface(is_on, y, "a") as y:
        z = y.cos().sigmoid()
    z = off_interface.group_commit(z, name="a") if is_on else z
    z.register_hook(lambda gradient: switch("in backward"))
    z.square().sum().backward()
    return [z.detach(), x.grad]


def nothing(place: str) -> None:
    """Switch nothing."""


@pytest.mark.parametrize(("off_at", "on_at"), list(combinations(PLACES, 2)))
def test_switched_in_a_scope(manager: PipelineOffloadManager, off_at: str, on_at: str) -> None:
    device = manager.backend.device
    expected = run(device, False, nothing)
    depths = []

    def switch(place: str) -> None:
        if place == off_at:
            fine_grained_offloading_disable_offload()
        if place == on_at:
            fine_grained_offloading_enable_offload()
        depths.append((place, hook_depth()))

    assert same_bits(run(device, True, switch), expected)
    # A group that starts while offload is disabled has no hooks, also if it is enabled inside.
    is_off = off_at == "before start"
    depth = {place: int(place.startswith("inside") and not is_off) for place in PLACES}
    assert depths == list(depth.items())
    assert_idle(manager)
    before = manager.statistics().bytes_offloaded
    for _ in range(2):
        assert same_bits(run(device, True, nothing), expected)
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > before


@pytest.mark.parametrize("off_at", PLACES)
def test_disabled_for_good(manager: PipelineOffloadManager, off_at: str) -> None:
    """Until somebody enables it again, also in the steps that follow."""
    device = manager.backend.device
    expected = run(device, False, nothing)

    def switch(place: str) -> None:
        if place == off_at:
            fine_grained_offloading_disable_offload()

    assert same_bits(run(device, True, switch), expected)
    assert hook_depth() == 0
    before = manager.statistics().bytes_offloaded
    assert same_bits(run(device, True, nothing), expected)
    assert manager.statistics().bytes_offloaded == before
    fine_grained_offloading_enable_offload()
    assert same_bits(run(device, True, nothing), expected)
    assert manager.statistics().bytes_offloaded > before
    assert_idle(manager)


def test_a_disabled_step_is_not_warned_of(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Enabled again before the step is closed, as after the warm-up passes of a graph."""
    device = manager.backend.device
    fine_grained_offloading_disable_offload()
    run(device, True, nothing)
    fine_grained_offloading_enable_offload()
    off_interface.reset()
    assert not caplog.records


def test_a_disabled_group_leaves_saving_to_autograd(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of it is packed, no group is opened, and autograd sees changes in place itself."""
    packed: list[Tensor] = []
    monkeypatch.setattr(Chunk, "pack", lambda chunk, group, tensor: packed.append(tensor))
    fine_grained_offloading_disable_offload()
    x = torch.ones(6, device=manager.backend.device).requires_grad_()
    off_interface.init_chunk_handler(None, None, 1)
    with off_interface(True, x, "outer"), off_interface(True, x, "inner") as h:
        assert_no_hooks()
        y = h.exp()
    y = off_interface.group_commit(off_interface.group_commit(y, name="inner"), name="outer")
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        y.sum().backward()
    assert type(raised.value) is RuntimeError
    assert not packed
    chunk = manager.cur_forward_chunk()
    assert chunk is not None and not chunk.groups
    with pytest.raises(GroupStateError, match="no group of that name was started"):
        off_interface.group_commit(y, name="inner")


def same(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("is_on", [True, False], ids=["on, then off", "off, then on"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_switched_before_a_checkpoint_runs_again(
    manager: PipelineOffloadManager, is_on: bool, early_stop: bool
) -> None:
    """A group right inside a checkpoint, and one with hooks between that pass tensors on to it."""
    off_interface.init_chunk_handler(None, None, 1)
    x = torch.linspace(-1, 1, 12).to(manager.backend.device).requires_grad_()

    def function(h: Tensor) -> Tensor:
        with off_interface(True, h.sin(), "a") as h:
            h = off_interface.group_commit(h.exp().tanh(), name="a")
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (same, same)
        between = saved_tensors_hooks(lambda t: pack(t), lambda t: unpack(t))
        with between, off_interface(True, h, "b") as h:
            h = off_interface.group_commit(h.cos().sigmoid(), name="b")
        return h.sin()

    with set_checkpoint_early_stop(early_stop):
        for switches in ((is_on, not is_on), (False, False)):
            manager.switch(switches[0])
            y = checkpoint(function, x * 1, use_reentrant=False).sum()
            manager.switch(switches[1])
            y.backward()
            found, x.grad = x.grad, None
            y = function(x * 1).sum()
            assert same_bits([found], torch.autograd.grad(y, x))
    del y
    assert_idle(manager)


def test_only_what_is_saved_while_enabled_leaves(manager: PipelineOffloadManager) -> None:
    """A pause between two operations of one group."""
    device = manager.backend.device
    (x,) = make_inputs(1, device=device)
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    h = x.requires_grad_() * 2
    with off_interface(True, h, "a") as h:
        fine_grained_offloading_disable_offload()
        y = h.exp()
        fine_grained_offloading_enable_offload()
        z = y.detach().requires_grad_().mul(2).exp()
    off_interface.group_commit(z, name="a")
    assert manager.statistics().bytes_offloaded == z.nbytes
    del y, z


def test_scopes_that_never_opened(manager: PipelineOffloadManager) -> None:
    """Switching inside a scope whose flag is False, and a context around groups."""
    model = Chain(("a", "b"), 2, device=manager.backend.device)
    (x,) = make_inputs(1, device=manager.backend.device)
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    with off_interface(False, x, "none"):
        fine_grained_offloading_disable_offload()
        assert hook_depth() == 0
    with off_interface.get_context(True):
        assert hook_depth() == 1
        fine_grained_offloading_enable_offload()
        with off_interface(True, x, "outer") as x, off_interface(True, x, "inner") as x:
            fine_grained_offloading_disable_offload()
            assert hook_depth() == 3
    assert_no_hooks()
    fine_grained_offloading_enable_offload()
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    model(x.requires_grad_()).sum().backward()
    assert manager.statistics().bytes_offloaded > 0
    assert_idle(manager)


@pytest.mark.parametrize("enables_before_backward", [False, True])
def test_a_context_in_a_checkpoint_takes_nothing_while_off(
    manager: PipelineOffloadManager, enables_before_backward: bool
) -> None:
    """Else what the checkpoint is to drop stays on the device, more than without offload."""
    num_runs = 0

    def region(x: Tensor) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        off_interface.init_chunk_handler(None, None, 1)
        fine_grained_offloading_group_start(x, "g")
        with off_interface.get_context(True):
            y = x.exp().sin()
        return off_interface.group_commit(y, "g")  # type: ignore[no-any-return]

    def gradient() -> Tensor:
        (x,) = make_inputs(1, device=manager.backend.device)
        off_interface.reset()
        checkpoint(region, x.requires_grad_(), use_reentrant=False).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient()
    num_runs = 0
    fine_grained_offloading_disable_offload()
    (x,) = make_inputs(1, device=manager.backend.device)
    off_interface.reset()
    y = checkpoint(region, x.requires_grad_(), use_reentrant=False)
    if enables_before_backward:
        fine_grained_offloading_enable_offload()
    y.sum().backward()
    assert num_runs == 2, "it runs again, as without the engine"
    assert x.grad is not None and same_bits([x.grad], [expected])
    fine_grained_offloading_enable_offload()
    num_runs = 0
    assert same_bits([gradient()], [expected])
    assert num_runs == 2, "switched on, it leaves all to the checkpoint as well"
    assert_idle(manager)
