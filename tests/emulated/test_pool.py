"""Copy streams come from a pool of 32, in turn: what it means when one is somebody else's as well.

CUDA has such a pool too. The bytes stay right, for who shares a stream only waits longer. What is
lost is that copies run beside that other work.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from lines import Line

from emulated.helpers import compute, some
from emulated.programs import N, brings, saved_by, side_stream
from emulated.test_engine import DELAYS, OPTIONS, manager_of, steps_are_equal
from pp_offload._core.engine import Engine
from pp_offload.backends import AcceleratorBackend

pytestmark = pytest.mark.emulated

POOL = 32
NUM_MANAGERS = 40


def engines(num: int = NUM_MANAGERS) -> list[Engine]:
    """Each with a backend of its own, as managers have."""
    return [Line(AcceleratorBackend()).engine for _ in range(num)]


def test_sixteen_managers_have_all_streams_of_the_pool() -> None:
    pairs = [(engine.mover.backend.d2h, engine.mover.backend.h2d) for engine in engines()]
    assert len({stream for pair in pairs for stream in pair}) == POOL
    assert len(set(pairs)) == POOL // 2 and pairs[0] == pairs[POOL // 2]
    assert all(d2h != h2d for d2h, h2d in pairs), "of one manager they are two"
    assert all(compute() not in pair for pair in pairs), "the default stream is not of the pool"


def is_copied_beside(emulated: ModuleType, engine: Engine, stream: torch.Stream) -> bool:
    """Whether a copy that waits for nothing runs while ``stream`` stands still."""
    given = some(N)
    x = given.to("emulated")
    emulated.synchronize()
    with emulated.hold(stream):
        (saved,) = saved_by(engine, x)
        offloaded = saved.batch.offloaded
        if engine.mover.backend.d2h != stream:
            offloaded.synchronize()
        is_through = offloaded.query()
    assert brings(engine, saved, given)
    return is_through


def test_copies_run_beside_another_stream_unless_it_is_theirs(emulated: ModuleType) -> None:
    for engine in engines():
        assert is_copied_beside(emulated, engine, side_stream(engine))
        assert not is_copied_beside(emulated, engine, engine.mover.backend.d2h)


def test_a_manager_waits_for_the_compute_of_one_that_shares_its_copy_stream(
    emulated: ModuleType,
) -> None:
    """With another compute stream of its own, it would not have to."""
    first, *_, last = engines(POOL // 2 + 1)
    side = side_stream(first)
    given = [some(N), some(N)]
    x, y = (one.to("emulated") for one in given)
    emulated.synchronize()
    with emulated.hold(side):
        with side:
            (held,) = saved_by(first, x)
        (saved,) = saved_by(last, y)
        assert not saved.batch.offloaded.query()
    assert brings(first, held, given[0]) and brings(last, saved, given[1])


@pytest.mark.parametrize("options", ["host", "disk"])
@pytest.mark.parametrize("stream", ["d2h", "h2d"])
def test_compute_on_a_copy_stream_has_the_same_bits(
    emulated: ModuleType, stream: str, options: str, tmp_path: Path
) -> None:
    emulated.set_delays(**DELAYS["late copies"])
    backend = AcceleratorBackend()
    with manager_of(tmp_path, OPTIONS[options], backend):
        before = compute()
        torch.accelerator.set_stream(getattr(backend, stream))
        try:
            assert steps_are_equal(2)
        finally:
            torch.accelerator.set_stream(before)


def test_the_fortieth_manager_has_the_same_bits(emulated: ModuleType, tmp_path: Path) -> None:
    others = engines(NUM_MANAGERS - 1)
    emulated.set_delays(**DELAYS["late copies"])
    with manager_of(tmp_path, OPTIONS["host"]):
        assert steps_are_equal(2)
    del others
