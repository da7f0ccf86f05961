"""Saved tensors live as long as autograd needs them, and come back as they were, whatever is at
their address by then; host and device memory: F05, F29, F30, F35, F36, F41, F45, F50, F61.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_two_backends, skip_on_emulated
from helpers.sessions import assert_idle, begin_microbatch, gradients, group, session
from helpers.toy import (
    Compute,
    Net,
    batches,
    check_steps,
    inputs,
    make_inputs,
    make_model,
    run_step,
    same_bits,
)
from helpers.virtual_training import Training, with_limit
from host_memory import Shape, measure_footprint, shape_zoo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.dlpack import from_dlpack, to_dlpack

from pp_offload import ConfigError, OffloadActivations, OffloadConfig, PipelineOffloadManager
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.backends import Allocated, Backend


@pytest.mark.field("F29")
@on_two_backends
def test_in_the_context_each_microbatch_in_flight_is_on_the_host(
    activations: OffloadActivations, backend: Backend
) -> None:
    """But for what is kept of the last, whose backward comes next."""
    net = Net(["a"], layers=3).to(backend.device)
    net.is_on = False
    held, losses = [0], []
    for x in inputs(3):
        with activations:
            losses.append(net(x.to(backend.device).requires_grad_()).square().mean())
        held.append(activations.statistics().host_bytes_in_use)
    grown = [after - before for before, after in zip(held, held[1:], strict=False)]
    assert grown[0] > 0
    assert all(more > grown[0] for more in grown[1:]), "each sends what the one before it kept"
    losses.clear()
    assert_idle(activations)


# F50: what PyTorch promises of hooks


@pytest.mark.field("F50")
@on_two_backends
def test_saved_tensors_are_read_outside_backward(manager: PipelineOffloadManager) -> None:
    """An input, a leaf and an output, which does not keep its node alive by a cycle."""
    begin_microbatch()
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    h = x * 2
    y = group(h, torch.sin)
    node = y.grad_fn
    assert same_bits([node._saved_self.detach()], [h.detach()])
    assert node._saved_self.requires_grad and node._saved_self.grad_fn is h.grad_fn
    y.sum().backward()
    assert same_bits([x.grad], [2 * (x.detach() * 2).cos()])
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_self
    assert group(x, torch.sin).grad_fn._saved_self.is_leaf
    y = group(x * 2, torch.exp)
    saved = y.grad_fn._saved_result
    assert saved is not y and saved.grad_fn is y.grad_fn
    assert same_bits([saved.detach()], [y.detach()])
    y.grad_fn.metadata["token"] = token = torch.zeros(1)  # lives as long as the node
    alive = weakref.ref(token)
    gc.disable()
    try:
        del y, saved, token, node
        assert alive() is None
    finally:
        gc.enable()
    assert_idle(manager)


def of_sparse(h: Tensor) -> Tensor:
    """Sparse tensors of two layouts are saved; a gradient goes through another."""
    mask = torch.ones(4, 4, device=h.device).tril()
    y = torch.sparse.mm(mask.to_sparse(), h) * torch.sparse.mm(mask.to_sparse_csr(), h.sin())
    return y + torch.sparse.mm((h @ h.t()).to_sparse(), h).sin()


def under_vmap(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * row.exp())(h)


def plainly(h: Tensor) -> Tensor:
    return (h.sin() * h).exp()


@pytest.mark.field("F50")
@on_two_backends
@pytest.mark.parametrize("compute", [of_sparse, under_vmap, plainly])
def test_derivatives_of_any_order(manager: PipelineOffloadManager, compute: Compute) -> None:
    if compute is of_sparse:
        skip_on_emulated(manager.backend, "PyTorch has no sparse tensors of such a device")

    def step(is_on: bool, number: int) -> list[Tensor]:
        x = make_inputs(1, step=number, device=manager.backend.device)[0].requires_grad_()
        begin_microbatch(is_on)
        results = [group(x * 1.5, compute, is_on)]
        for _ in range(3 if compute is plainly else 1):
            results += torch.autograd.grad(results[-1].sum(), x, create_graph=compute is plainly)
        return [result.detach() for result in results]

    check_steps(manager, step)


# F05: an address that is used again


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


@pytest.mark.field("F05")
@on_two_backends
@pytest.mark.parametrize("span", ["groups", "one tensor", "microbatches", "steps", "context"])
def test_offloaded_then_freed(
    manager: PipelineOffloadManager, activations: OffloadActivations, backend: Backend, span: str
) -> None:
    """Every graph lives until the end, so the bytes of all the tensors are still wanted."""
    engine = activations if span == "context" else manager
    activations.stash.max_tensors = 1
    place = OneAddress(backend.device)
    weights = [nn.Parameter(torch.ones(4, 6, device=backend.device)) for _ in range(6)]
    xs = make_inputs(6, device=backend.device)
    outputs, tensor = [], torch.empty(0, device=backend.device)
    for number, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        if span == "steps":
            manager.reset()
        begin_microbatch(number == 0 or span in ("microbatches", "steps"))
        if span == "context":
            with activations:
                outputs.append(place.make(x) * weight)
            activations.stash.send_if_full()  # as the next operator that saves would
        else:
            if span == "one tensor":  # given other memory, it counts no change
                tensor.data = torch.empty(0, device=backend.device)
                tensor.data = place.make(x)
            h = [tensor if span == "one tensor" else place.make(x)]
            outputs.append(group(weight, lambda w, h=h: h.pop() * w, name=f"{number}"))
        backend.synchronize()
        engine.statistics()
    tensor.data = torch.empty(0, device=backend.device)
    assert engine.statistics().bytes_offloaded == 6 * 4 * 6 * 4
    while outputs:
        outputs.pop().sum().backward()
    assert same_bits(gradients(*weights), [x * 3 for x in xs])
    assert_idle(engine)


# F41: subclasses


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


@pytest.mark.field("F41")
@pytest.mark.parametrize("backend", ["cpu", "late"], indirect=True)
@pytest.mark.parametrize("is_marked", [False, True])
def test_of_a_dtensor_only_local_bytes_move(
    manager: PipelineOffloadManager, mesh: DeviceMesh, is_marked: bool
) -> None:
    """And of a DTensor parameter none."""
    weight = distribute_tensor(torch.linspace(-1, 1, 8 * 6).view(8, 6), mesh, [Shard(0)])
    weight = nn.Parameter(weight)
    if is_marked:
        off_interface.mark_not_offloadable(weight)
    value = weight.detach() if is_marked else weight
    (x,) = make_inputs(1, length=2)
    results = []
    for is_on in (True, False):
        begin_microbatch(is_on)
        leaf = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
        y = group(leaf * 1, lambda h: (h * value).t() * weight.t(), is_on)
        y.to_local().sum().backward()
        results.append([t.to_local() for t in gradients(leaf, weight)])
        del y
    assert same_bits(*results)
    # The activation, for the weight's gradient where it has one; and the product.
    assert manager.statistics().bytes_offloaded == (1 if is_marked else 2) * x.nbytes
    assert_idle(manager)


# Host memory


@pytest.mark.field("F30")
@pytest.mark.parametrize("shape", [*shape_zoo(16)][::4], ids=str)
def test_nearly_all_that_is_reserved_was_asked_for(shape: Shape) -> None:
    """Rounded up to powers of two, as the pinned allocator does, it would be as little as 70 %."""
    figures = measure_footprint(shape)
    assert 1 / figures["ours"] >= 0.97
    assert figures["allocations"] == 0


# Device memory


@pytest.mark.field("F35")
@pytest.mark.field("F36")
@on_two_backends
def test_verify_names_who_holds_what_was_offloaded(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """A list, a variable, or autograd itself for a leaf; without them every byte is free."""
    x = torch.ones(4, 6).to(backend.device).requires_grad_()
    weight, held = nn.Parameter(torch.randn(6, 6).to(backend.device)), []

    def compute(h: Tensor) -> Tensor:
        held.append(h @ weight)
        return held[0].sin()

    with session(backend, verify=True) as manager:
        begin_microbatch()
        y = group(x * 1, compute)
        (message,) = manager.verify()
        assert "group 'part'" in message and "96 bytes" in message and "(4, 6)" in message
        assert "a list of 1" in message
        assert [r.getMessage() for r in caplog.records] == [f"pp_offload: {message}"]
        assert manager.verify() == [], "said once"
        held.clear()
        begin_microbatch()
        y = group(x * 1, compute)
        freed = weakref.ref(held.pop().untyped_storage())
        assert manager.verify() == [] and freed() is None
        variable = x * 1
        y = group(variable, torch.sin)
        (message,) = manager.verify()
        assert "the variable 'variable' of test_verify_names" in message
        assert Path(__file__).name in message
        del variable, message
        y = group(x.detach().clone().requires_grad_(), torch.sin)
        (message,) = manager.verify()
        assert "group 'part'" in message and "leaf" in message
        y.sum().backward()


@pytest.mark.field("F61")
@with_limit(40)
def test_an_allocation_between_steps_takes_no_room_from_them(training: Training) -> None:
    """As by an evaluation, or where a checkpoint is loaded. Nobody resets the device's peak."""
    limit, memory, peak_bytes = training.limit_bytes, training.backend.memory, 0

    def allocated() -> Allocated:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, memory.peak_bytes)
        return Allocated(memory.live_bytes, peak_bytes)

    training.backend.allocated = allocated  # type: ignore[method-assign]
    sent = []
    for number in range(9):
        if number == 2:
            torch.empty(2 * limit, dtype=torch.uint8, device="meta")
            assert allocated().peak_bytes >= 2 * limit
        before = training.sent
        assert training.step() <= limit
        sent.append(training.sent - before)
    assert 0 < sent[-1] < 0.8 * sent[0], "some groups stay"


@pytest.mark.field("F45")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
@on_two_backends
@pytest.mark.parametrize("tiers", [("host",), ("disk",)], ids=str)
def test_affinity_is_as_it_was(backend: Backend, tiers: tuple[str, ...]) -> None:
    """Also where a launcher has bound the process, as ``torchrun --numa-binding`` does."""
    before = os.sched_getaffinity(0)
    device = str(backend.device)
    try:
        for bound in (before, {min(before)}):
            os.sched_setaffinity(0, bound)
            with session(backend, tiers=tiers):
                run_step(make_model(device=device), [x.to(device) for x in batches(3)])
                assert os.sched_getaffinity(0) == bound
    finally:
        os.sched_setaffinity(0, before)
    with pytest.raises(ConfigError, match="no option numa_node"):
        OffloadConfig(numa_node=0)  # type: ignore[call-arg]
