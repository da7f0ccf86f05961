"""What comes back is what was saved, at whatever address: F04, F05, F40, F41, F42, F47."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_two_backends
from helpers.scenarios import begin, check_steps, make_inputs, manager_on
from helpers.sessions import gradients, group
from helpers.toy import assert_idle, same_bits
from helpers.wrapped import WRAPPERS, leaves
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.dlpack import from_dlpack, to_dlpack

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    PipelineOffloadManager,
    offload_modules,
)
from pp_offload.backends import Backend, CpuBackend

View = Callable[[Tensor], Tensor]
Entry = tuple[Any, ...]


def geometry(tensor: Tensor) -> Entry:
    return (
        *(tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
        *(tensor.dtype, tensor.device),
    )


class Shows(torch.autograd.Function):
    """Doubles; backward notes the tensors that were saved along."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.seen.extend(ctx.saved_tensors)
        return gradient * 2, None, *(None for _ in ctx.saved_tensors)


def through_group(make: Callable[[], Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """What comes back of tensors that one group saves; nobody else refers to them."""
    off_interface.reset()
    begin()
    seen: list[Tensor] = []
    h = torch.ones(2, device=device, requires_grad=True) * 1
    group(h, lambda h: Shows.apply(h, seen, *make())).sum().backward()
    return seen


# F04: views at one address

SAVES: dict[str, View] = {
    "all": lambda x: x,
    "transposed": lambda x: x.t(),
    "without the first row": lambda x: x[1:],
    "expanded": lambda x: x.expand(3, *x.shape),
    "first row expanded": lambda x: x[0].expand_as(x),
    "as int16": lambda x: x.view(torch.int16),
}


def saved_and_seen(
    engine: Any, device: torch.device, dtype: torch.dtype, groups: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Views of one square matrix, as groups saved them and backward saw them.

    Args:
        engine: A manager, a context, or None for neither.
        device: Of the matrix.
        dtype: Of the matrix.
        groups: Names of views.
    """
    has_groups = isinstance(engine, PipelineOffloadManager)
    begin(has_groups)
    x = make_inputs(1, length=6, device=device)[0].to(dtype).requires_grad_()
    h, seen, total = x * 1.5, [], 0
    for number, names in enumerate(groups):
        with nullcontext() if has_groups or engine is None else engine:
            total = total + group(
                h,
                lambda h, names=names: Shows.apply(h, seen, *(SAVES[name](h) for name in names)),
                has_groups,
                f"group {number}",
            )
    del h
    total.sum().backward()
    return seen


def assert_same_views(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [geometry(t) for t in got] == [geometry(t) for t in expected]
    assert same_bits([t.clone() for t in got], [t.clone() for t in expected])


@pytest.mark.field("F04")
@on_two_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_at_one_address(
    manager: PipelineOffloadManager, activations: OffloadActivations, dtype: torch.dtype
) -> None:
    """Each pair in one group and in two, all of them at once, and in the context."""
    device = manager.backend.device
    for first, second in permutations(SAVES, 2):
        for groups in ([[first, second]], [[first], [second]]):
            got = saved_and_seen(manager, device, dtype, groups)
            assert_same_views(got, saved_and_seen(None, device, dtype, groups))
            del got
            assert_idle(manager)
    everything = [list(SAVES), list(SAVES)[::-1]]
    expected = saved_and_seen(None, device, dtype, everything)
    for engine in (manager, activations):
        if engine is activations:
            activations.stash.max_tensors = len(everything[0])
        before = engine.statistics().bytes_offloaded
        assert_same_views(saved_and_seen(engine, device, dtype, everything), expected)
        moved = engine.statistics().bytes_offloaded - before
        assert moved <= 2 * 36 * dtype.itemsize
        assert moved == 36 * dtype.itemsize or engine is activations, "its bytes, once"
        assert_idle(engine)


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
    inputs = make_inputs(6, device=backend.device)
    outputs, tensor = [], torch.empty(0, device=backend.device)
    for number, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
        if span == "steps":
            manager.reset()
        begin(number == 0 or span in ("microbatches", "steps"))
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
    assert same_bits(gradients(*weights), [x * 3 for x in inputs])
    assert_idle(engine)


# F40: strides and offsets

NUMEL = 210
VIEWS: dict[str, View] = {
    "transpose": lambda x: x.view(14, 15).t(),
    "transpose of a part": lambda x: x.view(14, 15)[2:9, 3:8].t(),
    "every second column": lambda x: x.view(14, 15)[:, ::2],
    "padded rows": lambda x: x.view(14, 15)[:, :12],
    "padded rows, last one whole": lambda x: x.as_strided((14, 12), (15, 1), 3),
    "offset of one": lambda x: x[1:2],
    "expand a row": lambda x: x[:30].expand(50, 30),
    "channels last": lambda x: x.view(2, 5, 7, 3).permute(0, 3, 1, 2),
    "part of channels last": lambda x: x.view(2, 5, 7, 3).permute(0, 3, 1, 2)[:, 1:],
    "0-d": lambda x: x[3],
    "empty": lambda x: x[:0],
}


@pytest.mark.field("F40")
@pytest.mark.usefixtures("vectors_move")
@on_two_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_comes_back_for_no_more_bytes_than_it_has(
    manager: PipelineOffloadManager, make: View, dtype: torch.dtype
) -> None:
    device = manager.backend.device
    view = make(torch.linspace(-3, 3, NUMEL).to(device, dtype))
    most = min(view.nbytes, view.untyped_storage().nbytes())
    seen = through_group(lambda: [make(torch.linspace(-3, 3, NUMEL).to(device, dtype))], device)
    assert_same_views(seen, [view])
    moved = manager.statistics().bytes_offloaded
    assert moved <= most and (moved > 0 or most == 0)
    assert seen[0].untyped_storage().nbytes() <= NUMEL * dtype.itemsize
    seen.clear()
    assert_idle(manager)


# F41: subclasses


@pytest.mark.field("F41")
@on_two_backends
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_makes_the_round_trip(
    manager: PipelineOffloadManager, make: Callable[[list[Tensor]], Tensor]
) -> None:
    device = manager.backend.device
    expected = make(make_inputs(4, device=device))
    (seen,) = through_group(lambda: [make(make_inputs(4, device=device))], device)
    assert type(seen) is type(expected)
    assert_same_views(leaves(seen), leaves(expected))
    assert manager.statistics().bytes_offloaded == sum(t.nbytes for t in leaves(expected))
    del seen
    assert_idle(manager)


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
        begin(is_on)
        leaf = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
        y = group(leaf * 1, lambda h: (h * value).t() * weight.t(), is_on)
        y.to_local().sum().backward()
        results.append([t.to_local() for t in gradients(leaf, weight)])
        del y
    assert same_bits(*results)
    # The activation, for the weight's gradient where it has one; and the product.
    assert manager.statistics().bytes_offloaded == (1 if is_marked else 2) * x.nbytes
    assert_idle(manager)


# F42: devices


@pytest.mark.field("F42")
@on_two_backends
def test_tensors_of_several_devices(manager: PipelineOffloadManager) -> None:
    """Each comes back on its own; meta and fake tensors stay what they are."""
    device = manager.backend.device
    with FakeTensorMode():
        fake = torch.empty(6, 4, device="cuda").t()

    def mixed() -> list[Tensor]:
        inputs, meta = make_inputs(3, device=device), torch.empty(4, 6, device="meta")
        on_cpu = torch.linspace(0, 1, 24).view(4, 6)
        return [inputs[0], meta, inputs[1], on_cpu, inputs[2], meta.t(), fake]

    expected, seen = mixed(), through_group(mixed, device)
    assert [geometry(t) for t in seen] == [geometry(t) for t in expected]
    for got, wanted in zip(seen[:-1], expected, strict=False):
        assert wanted.is_meta or same_bits([got], [wanted])
    assert isinstance(seen[-1], FakeTensor)
    on_device = sum(t.nbytes for t in expected if t.device == device)
    assert manager.statistics().bytes_offloaded == on_device
    del seen, got
    assert_idle(manager)


class OfAnotherDevice(CpuBackend):
    """As on a machine whose accelerator is not where these tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")


@pytest.mark.field("F42")
def test_cpu_tensors_stay_on_the_cpu() -> None:
    with manager_on(OfAnotherDevice()) as manager:
        seen = through_group(lambda: make_inputs(3), torch.device("cpu"))
        assert same_bits(seen, make_inputs(3)) and seen[0].device.type == "cpu"
        assert manager.statistics().bytes_offloaded == 0


# F47: parameters stay


class Views(nn.Module):
    """Views of one flat parameter, as sharding libraries make them, and of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.linspace(-1, 1, 72))
        self.register_buffer("table", torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.flat.detach().view(2, 6, 6).requires_grad_().unbind()
        up, down = self.flat[:36].view(6, 6), self.flat[36:].view(6, 6)
        y = torch.tanh(x @ up.t() @ first) @ down * second.sum()
        return (y @ self.table.t()).sin() * self.table[2]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 6)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6), nn.PReLU(6), nn.BatchNorm1d(6)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Tanh()
    ),
    "views": Views,
}


@pytest.fixture
def moved(manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the storages of all saved tensors whose bytes went to the host."""
    engine, seen = manager.offloader.engine, []
    send = engine.send

    def spy(group: Any, payloads: Any) -> None:
        seen.extend(tensor.untyped_storage().data_ptr() for tensor in payloads.tensors)
        send(group, payloads)

    monkeypatch.setattr(engine, "send", spy)
    return seen


@pytest.mark.field("F47")
@on_two_backends
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("is_by_name", [True, False], ids=["offload_modules", "add_module"])
def test_nothing_of_a_model_moves(
    manager: PipelineOffloadManager,
    moved: list[int],
    make: Callable[[], nn.Module],
    is_by_name: bool,
) -> None:
    device = manager.backend.device
    torch.manual_seed(2)
    on = nn.Sequential(make()).to(device)
    torch.manual_seed(2)
    off = nn.Sequential(make()).to(device)
    if is_by_name:
        offload_modules(on, {"part": "*"})
    else:
        manager.offloader.engine.eligibility.kept.add_module(on)

    def run(is_on: bool, step: int) -> list[Tensor]:
        x = make_inputs(1, step=step, device=device)[0].requires_grad_()
        begin(is_on)
        model = on if is_on else off
        y = group(x * 2, model, is_on and not is_by_name)
        y.square().sum().backward()
        return [y.detach(), *gradients(x, *model.parameters()), *model.buffers()]

    check_steps(manager, run, steps=2)
    assert not {t.untyped_storage().data_ptr() for t in on.state_dict().values()} & set(moved)


@pytest.mark.field("F47")
@on_two_backends
@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_parameter_or_a_marked_tensor_stays_with_its_views(
    manager: PipelineOffloadManager, moved: list[int], is_parameter: bool
) -> None:
    """A view of a Parameter is known by what it is a view of, without being told."""
    device = manager.backend.device
    weight = torch.linspace(0, 1, 36, device=device).view(6, 6).requires_grad_()
    weight = nn.Parameter(weight.detach()) if is_parameter else weight
    if not is_parameter:
        off_interface.mark_not_offloadable(weight)
    begin()
    h = make_inputs(1, device=device)[0].requires_grad_() * 2
    group(h, lambda h: (h @ weight.t()) * weight[1:5].sum(0)).sum().backward()
    assert moved and weight.untyped_storage().data_ptr() not in moved
