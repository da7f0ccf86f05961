"""Which bytes move, and that every view comes back as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TWO_BACKENDS, make_backend, on_two_backends
from pp_offload._transfer.payload import tickets_for
from torch import Tensor

from pp_offload import ChunkOffloadHandler, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._core.group import Group
from pp_offload._core.saved import Resident
from pp_offload._core.saved import Saved as SavedActivation
from pp_offload._core.tensors import Geometry
from pp_offload._groups.offloader import Offloader

pytestmark = pytest.mark.usefixtures("vectors_move")

Make = Callable[[Tensor], Tensor]

COVERING: dict[str, Make] = {
    "itself": lambda x: x,
    "transpose": lambda x: x.view(40, 60).t(),
    "permute": lambda x: x.view(4, 10, 60).permute(2, 0, 1),
    "channels last": lambda x: x.view(2, 10, 15, 8).permute(0, 3, 1, 2),
    "other dtype": lambda x: x.view(torch.int16),
    "wider dtype": lambda x: x.view(torch.float64),
    "expanded whole": lambda x: x.view(40, 1, 60).expand(40, 7, 60),
    "overlapping windows": lambda x: x.unfold(0, 100, 50),
    "added dimensions": lambda x: x.view(40, 60)[None, :, None],
}
"""Views of all of a storage of 2400 floats."""

PARTIAL: dict[str, Make] = {
    "second half": lambda x: x[1200:],
    "most rows": lambda x: x.view(40, 60)[3:],
    "padded rows": lambda x: x.view(40, 60)[:, :50],
    "padded rows in the middle": lambda x: x.view(40, 60)[:, 5:55],
    "every second": lambda x: x[::2],
    "every second from one": lambda x: x[1::2],
    "first and last row": lambda x: x.view(3, 800)[::2],
}
"""Views of half of it or more, but not of all."""

SMALL: dict[str, Make] = {
    "first rows": lambda x: x.view(40, 60)[:4],
    "a column block": lambda x: x.view(40, 60)[:, :7],
    "a transposed block": lambda x: x.view(40, 60)[:9, :11].t(),
    "every fifth": lambda x: x[::5],
    "0-d at the start": lambda x: x[0],
    "expanded scalar": lambda x: x[0].expand(50, 3),
    "expanded row": lambda x: x[:60].expand(33, 60),
    "expanded inside": lambda x: x[:60].view(6, 1, 10).expand(6, 9, 10),
    "bytes of a slice": lambda x: x[:100].view(torch.uint8),
    "overlapping windows": lambda x: x[:90].unfold(0, 20, 10),
    "a slice of channels last": lambda x: x.view(2, 10, 15, 8).permute(0, 3, 1, 2)[:, :3],
}
"""Views of less than half of it, at a small offset."""

FAR: dict[str, Make] = {
    "0-d at the end": lambda x: x[2399],
    "a far slice": lambda x: x[2000:2010],
    "a far row": lambda x: x.view(40, 60)[33],
    "a far expanded row": lambda x: x[2001:2061].expand(5, 60),
}
"""Small views behind more bytes than they span."""

DEGENERATE: dict[str, Make] = {
    "column": lambda x: x.view(1, 2400).t(),
    "one channel, channels last": lambda x: x.view(2, 1, 40, 30).contiguous(
        memory_format=torch.channels_last
    ),
    "size one with a stride of its own": lambda x: x.as_strided((1, 2400), (7, 1)),
    "size one with stride zero": lambda x: x.as_strided((1, 2400), (0, 1)),
}
"""A contiguous whole storage whose dimensions of size one have strides of their own."""

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


def whole(manager: PipelineOffloadManager) -> Tensor:
    """A storage of 2400 floats with every bit pattern allowed, also NaNs."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, (9600,), dtype=torch.uint8, generator=generator)
    return bits.to(manager.backend.device).view(torch.float32)


def open_chunk(manager: PipelineOffloadManager) -> ChunkOffloadHandler:
    manager.init_model_chunk_offload_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    return chunk


def as_bytes(tensor: Tensor) -> Tensor:
    """Values by their bits, so that NaNs count."""
    return (
        tensor.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(torch.uint8)
    )


