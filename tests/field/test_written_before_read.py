"""F02: a host buffer is not written again before the reload has read it."""

from __future__ import annotations

import pytest
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from toy import assert_idle, same_bits

from pp_offload import OffloadConfig, use_backend
from pp_offload._memory.budget import HostBudget, reserved_bytes

pytestmark = pytest.mark.field("F02")

LENGTHS = (4, 7, 3, 6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("ranks", "vp_size", "rank"), [(2, 1, 0), (4, 1, 0), (2, 2, 0), (2, 2, 1)])
def test_length_changes_every_step(kind: str, ranks: int, vp_size: int, rank: int) -> None:
    ahead = ranks - rank + (vp_size > 1) * (ranks - rank - 1 + (vp_size - 1) * ranks)
    moves = schedule(8, ahead, vp_size, ranks)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(kind), config=config) as manager:
        device = manager.backend.device
        on, off = (
            [Chain(("a", "b"), 2, is_on=b, device=device, seed=s) for s in range(vp_size)]
            for b in (True, False)
        )
        for step, length in enumerate(LENGTHS):
            inputs = make_inputs(8, step=step, length=length, device=device)
            expected = run_moves(off, inputs, moves, False)
            assert same_bits(run_moves(on, inputs, moves, True), expected), step
            assert_idle(manager)


@pytest.mark.parametrize("kind", ["late", "random"])
def test_no_byte_to_spare(kind: str) -> None:
    """The pool holds exactly what one microbatch needs; the rest must wait for it or stay."""
    for seed in range(3):
        backend = make_backend(kind, seed)
        with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
            on, off = (Chain(("a", "b"), 3, is_on=b) for b in (True, False))
            moves = schedule(6, 2)
            for step, length in enumerate((7, 3, 6, 7)):
                inputs = make_inputs(6, step=step, length=length)
                expected = run_moves([off], inputs, moves, False)
                assert same_bits(run_moves([on], inputs, moves, True), expected)
                if step == 0:
                    manager.reset()
                    before = manager.statistics()
                    pool = manager.offloader.engine.mover.tier.pools[0]
                    pool._budget = HostBudget(reserved_bytes())  # not a byte more
            after = manager.statistics()
            assert after.host_bytes_reserved <= before.host_bytes_reserved
            assert after.host_allocations == before.host_allocations
            assert after.bytes_offloaded > 2 * before.bytes_offloaded, "it went on with what it had"
            assert_idle(manager)
