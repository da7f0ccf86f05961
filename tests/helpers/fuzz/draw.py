"""Which programs the fuzzer draws: hypothesis strategies, from parts to programs.

@given(programs())
def test(program): check(program)
"""

from __future__ import annotations

from itertools import chain

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from helpers.fuzz.kinds import CHANGES, COMPUTES
from helpers.fuzz.programs import (
    Backward,
    Body,
    Call,
    Change,
    Commit,
    Compute,
    Drop,
    Enter,
    Evaluate,
    Exit,
    Forward,
    Free,
    Options,
    Part,
    Program,
    Region,
    Step,
    Touch,
)
from helpers.fuzz.run import CHECKPOINTS, HOWS

BACKENDS = ["late", "random", "eager", "cpu", "cpu threads"]

picks = st.integers(0, 3)
rarely = st.integers(0, 19).map(lambda n: n == 19)
seldom = st.integers(0, 5).map(lambda n: n == 5)
streams = st.sampled_from([0, 0, 0, 1, 2])
names = st.sampled_from(["a", "b"])


def often(usual: SearchStrategy, *others: SearchStrategy, share: int = 6) -> SearchStrategy:
    """``usual``, and once in ``share`` one of the others."""
    return st.integers(0, share - 1).flatmap(
        lambda n: st.one_of(*others) if n == share - 1 else usual
    )


def sometimes(draw: st.DrawFn, values: SearchStrategy) -> object:
    """One of the values, or None five times out of six."""
    return draw(values) if draw(seldom) else None


def flat(parts: list[list[Part]]) -> Body:
    return tuple(chain.from_iterable(parts))


computes = st.builds(Compute, st.sampled_from(list(COMPUTES)), picks, picks)
changes = st.builds(Change, st.sampled_from(list(CHANGES)), picks)
frees = st.builds(Free, picks)
lines = often(computes, changes, frees, share=9)
again = [kind for kind in COMPUTES if kind != "reads twice"]  # which a checkpoint refuses
calm_lines = often(st.builds(Compute, st.sampled_from(again), picks, picks), frees, share=9)
"""Lines that a checkpoint may run again."""


@st.composite
def groups(draw: st.DrawFn, lines: SearchStrategy[Part]) -> list[Part]:
    """A group as it should be."""
    name = draw(names)
    inside = draw(st.lists(lines, min_size=1, max_size=4))
    between = draw(st.lists(lines, max_size=1)) if draw(seldom) else []
    commit = Commit(name, draw(seldom), sometimes(draw, picks))  # type: ignore[arg-type]
    return [Enter(name), *inside, Exit(), *between, commit]


@st.composite
def crossed(draw: st.DrawFn, lines: SearchStrategy[Part]) -> list[Part]:
    """Two groups, the second begun in the first, committed in any order; or one of them never."""
    first, second = draw(names), draw(names)
    commits = [Commit(first), Commit(second, draw(seldom))]
    if draw(seldom):
        commits.pop()
    outer, inner = (draw(st.lists(lines, min_size=1, max_size=4)) for _ in range(2))
    parts = [Enter(first), *outer, Enter(second), *inner, Exit(), Exit()]
    return parts + draw(st.permutations(commits))


def pieces_of(
    lines: SearchStrategy[Part], *others: SearchStrategy[Part]
) -> SearchStrategy[list[Part]]:
    """Mostly groups."""
    single = [part.map(lambda part: [part]) for part in (lines, *others)]
    return often(groups(lines), crossed(lines), *single, share=3)


region_bodies = st.lists(pieces_of(calm_lines), min_size=1, max_size=3).map(flat)
regions = st.builds(Region, region_bodies, st.sampled_from(list(CHECKPOINTS)))
pieces = pieces_of(often(lines, regions, share=12), regions)
bodies: SearchStrategy[Body] = st.lists(pieces, min_size=1, max_size=4).map(flat)
stages = st.lists(st.lists(bodies, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3)

rows = st.sampled_from([2, 1, 3, 5])


@st.composite
def forwards(draw: st.DrawFn) -> Forward:
    fails_at = draw(st.integers(0, 8)) if draw(rarely) else None
    backward_fails_at = draw(st.integers(0, 8)) if draw(rarely) else None
    return Forward(
        stage=draw(picks),
        variant=draw(st.integers(0, 1)),
        rows=draw(rows),
        needs_grad=not draw(seldom),
        stream=draw(streams),
        is_held=draw(seldom),
        fails_at=fails_at,
        backward_fails_at=backward_fails_at,
    )


backwards = st.builds(
    Backward, often(st.just("whole"), st.sampled_from(list(HOWS)), share=2), picks, streams
)
others = st.one_of(
    st.builds(Evaluate, picks, st.integers(0, 1), rows),
    st.builds(Touch, st.sampled_from(list(CHANGES)), picks, picks),
    st.builds(Drop, picks),
    st.builds(Call, st.sampled_from(["flush", "synchronize", "enable", "enable", "disable"])),
)
ops = often(often(forwards(), backwards, share=2), others, share=6)
steps = st.builds(
    Step,
    st.lists(ops, min_size=1, max_size=10).map(tuple),
    st.sampled_from(["fifo", "fifo", "fifo", "lifo", "drop", "keep"]),
    seldom,
    seldom,
)


@st.composite
def options(draw: st.DrawFn) -> Options:
    if draw(seldom):
        return Options()
    sizes = [0, 64, 300, 10**6]
    return Options(
        prefetch_bytes=draw(st.sampled_from(["auto", "auto", *sizes])),
        max_in_flight_bytes=draw(st.sampled_from([2**29, 2**29, *sizes])),
        host_budget_bytes=sometimes(draw, st.sampled_from([0, 512, 1024, 4096])),  # type: ignore[arg-type]
        activation_offload_fraction=draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0])),
        tiers=draw(st.sampled_from([("host",)] * 6 + [("disk",), ("host", "disk")])),
        verify=draw(rarely),
        stash=draw(st.sampled_from([None, None, None, 1, 2, 5])),
        is_fine=draw(st.booleans()),
        device_limit_bytes=sometimes(draw, st.sampled_from([0, 2000, 8000, 10**6])),  # type: ignore[arg-type]
    )


def programs() -> SearchStrategy[Program]:
    """Programs of up to three stages and four steps."""
    return st.builds(
        Program,
        stages.map(tuple),
        st.lists(steps, min_size=1, max_size=4).map(tuple),
        st.sampled_from(BACKENDS),
        st.integers(0, 99),
        options(),
    )
