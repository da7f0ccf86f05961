"""HostPool and the tensor pool: owners never share bytes, and what is freed is used again."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_memory import Shape, shape_zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pp_offload._memory import host_pool
from pp_offload._memory.budget import (
    LOCAL_RANKS,
    SHARE,
    HostBudget,
    as_another_process,
    available_bytes,
    ranks_on_this_host,
    reserved_bytes,
)
from pp_offload._memory.host_pool import ALIGNMENT, MIN_SLAB_BYTES, HostPool
from pp_offload._memory.pool import GPUTensorPool

MIB = 2**20
LIMIT = 2**50


class Owner:
    """Has host bytes, as a batch does."""

    def __init__(self, pool: HostPool, sizes: list[int]) -> None:
        self.host = pool.take(sizes, self)


class Copy:
    """The event of a copy that ends when a test says so."""

    has_ended = False

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        raise AssertionError("the pool never waits on the host")


def plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def without_data(nbytes: int) -> Tensor:
    """Lets a test deal out what a real model needs. Checks that nothing would be rounded up."""
    assert nbytes & (nbytes - 1) == 0, "the pinned allocator rounds this up"
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def small_pool(limit_bytes: int = LIMIT) -> HostPool:
    return HostPool(plain, HostBudget(limit_bytes))


def bytes_of(owner: Owner) -> list[tuple[int, int]]:
    return [(view.data_ptr(), view.data_ptr() + view.numel()) for view in owner.host.views]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_two_owners_never_share_bytes_and_freed_bytes_are_used_again(data: st.DataObject) -> None:
    pool = small_pool()
    owners: list[Owner] = []
    peak = 0
    for _ in range(data.draw(st.integers(1, 30))):
        if owners and data.draw(st.booleans()):
            del owners[data.draw(st.integers(0, len(owners) - 1))]
        else:
            sizes = data.draw(st.lists(st.integers(0, 300_000), min_size=1, max_size=5))
            owners.append(Owner(pool, sizes))
        live = sorted(span for owner in owners for span in bytes_of(owner) if span[0] < span[1])
        assert all(a[1] <= b[0] for a, b in zip(live, live[1:], strict=False))
        in_use = sum(owner.host.nbytes for owner in owners)
        assert pool.in_use_bytes == in_use
        peak = max(peak, in_use)
    reserved = pool.reserved_bytes
    owners.clear()
    whole = Owner(pool, [MIN_SLAB_BYTES] * (reserved // MIN_SLAB_BYTES))
    assert pool.reserved_bytes == reserved, "freed bytes of any sizes serve any other size"
    del whole
    pool.trim()
    assert pool.reserved_bytes == 0


# Bytes that a copy may still access

uses = st.tuples(st.just(100) | st.integers(1, 3000), st.integers(0, 6), st.booleans())
"""Bytes of an owner, how many owners live behind it, and whether it makes a copy of its own."""


@settings(max_examples=60, deadline=None)
@given(st.lists(uses, min_size=20, max_size=40))
def test_no_byte_is_given_without_its_last_copy(program: list[tuple[int, int, bool]]) -> None:
    """The events, followed back through the owners that waited for them, cover each byte."""
    pool = small_pool()
    pool.min_slab_bytes = 4096  # so that the bytes of former owners are carved anew
    last: dict[int, Copy] = {}  # by address of each 64 bytes
    implied: dict[Copy, set[Copy]] = {}
    owners: deque[Owner] = deque()
    for nbytes, num_live, is_used in program:
        owner, copy = Owner(pool, [nbytes, 64]), Copy()
        seen = set().union(*({event} | implied[event] for event in owner.host.waits_for))
        blocks = [at for a, b in bytes_of(owner) for at in range(a, b, ALIGNMENT)]
        assert {last[at] for at in blocks if at in last} <= seen
        if is_used:
            implied[copy], owner.host.last_use = seen, copy
            last.update(dict.fromkeys(blocks, copy))
        owners.append(owner)
        del owner
        while len(owners) > num_live:
            owners.popleft()


@pytest.mark.parametrize("do", [HostPool.trim, HostPool.settle])
def test_a_slab_goes_back_to_the_system_only_when_copies_have_ended(
    do: Callable[[HostPool], None],
) -> None:
    pool = small_pool()
    owners, copy = [Owner(pool, [20 * MIB + 1]) for _ in range(3)], Copy()
    for owner in owners:
        owner.host.last_use = copy
    del owner
    owners.clear()
    reserved = pool.reserved_bytes
    do(pool)
    assert pool.reserved_bytes == reserved
    copy.has_ended = True
    do(pool)
    assert pool.reserved_bytes < reserved
    assert Owner(pool, [1]).host.waits_for == ()


# The system and the budget


def test_trim_keeps_slabs_with_bytes_in_use_and_tells_the_allocator() -> None:
    trimmed = []
    pool = HostPool(plain, HostBudget(LIMIT), trim=lambda: trimmed.append(pool.reserved_bytes))
    owner, dropped = Owner(pool, [2 * MIB]), Owner(pool, [4 * MIB])
    owner.host.views[0].fill_(7)
    del dropped
    pool.trim()
    assert pool.reserved_bytes == 2 * MIB
    assert trimmed == [2 * MIB]
    assert Owner(pool, [4 * MIB]).host.views[0].fill_(8).eq(8).all()
    assert owner.host.views[0].eq(7).all()
    assert pool.peak_bytes == 6 * MIB, "the most ever"


def test_a_refusal_names_the_budget_and_the_option_and_changes_nothing() -> None:
    with as_another_process():
        pool = small_pool(3 * MIB)
        owner = Owner(pool, [MIB, MIB // 2])
        message = rf"{2 * MIB} .* {3 * MIB} bytes .*host_budget_bytes"
        with pytest.raises(MemoryError, match=message) as refusal:
            Owner(pool, [64, 2 * MIB])
        assert pool.in_use_bytes == owner.host.nbytes
        assert pool.reserved_bytes == 2 * MIB
        del refusal  # whose frames have the owner that was refused
        assert pool.in_use_bytes == owner.host.nbytes
        rest = Owner(pool, [MIB // 2, MIB])
        assert pool.reserved_bytes == 3 * MIB, "the budget is used to its end"
        del rest


def test_pools_share_the_budget_and_a_slab_counts_while_an_owner_has_bytes_of_it() -> None:
    with as_another_process():
        budget = HostBudget(4 * MIB)
        pools = [HostPool(plain, budget) for _ in range(2)]
        owners = [Owner(pool, [2 * MIB]) for pool in pools]
        with pytest.raises(MemoryError):
            Owner(pools[0], [1])
        pools.clear()
        assert budget.left_bytes == 0
        owners.clear()
        gc.collect()
        assert budget.left_bytes == 4 * MIB


def test_memory_that_can_be_pinned_only_in_smaller_pieces_comes_in_smaller_pieces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stingy(nbytes: int) -> Tensor:
        if nbytes > 3 * MIB:
            raise MemoryError(f"cannot pin {nbytes} bytes")
        return plain(nbytes)

    pool = HostPool(stingy, HostBudget(LIMIT))
    owner = Owner(pool, [MIB] * 8)
    assert pool.reserved_bytes == 8 * MIB
    assert not caplog.records
    larger = Owner(pool, [4 * MIB])  # in ordinary memory
    assert "ulimit -l" in caplog.text and len(caplog.records) == 1
    assert pool.in_use_bytes == owner.host.nbytes + larger.host.nbytes == pool.reserved_bytes


@pytest.mark.parametrize(("seconds", "levels"), [(0.001, []), (0.3, [logging.WARNING])])
def test_a_step_says_how_long_it_pinned(
    seconds: float,
    levels: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With what settling pins; and no step does that pins nothing."""
    now_s = 0.0

    def slow(nbytes: int) -> Tensor:
        nonlocal now_s
        now_s += seconds
        return plain(nbytes)

    monkeypatch.setattr(host_pool, "perf_counter", lambda: now_s)
    caplog.set_level(logging.INFO, logger="pp_offload")
    pool = HostPool(slow, HostBudget(LIMIT))
    for _ in range(3):
        owner = Owner(pool, [MIB] * 17)
        del owner
        pool.settle()
    assert [line.levelno for line in caplog.records] == levels
    took = f"{18 / 1024 + pool.reserved_bytes / 2**30:.2f} GiB of host memory, which took"
    for line in caplog.messages:
        assert f"pinned {took} {pool.num_allocations * seconds:.1f} s;" in line


