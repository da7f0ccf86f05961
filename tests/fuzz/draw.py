"""Which programs the fuzzer draws: hypothesis strategies, from parts to programs.

@given(programs())
def test(program): check(program)
"""

from __future__ import annotations

from itertools import chain

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from kinds import CHANGES, COMPUTES
from programs import (
    Backward,
    Body,
    Change,
    Commit,
    Compute,
    Drop,
    Enter,
    Evaluate,
    Exit,
    Flush,
    Forward,
    Free,
    Mark,
    Op,
    Options,
    Part,
    Peek,
    Program,
    Region,
    Step,
    Switch,
    Synchronize,
    Touch,
)

BACKENDS = ["late", "random", "eager", "cpu", "cpu threads"]
CHECKPOINTS = ["torch", "torch", "torch", "ours", "ours", "stash", "reentrant"]
HOWS = ["whole", "retain", "input", "weight", "stage input", "stage weight", "double", "together"]

picks = st.integers(0, 3)
rarely = st.integers(0, 19).map(lambda n: n == 19)
seldom = st.integers(0, 5).map(lambda n: n == 5)
streams = st.sampled_from([0, 0, 0, 1, 2])
names = st.sampled_from(["a", "b"])

computes = st.builds(Compute, st.sampled_from(list(COMPUTES)), picks, picks)
changes = st.builds(Change, st.sampled_from(list(CHANGES)), picks)


def often(usual: SearchStrategy, *others: SearchStrategy, share: int = 6) -> SearchStrategy:
    """``usual``, and once in ``share`` one of the others."""
    return st.integers(0, share - 1).flatmap(
        lambda n: st.one_of(*others) if n == share - 1 else usual
    )


def flat(found: list[list[Part]]) -> Body:
    return tuple(chain.from_iterable(found))


frees, marks = st.builds(Free, picks), st.builds(Mark, picks)
lines = often(computes, changes, frees, marks, share=9)
again = [kind for kind in COMPUTES if kind != "reads twice"]  # which a checkpoint refuses
calm_lines = often(st.builds(Compute, st.sampled_from(again), picks, picks), frees, marks, share=9)
"""Lines that a checkpoint may run again."""


@st.composite
def groups(draw: st.DrawFn, lines: SearchStrategy[Part]) -> list[Part]:
    """A group as it should be."""
    name = draw(names)
    inside = draw(st.lists(lines, min_size=1, max_size=4))
    between = draw(st.lists(lines, max_size=1)) if draw(seldom) else []
    commit = Commit(name, draw(seldom), draw(picks) if draw(seldom) else None)
    return [Enter(name, draw(seldom)), *inside, Exit(), *between, commit]


@st.composite
def crossed(draw: st.DrawFn, lines: SearchStrategy[Part]) -> list[Part]:
    """Two groups, one begun in the other, committed in any order; or not at all."""
    first, second = draw(names), draw(names)
    commits = [Commit(first), Commit(second, draw(seldom))]
    if draw(seldom):
        commits.pop()
    return [
        Enter(first, draw(seldom)),
        *draw(st.lists(lines, min_size=1, max_size=4)),
        Enter(second, draw(seldom)),
        *draw(st.lists(lines, min_size=1, max_size=4)),
        Exit(),
        *draw(st.lists(lines, max_size=1)),
        Exit(),
        *draw(st.permutations(commits)),
    ]


def pieces_of(
    lines: SearchStrategy[Part], *others: SearchStrategy[Part]
) -> SearchStrategy[list[Part]]:
    """Mostly groups."""
    single = [one.map(lambda part: [part]) for one in (lines, *others)]
    return often(groups(lines), crossed(lines), *single, share=3)


def regions_of(pieces: SearchStrategy[list[Part]]) -> SearchStrategy[Part]:
    """A checkpoint around them."""
    body = st.lists(pieces, min_size=1, max_size=3).map(flat)
    return st.builds(Region, body, st.sampled_from(CHECKPOINTS), st.booleans())


around_groups = regions_of(pieces_of(calm_lines))
nested = regions_of(pieces_of(often(calm_lines, around_groups, share=4), around_groups))
regions = often(around_groups, nested, share=4)
pieces = pieces_of(often(lines, regions, share=12), regions)
bodies: SearchStrategy[Body] = st.lists(pieces, min_size=1, max_size=4).map(flat)
stages = st.lists(st.lists(bodies, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3)

numels = st.sampled_from([1, 1, 1, 0, 9, 10**6])
rows = st.sampled_from([2, 1, 3, 5])


@st.composite
def forwards(draw: st.DrawFn) -> Op:
    fails_at = draw(st.integers(0, 8)) if draw(rarely) else None
    backward_fails_at = draw(st.integers(0, 8)) if draw(rarely) else None
    return Forward(
        draw(picks),
        draw(st.integers(0, 1)),
        draw(rows),
        not draw(seldom),
        draw(numels) if draw(seldom) else 1,
        draw(streams),
        draw(seldom),
        fails_at,
        backward_fails_at,
    )


backwards = st.builds(
    Backward, often(st.just("whole"), st.sampled_from(HOWS), share=2), picks, streams
)
others = st.one_of(
    st.builds(Evaluate, picks, st.integers(0, 1), rows),
    st.builds(Touch, st.sampled_from(list(CHANGES)), picks, picks),
    st.builds(Peek, picks),
    st.builds(Drop, picks),
    st.just(Flush()),
    st.builds(Switch, st.sampled_from([True, True, False])),
    st.just(Synchronize()),
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
        draw(st.sampled_from(["auto", "auto", *sizes])),
        draw(st.sampled_from([2**29, 2**29, *sizes])),
        draw(st.sampled_from([0, 512, 1024, 4096])) if draw(seldom) else None,
        draw(st.sampled_from([0.0, 0.5])) if draw(seldom) else 1.0,
        draw(st.sampled_from([64, 512])) if draw(seldom) else 0,
        draw(st.integers(0, 2)),
        draw(st.sampled_from([("disk",), ("host", "disk")])) if draw(seldom) else ("host",),
        draw(rarely),
        draw(st.sampled_from([None, "reload", "keep"])),
        draw(st.sampled_from([None, None, None, 1, 2, 5])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 2000, 8000, 10**6])) if draw(seldom) else None,
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