def offload_all(manager: PipelineOffloadManager, tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """What comes back of one group that saves ``tensors``, and how many bytes moved."""
    chunk = open_chunk(manager)
    group = chunk.on_group_start_forward("mlp")
    tags = [chunk.pack(group, tensor) for tensor in tensors]
    before = manager.statistics().bytes_offloaded
    chunk.on_group_commit_forward(None)
    manager.backend.synchronize()
    moved = manager.statistics().bytes_offloaded - before
    return [chunk.tensor_pop(tag) for tag in tags], moved


def check_same(back: Tensor, view: Tensor) -> None:
    assert back.dtype == view.dtype
    assert back.size() == view.size()
    assert back.stride() == view.stride()
    assert back.device == view.device
    assert back.storage_offset() == view.storage_offset()
    assert torch.equal(as_bytes(back), as_bytes(view))


def round_trip(manager: PipelineOffloadManager, make: Make) -> int:
    """Bytes moved for one view, which came back the same."""
    view = make(whole(manager))
    (back,), moved = offload_all(manager, [view])
    assert back.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    check_same(back, view)
    return moved


@on_two_backends
@pytest.mark.parametrize("name", COVERING)
def test_a_view_of_all_moves_as_its_storage(manager: PipelineOffloadManager, name: str) -> None:
    assert round_trip(manager, COVERING[name]) == 9600


@on_two_backends
@pytest.mark.parametrize("name", PARTIAL)
def test_a_view_with_others_bytes_beside_it_moves_alone(
    manager: PipelineOffloadManager, name: str
) -> None:
    view = PARTIAL[name](whole(manager))
    assert round_trip(manager, PARTIAL[name]) == view.nbytes < 9600


@on_two_backends
@pytest.mark.parametrize("name", SMALL)
def test_a_smaller_view_moves_alone(manager: PipelineOffloadManager, name: str) -> None:
    view = SMALL[name](whole(manager))
    moved = round_trip(manager, SMALL[name])
    assert moved == Geometry.of(view).distinct_numel * view.itemsize
    assert moved < 9600 / 2


@on_two_backends
@pytest.mark.parametrize("name", FAR)
def test_a_far_view_moves_alone_and_keeps_its_offset(
    manager: PipelineOffloadManager, name: str
) -> None:
    view = FAR[name](whole(manager))
    assert round_trip(manager, FAR[name]) == Geometry.of(view).distinct_numel * 4


@on_two_backends
@pytest.mark.parametrize("name", DEGENERATE)
def test_strides_of_dimensions_of_size_one_come_back(
    manager: PipelineOffloadManager, name: str
) -> None:
    assert round_trip(manager, DEGENERATE[name]) == 9600


@on_two_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(manager: PipelineOffloadManager, dtype: torch.dtype) -> None:
    tensor = whole(manager).view(torch.uint8)
    tensor = (tensor % 2).view(dtype) if dtype is torch.bool else tensor.view(dtype)
    backs, moved = offload_all(manager, [tensor, tensor[: tensor.numel() // 4]])
    assert moved == 9600
    check_same(backs[0], tensor)
    check_same(backs[1], tensor[: tensor.numel() // 4])


@on_two_backends
def test_a_broadcast_is_not_materialised(manager: PipelineOffloadManager) -> None:
    scalar = torch.ones((), device=manager.backend.device)
    (back,), moved = offload_all(manager, [scalar.expand(1000, 1000)])
    assert moved == 4
    assert back.untyped_storage().nbytes() == 4
    assert back.shape == (1000, 1000)
    assert back.stride() == (0, 0)


@on_two_backends
def test_a_gathered_broadcast_comes_back_small(manager: PipelineOffloadManager) -> None:
    view = whole(manager)[:10].expand(100, 10)
    (back,), moved = offload_all(manager, [view])
    assert moved == 40
    assert back.untyped_storage().nbytes() < 9600


@on_two_backends
def test_query_key_and_value_move_as_one(manager: PipelineOffloadManager) -> None:
    projected = whole(manager).view(40, 60)
    views = list(projected.split(20, dim=1))
    backs, moved = offload_all(manager, views)
    assert moved == 9600
    for back, view in zip(backs, views, strict=True):
        check_same(back, view)
    assert len({back.untyped_storage()._cdata for back in backs}) == 1


@on_two_backends
def test_small_views_that_cover_half_together_move_as_the_storage(
    manager: PipelineOffloadManager,
) -> None:
    x = whole(manager)
    views = [x[:700], x[1700:]]
    backs, moved = offload_all(manager, views)
    assert moved == 9600
    for back, view in zip(backs, views, strict=True):
        check_same(back, view)


@on_two_backends
def test_views_that_do_not_reach_the_end_of_their_storage_move_alone(
    manager: PipelineOffloadManager,
) -> None:
    """However much of it they cover: what lies behind them is somebody else's."""
    x = whole(manager)
    views = [x[:1400], x[:1300].view(13, 100)]
    got, moved = offload_all(manager, views)
    assert moved == 2700 * 4
    for back, view in zip(got, views, strict=True):
        check_same(back, view)


@on_two_backends
def test_two_small_views_of_one_storage_move_alone(manager: PipelineOffloadManager) -> None:
    x = whole(manager)
    views = [x[:100], x.view(40, 60)[:, :3]]
    backs, moved = offload_all(manager, views)
    assert moved == 400 + 40 * 3 * 4
    for back, view in zip(backs, views, strict=True):
        check_same(back, view)


@on_two_backends
@pytest.mark.parametrize("make", [COVERING["itself"], COVERING["transpose"], SMALL["first rows"]])
def test_a_tensor_saved_many_times_moves_once(manager: PipelineOffloadManager, make: Make) -> None:
    view = make(whole(manager))
    backs, moved = offload_all(manager, [view, view.detach(), view.view_as(view)])
    assert moved in (9600, view.nbytes)
    assert len(backs) == 3
    for back in backs:
        assert back.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
        check_same(back, view)


@on_two_backends
def test_views_of_different_dtypes_move_as_one(manager: PipelineOffloadManager) -> None:
    x = whole(manager)
    views = [x, x.view(torch.int64), x.view(torch.bfloat16)[7:], x.view(torch.uint8)[3:5]]
    backs, moved = offload_all(manager, views)
    assert moved == 9600
    for back, view in zip(backs, views, strict=True):
        check_same(back, view)


@on_two_backends
def test_a_storage_saved_by_two_groups_moves_once(manager: PipelineOffloadManager) -> None:
    x = whole(manager)
    chunk = open_chunk(manager)
    tags = []
    for name, view in (("a", x), ("b", x.view(40, 60).t()), ("c", x.view(60, 40))):
        group = chunk.on_group_start_forward(name)
        tags.append((chunk.pack(group, view), view))
        chunk.on_group_commit_forward(None)
    assert manager.statistics().bytes_offloaded == 9600
    for tag, view in reversed(tags):
        check_same(chunk.tensor_pop(tag), view)


@on_two_backends
def test_different_storages_move_apart(manager: PipelineOffloadManager) -> None:
    tensors = [torch.full((n,), float(n), device=manager.backend.device) for n in (1, 5, 300)]
    backs, moved = offload_all(manager, tensors)
    assert moved == 306 * 4
    for back, tensor in zip(backs, tensors, strict=True):
        check_same(back, tensor)


@on_two_backends
@pytest.mark.parametrize("name", [*COVERING, *PARTIAL, *SMALL])
def test_offload_and_reload_of_one_tensor_do_the_same(
    manager: PipelineOffloadManager, name: str
) -> None:
    chunk = open_chunk(manager)
    view = {**SMALL, **PARTIAL, **COVERING}[name](whole(manager))
    state = chunk.offload(view)
    check_same(chunk.reload(state), view)
    check_same(chunk.reload(state), view)


@on_two_backends
def test_what_stays_is_the_tensor_itself(manager: PipelineOffloadManager) -> None:
    chunk = open_chunk(manager)
    group = chunk.on_group_start_forward("mlp")
    parameter = torch.nn.Parameter(whole(manager).clone())
    for kept in (parameter, parameter.detach(), parameter.view(40, 60).t()):
        tag = chunk.pack(group, kept)
        assert isinstance(tag, Resident)
        assert chunk.tensor_pop(tag).data_ptr() == kept.data_ptr()


def test_what_is_saved_last_is_asked_for_first() -> None:
    """By its last save, whatever was saved between that and the first."""
    transfer, group = Offloader.alone().transfer, Group("mlp")
    x, gate, up = torch.ones(3), torch.ones(4), torch.ones(5)
    saved = [SavedActivation(one, group) for one in (x, gate, x.view(1, 3), up)]
    tickets = tickets_for(saved, transfer, "mlp")
    assert [ticket.nbytes for ticket in tickets] == [16, 12, 20]


def test_deciding_copies_nothing() -> None:
    class Owner:
        name = "mlp"

        def on_use(self) -> None:
            raise AssertionError

    x = torch.arange(2400.0)
    saved = [SavedActivation(view, Owner()) for view in (x, x.view(40, 60).t(), x[::2])]
    transfer = Offloader.alone().transfer
    (ticket,) = tickets_for(saved, transfer, "mlp")
    assert ticket.storage is x.untyped_storage()
    assert ticket.payload is not None
    assert ticket.payload.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert list(ticket.members) == saved
    assert tickets_for([], transfer, "mlp") == []
    assert transfer.counters.bytes_offloaded == 0


@pytest.mark.parametrize("kind", TWO_BACKENDS)
@pytest.mark.parametrize(
    "options", [{"tiers": ("disk",)}, {"verify": True}], ids=["disk", "verify"]
)
def test_one_element_of_any_stride_comes_back(kind: str, options: dict[str, Any]) -> None:
    """Such a view is contiguous whatever its stride; its bytes are looked at all the same."""
    config = OffloadConfig(min_offloaded_tensor_size=1, **options)
    with use_backend(make_backend(kind), config=config) as manager:
        x = torch.linspace(1, 2, 6).to(manager.backend.device)
        weight = torch.ones(6).to(x.device).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1)
        with off_interface(True, x, "g"):
            y = x[:1].expand(6) * weight, x[::6] * weight[:1]
        off_interface.group_commit(y, name="g")
        assert manager.statistics().bytes_offloaded > 0
        (got,) = torch.autograd.grad([part.sum() for part in y], weight)
        expected = x[:1].expand(6).clone()
        expected[0] *= 2
        assert torch.equal(got, expected)
