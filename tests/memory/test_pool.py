"""The tensor pool: who owns what, in which order it comes back, and how much is held."""

from __future__ import annotations

import gc
import inspect
import random
import weakref
from contextlib import suppress

import pytest
import torch
from injected import Injected, chosen, files, interrupt_at, points_in

from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.pool import GPUTensorPool


@pytest.fixture
def pool() -> GPUTensorPool:
    return GPUTensorPool(device="cpu")


def test_signatures_are_megatrons() -> None:
    def parameters(name: str) -> list[tuple[str, object]]:
        signature = inspect.signature(getattr(GPUTensorPool, name))
        return [(p.name, p.default) for p in signature.parameters.values()][1:]

    none = inspect.Parameter.empty
    assert parameters("__init__") == [("device", "cuda"), ("pin_memory", False)]
    assert parameters("allocate") == [("shape", none), ("dtype", torch.float32)]
    assert parameters("free") == [("tensor", none)]
    assert parameters("get_pool_status") == [("shape", None), ("dtype", None)]
    assert parameters("reset") == parameters("clear") == []
    assert isinstance(inspect.getattr_static(GPUTensorPool, "_calculate_memory_size"), staticmethod)
    assert GPUTensorPool._calculate_memory_size((3, 5), torch.bfloat16) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2), (3, 5), torch.Size([7])])
def test_allocates_what_was_asked_for(pool, shape, dtype) -> None:
    tensor = pool.allocate(shape, dtype)
    assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    pool.free(tensor)
    assert pool.allocate(shape, dtype) is tensor


def test_zero_size_tensors_are_told_apart(pool) -> None:
    first, second = pool.allocate((0, 3)), pool.allocate((0, 3))
    pool.free(first)
    with pytest.raises(ValueError, match="already free"):
        pool.free(first)
    pool.free(second)


def test_the_longest_free_tensor_comes_first(pool) -> None:
    tensors = [pool.allocate((4,)) for _ in range(3)]
    for index in (2, 0, 1):
        pool.free(tensors[index])
    again = [pool.allocate((4,)) for _ in range(3)]
    assert [id(t) for t in again] == [id(tensors[i]) for i in (2, 0, 1)]


def test_dtypes_and_shapes_do_not_share_a_queue(pool) -> None:
    pool.free(pool.allocate((4, 2), torch.float32))
    for shape, dtype in [((4, 2), torch.int32), ((2, 4), torch.float32), ((8,), torch.float32)]:
        tensor = pool.allocate(shape, dtype)
        assert tuple(tensor.shape) == shape and tensor.dtype == dtype


def test_a_foreign_tensor_raises(pool) -> None:
    for foreign in (torch.empty(4), GPUTensorPool(device="cpu").allocate((4,))):
        with pytest.raises(ValueError, match="does not belong to this pool"):
            pool.free(foreign)


def test_double_free_raises_also_after_the_tensor_was_let_go(pool) -> None:
    tensor = pool.allocate((4,))
    pool.free(tensor)
    with pytest.raises(ValueError, match="free each tensor once"):
        pool.free(tensor)
    pool.allocate((256, 256))
    with pytest.raises(ValueError, match="does not belong"):
        pool.free(tensor)


def test_a_view_frees_the_tensor_it_is_of(pool) -> None:
    tensor = pool.allocate((4, 4))
    pool.free(tensor.t()[1:])
    assert pool.allocate((4, 4)) is tensor


def test_a_resized_tensor_is_not_handed_out_again(pool) -> None:
    tensor, other = pool.allocate((4,)), pool.allocate((4,)).fill_(2)
    tensor.resize_(2)
    pool.free(tensor)
    again = pool.allocate((4,))
    assert again is not tensor
    assert again.fill_(1).tolist() == [1] * 4 and other.tolist() == [2] * 4


