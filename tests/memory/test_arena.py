"""The arena against a model that marks every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp_offload._memory.arena import Arena, Range

ALIGNMENT = 8

Steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 100)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
    ),
    max_size=60,
)
Slabs = st.lists(st.integers(ALIGNMENT, 300), min_size=1, max_size=3)


class Model:
    """One boolean per byte: is it taken?"""

    def __init__(self, slabs: list[int]) -> None:
        self.taken = [[False] * (nbytes - nbytes % ALIGNMENT) for nbytes in slabs]

    def mark(self, taken: Range, value: bool) -> None:
        slab = self.taken[taken.slab]
        assert 0 <= taken.offset < taken.end <= len(slab)
        assert all(byte is not value for byte in slab[taken.offset : taken.end])
        slab[taken.offset : taken.end] = [value] * taken.nbytes

    def free_runs(self) -> list[int]:
        text = " ".join("".join("x" if t else "." for t in slab) for slab in self.taken)
        return [len(run) for run in text.replace("x", " ").split()]


@settings(max_examples=300, deadline=None)
@given(slabs=Slabs, steps=Steps)
def test_ranges_never_overlap_and_neighbours_always_merge(slabs, steps) -> None:
    arena, model, live = Arena(alignment=ALIGNMENT), Model(slabs), []
    assert [arena.add_slab(nbytes) for nbytes in slabs] == list(range(len(slabs)))
    for verb, number in steps:
        if verb == "allocate":
            _allocate(arena, model, live, number)
        elif live:
            freed = live.pop(number % len(live))
            arena.free(freed)
            model.mark(freed, False)
        _assert_agrees(arena, model, live)
    for freed in live:
        arena.free(freed)
    assert [size for size, _, _ in sorted(arena._free_by_size)] == sorted(map(len, model.taken))


def _allocate(arena: Arena, model: Model, live: list[Range], nbytes: int) -> None:
    fits = [run for run in model.free_runs() if run >= max(nbytes, 1)]
    taken = arena.allocate(nbytes)
    assert (taken is None) == (not fits)
    if taken is None:
        return
    assert taken.requested_nbytes == nbytes <= taken.nbytes < nbytes + ALIGNMENT + (nbytes == 0)
    assert taken.offset % ALIGNMENT == taken.nbytes % ALIGNMENT == 0
    before = sorted(model.free_runs())
    model.mark(taken, True)
    before.remove(min(fits))
    assert sorted(model.free_runs()) == sorted(
        before + ([min(fits) - taken.nbytes] if min(fits) > taken.nbytes else [])
    ), "not the best fit"
    live.append(taken)


def _assert_agrees(arena: Arena, model: Model, live: list[Range]) -> None:
    statistics = arena.statistics()
    assert sorted(size for size, _, _ in arena._free_by_size) == sorted(model.free_runs())
    assert statistics.largest_free_bytes == max(model.free_runs(), default=0)
    assert statistics.reserved_bytes == sum(map(sum, model.taken))
    assert statistics.requested_bytes == sum(r.requested_nbytes for r in live)
    assert statistics.num_live == len(live)
    assert statistics.peak_reserved_bytes >= statistics.reserved_bytes


def test_zero_bytes_get_a_range_of_their_own() -> None:
    arena = Arena()
    arena.add_slab(1024)
    first, second = arena.allocate(0), arena.allocate(0)
    assert first is not None and second is not None
    assert first.offset != second.offset


def test_double_free_and_foreign_ranges_raise() -> None:
    arena, other = Arena(), Arena()
    arena.add_slab(4096)
    other.add_slab(4096)
    taken = arena.allocate(100)
    assert taken is not None
    with pytest.raises(ValueError, match="not allocated here"):
        other.free(taken)
    arena.free(taken)
    with pytest.raises(ValueError, match="free each range once"):
        arena.free(taken)
    again = arena.allocate(100)
    assert again == taken, "equal by value, and yet another allocation"
    with pytest.raises(ValueError, match="not allocated here"):
        arena.free(taken)


@pytest.mark.parametrize("alignment", [0, -8, 24])
def test_alignment_is_a_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Arena(alignment=alignment)


def test_negative_sizes_and_tiny_slabs_raise() -> None:
    arena = Arena()
    with pytest.raises(ValueError, match="zero or more"):
        arena.allocate(-1)
    with pytest.raises(ValueError, match="at least 512"):
        arena.add_slab(511)
    with pytest.raises(ValueError, match="at least 512"):
        arena.add_slab(-1024)
