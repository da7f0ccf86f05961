"""The tensor pool: who owns what, in which order it comes back, and how much is held."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.pool import GPUTensorPool


@pytest.fixture
def pool() -> GPUTensorPool:
    return GPUTensorPool(device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2), (3, 5), torch.Size([7])])
def test_allocates_what_was_asked_for(pool, shape, dtype) -> None:
    tensor = pool.allocate(shape, dtype)
    assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    pool.free(tensor)
    assert pool.allocate(shape, dtype) is tensor


def test_the_longest_free_tensor_comes_first(pool) -> None:
    tensors = [pool.allocate((4,)) for _ in range(3)]
    for index in (2, 0, 1):
        pool.free(tensors[index])
    again = [pool.allocate((4,)) for _ in range(3)]
    assert [id(t) for t in again] == [id(tensors[i]) for i in (2, 0, 1)]


@pytest.mark.parametrize("shape", [(4,), (0, 3)])
def test_a_tensor_is_freed_once_and_by_its_own_pool(pool, shape) -> None:
    tensor, other = pool.allocate(shape), pool.allocate(shape)
    pool.free(tensor)
    with pytest.raises(ValueError, match="already free.*free each tensor once"):
        pool.free(tensor)
    for foreign in (torch.empty(shape), GPUTensorPool(device="cpu").allocate(shape)):
        with pytest.raises(ValueError, match="does not belong to this pool"):
            pool.free(foreign)
    pool.free(other)


def test_a_view_is_not_freed(pool) -> None:
    tensor = pool.allocate((4, 4))
    with pytest.raises(ValueError, match=r"free the tensor that allocate\(\) gave"):
        pool.free(tensor.t()[1:])
    pool.free(tensor)


@pytest.mark.parametrize("change", [lambda t: t.resize_(2), lambda t: t.requires_grad_()])
def test_a_changed_tensor_is_not_given_again(pool, change) -> None:
    tensor, other = pool.allocate((4, 4)), pool.allocate((4, 4)).fill_(2)
    change(tensor)
    pool.free(tensor)
    again = pool.allocate((4, 4))
    assert again is not tensor and not again.requires_grad
    assert again.fill_(1).eq(1).all() and other.eq(2).all()


def test_tensors_in_use_share_no_bytes(pool) -> None:
    rng = random.Random(0)
    in_use: list[torch.Tensor] = []
    for _ in range(2000):
        if in_use and rng.random() < 0.5:
            pool.free(in_use.pop(rng.randrange(len(in_use))))
        else:
            dtype = rng.choice([torch.int8, torch.half])
            in_use.append(pool.allocate((rng.randrange(20), 3), dtype))
        assert pool.get_pool_status()["allocated_bytes"] == sum(t.nbytes for t in in_use)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in in_use if t.nbytes)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "bytes are shared"


def test_status_counts_bytes_and_utilisation(pool) -> None:
    with pytest.raises(ValueError, match="pass both"):
        pool.get_pool_status((4,))
    with pytest.raises(ValueError, match="negative"):
        pool.allocate((4, -1))
    used, freed = pool.allocate((4,)), pool.allocate((4,))
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
    pool.reset()
    assert pool.get_pool_status()["free_count"] == 3
    with pytest.raises(ValueError, match="already free"):
        pool.free(used)


def test_clear_lets_go_of_everything_and_disowns_what_is_in_use(pool) -> None:
    """Memory of a tensor in use counts in the budget until that is gone."""
    before = reserved_bytes()
    tensor, dropped = pool.allocate((1000, 1000)).fill_(7), weakref.ref(pool.allocate((4,)))
    assert reserved_bytes() - before >= tensor.nbytes + 16
    pool.clear()
    gc.collect()
    assert dropped() is None
    assert pool.get_pool_status()["total_count"] == 0
    assert tensor.eq(7).all()
    with pytest.raises(ValueError, match="drop the tensor instead"):
        pool.free(tensor)
    assert 0 < reserved_bytes() - before
    del tensor
    assert reserved_bytes() == before
    pool.free(pool.allocate((4,)))


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