def test_a_free_tensor_keeps_no_graph_alive(pool) -> None:
    class Graph:
        """Stands for what a node of the graph keeps alive."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.graph = Graph()
            return tensor.clone()

    source = Node.apply(torch.ones(4, requires_grad=True))
    graph = weakref.ref(source.grad_fn.graph)
    tensor = pool.allocate((4,)).copy_(source)
    del source
    assert graph() is not None
    pool.free(tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert graph() is None
    again = pool.allocate((4,))
    assert again.data_ptr() == address and not again.requires_grad


def test_other_shapes_give_their_bytes_back_the_longest_unused_first(pool) -> None:
    small = [pool.allocate((size,), torch.uint8) for size in (10, 20, 30)]
    for tensor in small:
        pool.free(tensor)
    pool.allocate((25,), torch.uint8)
    assert pool.get_pool_status((30,), torch.uint8)["free_count"] == 1
    assert pool.get_pool_status()["total_bytes"] == 25 + 30


def test_the_footprint_follows_what_is_in_use() -> None:
    rng, pool = random.Random(0), GPUTensorPool(device="cpu")
    in_use: list[torch.Tensor] = []
    most = 0
    for _ in range(2000):
        if in_use and rng.random() < 0.5:
            pool.free(in_use.pop(rng.randrange(len(in_use))))
        else:
            dtype = rng.choice([torch.int8, torch.half])
            in_use.append(pool.allocate((rng.randrange(20), 3), dtype))
        live = sum(t.nbytes for t in in_use)
        most = max(most, live)
        status = pool.get_pool_status()
        assert status["allocated_bytes"] == live
        assert status["total_bytes"] <= most
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in in_use if t.nbytes)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "bytes are shared"


def test_a_new_shape_gets_the_bytes_of_old_ones_without_asking_the_system(
    pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: asked.append(a) or empty(*a, **k))
    for step in range(200):
        tensors = [pool.allocate((100 + step % 50, 128)) for _ in range(8)]
        for tensor in tensors:
            pool.free(tensor)
        if step == 50:
            after_all_shapes = len(asked)
    assert len(asked) == after_all_shapes


def test_slabs_nobody_uses_go_back_before_another_is_asked_for(pool) -> None:
    before = reserved_bytes()
    for kib in (100, 300, 900, 2700, 8100):
        pool.free(pool.allocate((kib, 1024), torch.uint8))
    assert reserved_bytes() - before == 8192 * 1024


def test_an_interrupt_at_any_line_loses_no_bytes_and_shares_none() -> None:
    def work(pool: GPUTensorPool) -> None:
        tensors = [pool.allocate((size, 1000)) for size in (20, 40, 30)]
        for tensor in tensors:
            pool.free(tensor)
        pool.free(pool.allocate((80, 1000)))

    lines = files("_memory/pool", "_memory/host_pool", "_memory/ranges", "_memory/budget")
    before = reserved_bytes()
    for point in chosen(points_in(lines, lambda: work(GPUTensorPool("cpu"))), every=3):
        pool = GPUTensorPool("cpu")
        kept = pool.allocate((35, 1000)).fill_(35)
        with suppress(Injected), interrupt_at(point.number, lines):
            work(pool)
        tensors = [kept, *(pool.allocate((size, 1000)).fill_(size) for size in (30, 10, 40))]
        assert all(tensor.eq(len(tensor)).all() for tensor in tensors), point
        pool.clear()
        del kept, tensors
        assert reserved_bytes() == before, point


def test_status_counts_bytes_and_utilisation(pool) -> None:
    kept, freed = pool.allocate((4,)), pool.allocate((4,))
    pool.allocate((2, 2), torch.int64)
    pool.free(freed)
    assert pool.get_pool_status((4,), torch.float32) == {
        "num_pools": 1,
        "total_count": 2,
        "allocated_count": 1,
        "free_count": 1,
        "total_bytes": 32,
        "allocated_bytes": 16,
        "free_bytes": 16,
        "utilization": 0.5,
    }
    whole = pool.get_pool_status()
    assert (whole["num_pools"], whole["total_count"], whole["total_bytes"]) == (2, 3, 64)
    assert whole["utilization"] == pytest.approx(2 / 3)
    assert set(pool.get_pool_status((9,), torch.float32).values()) == {0}
    pool.free(kept)


def test_status_needs_both_or_neither(pool) -> None:
    with pytest.raises(ValueError, match="pass both"):
        pool.get_pool_status((4,))
    with pytest.raises(ValueError, match="pass both"):
        pool.get_pool_status(dtype=torch.float32)


def test_reset_makes_everything_available(pool) -> None:
    tensors = [pool.allocate((4,)) for _ in range(3)]
    pool.free(tensors[1])
    pool.reset()
    status = pool.get_pool_status()
    assert (status["allocated_count"], status["free_count"]) == (0, 3)
    with pytest.raises(ValueError, match="already free"):
        pool.free(tensors[0])
    assert {id(pool.allocate((4,))) for _ in range(3)} == {id(t) for t in tensors}


def test_clear_lets_go_of_everything_and_disowns_what_is_in_use(pool) -> None:
    tensor = pool.allocate((4,)).fill_(7)
    forgotten = weakref.ref(pool.allocate((4,)))
    pool.clear()
    gc.collect()
    assert forgotten() is None
    assert pool.get_pool_status()["total_count"] == 0
    assert tensor.tolist() == [7] * 4
    with pytest.raises(ValueError, match="drop the tensor instead"):
        pool.free(tensor)
    pool.free(pool.allocate((4,)))


def test_a_deleted_pool_lets_go_of_its_tensors() -> None:
    pool = GPUTensorPool(device="cpu")
    forgotten = weakref.ref(pool.allocate((4,)))
    del pool
    gc.collect()
    assert forgotten() is None


def test_negative_dimensions_raise(pool) -> None:
    with pytest.raises(ValueError, match="negative"):
        pool.allocate((4, -1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_default_device_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="pass device='cpu'"):
        GPUTensorPool()
    unpinned = GPUTensorPool(device="cpu", pin_memory=True)
    assert not unpinned.allocate((4,)).is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_and_in_pinned_memory() -> None:
    on_device, pinned = GPUTensorPool(), GPUTensorPool("cpu", pin_memory=True)
    source, target = on_device.allocate((1024,)).fill_(3), pinned.allocate((1024,))
    assert source.is_cuda and target.is_pinned()
    target.copy_(source)
    assert target.tolist() == [3] * 1024
    on_device.free(source)
    on_device.clear()
    with pytest.raises(ValueError, match="pinned memory is host memory"):
        GPUTensorPool("cuda", pin_memory=True)


def test_host_memory_of_a_pool_is_counted_until_the_last_tensor_on_it_is_gone() -> None:
    before = reserved_bytes()
    pool = GPUTensorPool("cpu")
    tensor, other = pool.allocate((1000, 1000)), pool.allocate((3,))
    held = reserved_bytes() - before
    assert held >= tensor.nbytes + other.nbytes
    pool.clear()
    del other
    assert 0 < reserved_bytes() - before <= held
    del tensor
    assert reserved_bytes() == before


def test_a_pool_says_what_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pp_offload._memory.budget.available_bytes", lambda: 0)
    pool = GPUTensorPool("cpu")
    with pytest.raises(MemoryError, match="over the budget of this process"):
        pool.allocate((1000,))
    monkeypatch.undo()
    assert GPUTensorPool("cpu").allocate((1000,)).shape == (1000,)
    with pytest.raises(MemoryError, match="over the budget"):
        pool.allocate((1000,))
    assert pool.get_pool_status()["total_count"] == 0, "nothing was begun"