# The footprint, at the sizes of real models


@pytest.mark.field("F31")
@pytest.mark.parametrize("shape", [*shape_zoo(1)][11::12], ids=str)
@pytest.mark.parametrize("by_step", [False, True])
def test_the_footprint_of_random_lengths_stays_near_the_most_of_one_step(
    shape: Shape, by_step: bool
) -> None:
    """In 1F1B with four microbatches in flight."""
    draw, pool, peak = random.Random(0), HostPool(without_data, HostBudget(LIMIT)), 0
    waiting: deque[list[Owner]] = deque()

    def backward() -> None:
        owners = waiting.popleft()
        while owners:
            owners.pop()

    for _ in range(200):
        lengths = [draw.randint(shape.length // 8, shape.length) for _ in range(6)]
        for length in lengths:
            of_length = replace(shape, length=lengths[0] if by_step else length)
            layers = range(4 if shape.num_experts == 1 else 1)
            waiting.append([Owner(pool, of_length.layer_bytes(draw)) for _ in layers])
            peak = max(peak, pool.in_use_bytes)
            if len(waiting) == 4:
                backward()
        while waiting:
            backward()
        pool.settle()
        assert pool.in_use_bytes == 0
        assert pool.reserved_bytes <= 1.05 * peak


# The budget: what is available, and one count for the process


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        ("3000000", "1000000", "", 2000000),
        ("3000000", "1000000", "anon 5\n{}inactive_file 500000\n", 2500000),
        ("max", "1000000", "", 5000 * 1024),
        ("9223372036854771712", "1000000", "", 5000 * 1024),  # what v1 writes for "max"
        ("1000", "5000", "", 0),
    ],
)
@pytest.mark.covering(2)
@pytest.mark.parametrize("group", ["slurm/job", "slurm"], ids=["its own", "above"])
@pytest.mark.parametrize("version", [1, 2])
def test_cgroups(
    tmp_path: Path, limit: str, used: str, stat: str, expected: int, group: str, version: int
) -> None:
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    names = names if version == 1 else ("memory.max", "memory.current")
    folder = f"sys/fs/cgroup/{'memory/' if version == 1 else ''}{group}"
    files = {
        "proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    5000 kB\n",
        "proc/self/cgroup": f"5:devices:/x\n{'4:memory' if version == 1 else '0:'}:/slurm/job\n",
        f"{folder}/{names[0]}": limit,
        f"{folder}/{names[1]}": used,
        f"{folder}/memory.stat": stat.format("total_" if version == 1 else ""),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == expected


def test_without_proc_it_is_the_physical_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 2**20


def test_budgets_of_a_process_share_one_count() -> None:
    """Budgets of another process have a count of their own."""
    gc.collect()  # pools of other tests, or they would go meanwhile
    here = HostBudget(reserved_bytes() + 100)
    with as_another_process():
        there, beside = HostBudget(100), HostBudget(100)
    first, other = there.reserve(60), here.reserve(70)
    assert here.left_bytes == 30 and there.left_bytes == beside.left_bytes == 40
    assert beside.but_for(2).left_bytes == 0
    with pytest.raises(MemoryError, match="41 more bytes .* over the budget .*: 40 of 100"):
        beside.reserve(41)
    del first, other
    assert here.left_bytes == beside.left_bytes == 100


def test_the_default_is_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pp_offload._memory.budget.available_bytes", lambda: 10**9)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert HostBudget().left_bytes == int(10**9 * SHARE) // 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 4),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "8(x2)"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "WORLD_SIZE": "16"}, 2),
        ({"WORLD_SIZE": "16"}, 16),
        ({"LOCAL_WORLD_SIZE": "all"}, 1),
    ],
)
def test_launchers_say_how_many_ranks_share_the_host(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_this_host() == expected


# The tensor pool: who owns what, in which order it comes back, and how much is held


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


def test_memory_made_in_inference_mode_is_written_outside_too(pool) -> None:
    with torch.inference_mode():
        tensors = [pool.allocate((4,)), *Owner(small_pool(), [64]).host.views]
    for tensor in tensors:
        tensor.zero_()


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
    others = GPUTensorPool(device="cpu").allocate(shape)
    for foreign in (torch.empty(shape), others, other.view_as(other)):
        with pytest.raises(ValueError, match=r"this pool; free the tensor that allocate\(\) gave"):
            pool.free(foreign)
    pool.free(other)


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
    _used, freed = pool.allocate((4,)), pool.allocate((4,))
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


def test_clear_lets_go_of_everything_and_disowns_what_is_in_use(pool) -> None:
    """Memory of a tensor in use counts in the budget until that is gone."""
    gc.collect()  # pools of other tests, or they would go meanwhile
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
