"""F05: a tensor at the address of one that is gone is not taken for it."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from field_checks import make_inputs
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F05")

NUM_TENSORS = 6
NBYTES = 4 * 6 * 4


class OneAddress:
    """Makes one tensor after another, each a storage of its own, all at the same address."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(4, 6, device=device)
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def make(self, x: Tensor) -> Tensor:
        """Three times ``x``; what was made before must be gone by now."""
        assert not any(ref() is not None for ref in self._storages), "its memory is still in use"
        h = from_dlpack(to_dlpack(self._memory))
        assert h.data_ptr() == self._memory.data_ptr()
        torch.mul(x, 3, out=h)
        self._storages.append(weakref.ref(h.untyped_storage()))
        return h


def saved(h: Tensor, weight: Tensor, name: str, is_on: bool) -> Tensor:
    """The output of a group that saves ``h``."""
    with off_interface(is_on, h, name):
        y = h * weight
    return off_interface.group_commit(y, name=name) if is_on else y


def begin(is_on: bool, *, is_step: bool) -> None:
    if is_on and is_step:
        off_interface.reset()
    if is_on:
        off_interface.init_chunk_handler(None, None, 1)


def settle(
    engine: PipelineOffloadManager | OffloadActivations, backend: Backend | None = None
) -> None:
    """Every copy has been made, and the engine has noticed."""
    (backend or engine.backend).synchronize()
    engine.statistics()


def weight_on(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 6, device=device))


@pytest.mark.parametrize("is_one_tensor", [False, True], ids=["each its own", "one tensor"])
@pytest.mark.parametrize("span", ["groups", "microbatches", "steps"])
def test_offloaded_then_freed(
    manager: PipelineOffloadManager, span: str, is_one_tensor: bool
) -> None:
    """Every graph lives until the end, so the bytes of all the tensors are still wanted. A tensor
    that was given other memory counts no change.
    """
    device = manager.backend.device
    place, tensor = OneAddress(device), torch.empty(0, device=device)
    weights = [weight_on(device) for _ in range(NUM_TENSORS)]
    inputs = make_inputs(NUM_TENSORS, device=device)
    outputs = []
    for number, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
        if number == 0 or span != "groups":
            begin(True, is_step=number == 0 or span == "steps")
        if is_one_tensor:
            tensor.data = torch.empty(0, device=device)
            tensor.data = place.make(x)
        outputs.append(saved(tensor if is_one_tensor else place.make(x), weight, f"{number}", True))
        settle(manager)
    tensor.data = torch.empty(0, device=device)
    assert manager.statistics().bytes_offloaded == NUM_TENSORS * NBYTES
    assert manager.statistics().live_tensors == NUM_TENSORS
    while outputs:
        outputs.pop().sum().backward()
    assert same_bits([w.grad for w in weights], [x * 3 for x in inputs])
    assert_idle(manager)


@pytest.mark.parametrize("is_same_group", [True, False], ids=["same group", "next group"])
def test_saved_in_a_graph_that_is_dropped(
    manager: PipelineOffloadManager, is_same_group: bool
) -> None:
    """Save A in a group, drop its graph, and save B at its address."""
    device = manager.backend.device
    place, weight = OneAddress(device), weight_on(device)
    for step in range(NUM_TENSORS):
        dropped, x = make_inputs(2, step=step, device=device)
        begin(True, is_step=True)
        if is_same_group:
            with off_interface(True, x, "core"):
                place.make(dropped) * weight
                y = place.make(x) * weight
            y = off_interface.group_commit(y, name="core")
        else:
            y = saved(place.make(dropped), weight, "core", True)
            settle(manager)
            del y
            y = saved(place.make(x), weight, "next", True)
        y.sum().backward()
        assert same_bits([weight.grad], [x * 3]), step
        weight.grad = None
        del y
        settle(manager)
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0


def test_in_backward(manager: PipelineOffloadManager) -> None:
    """A comes back from the host, is used and freed; B is then saved where A was at first."""
    device = manager.backend.device
    place, weight = OneAddress(device), weight_on(device)
    for number in range(NUM_TENSORS):
        first, second = make_inputs(2, step=number, device=device)
        begin(True, is_step=number == 0)
        y = saved(place.make(first), weight, "core", True)
        settle(manager)
        (of_first,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
        begin(True, is_step=False)
        z = saved(place.make(second), weight, "core", True)
        (of_second,) = torch.autograd.grad(z.sum(), weight)
        (again,) = torch.autograd.grad(y.sum(), weight)
        assert same_bits([of_first, of_second, again], [first * 3, second * 3, first * 3])
        del y, z
        settle(manager)
    assert_idle(manager)


def test_a_mark_goes_with_its_tensor(manager: PipelineOffloadManager) -> None:
    """What was said of a tensor that is gone is not said of the next one at its address."""
    device = manager.backend.device
    place, weight = OneAddress(device), weight_on(device)
    kept, moved = make_inputs(2, device=device)
    off_interface.mark_not_offloadable(place.make(kept))
    begin(True, is_step=True)
    y = saved(place.make(moved), weight, "core", True)
    assert manager.statistics().bytes_offloaded == NBYTES
    y.sum().backward()
    assert same_bits([weight.grad], [moved * 3])
    assert_idle(manager)


@pytest.mark.parametrize("is_one_forward", [True, False], ids=["one forward", "microbatches"])
def test_in_the_context(
    activations: OffloadActivations, backend: Backend, is_one_forward: bool
) -> None:
    """Every graph lives until the end; one forward of all, or one forward of each."""
    activations.stash.max_tensors = 1
    place = OneAddress(backend.device)
    weights = [weight_on(backend.device) for _ in range(NUM_TENSORS)]
    inputs = make_inputs(NUM_TENSORS, device=backend.device)
    outputs = []
    with activations if is_one_forward else nullcontext():
        for x, weight in zip(inputs, weights, strict=True):
            with nullcontext() if is_one_forward else activations:
                outputs.append(place.make(x) * weight)
            activations.stash.send_if_full()  # as the next operator that saves would
            settle(activations, backend)
    assert activations.statistics().bytes_offloaded == NUM_TENSORS * NBYTES
    while outputs:
        outputs.pop().sum().backward()
    assert same_bits([w.grad for w in weights], [x * 3 for x in inputs])
    assert_idle(activations)


def test_dropped_in_the_context(activations: OffloadActivations, backend: Backend) -> None:
    """Save A, drop its graph before it leaves, and save B at its address."""
    place, weight = OneAddress(backend.device), weight_on(backend.device)
    for step in range(NUM_TENSORS):
        dropped, x = make_inputs(2, step=step, device=backend.device)
        with activations:
            place.make(dropped) * weight
            y = place.make(x) * weight
        y.sum().backward()
        assert same_bits([weight.grad], [x * 3]), step
        weight.grad = None
        del y
        settle(activations, backend)
        assert_idle(activations)
