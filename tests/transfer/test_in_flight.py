"""What is on its way to the host: how much may be, who waits, and what looking at it costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import make_backend
from interrupts import interrupted
from test_disk import tickets_of
from test_hazards import late_engine, ticket_for
from test_host_tier import LateEvent, System

from pp_offload import OffloadConfig, use_backend
from pp_offload._memory.host import HostMemory
from pp_offload._policy.bounds import IN_FLIGHT_BYTES
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.ticket import hand_over
from pp_offload._transfer.tiers import host_engine
from pp_offload.testing import SimulatedBackend

SIZE = 4096


def engine_with(cap: int | str) -> tuple[SimulatedBackend, TransferEngine]:
    """Copies as late as the program permits."""
    backend = SimulatedBackend("late")
    return backend, host_engine(backend, HostMemory(backend.allocate_host), cap)


def offload(engine: TransferEngine, nbytes: Sequence[int]) -> None:
    """A group of payloads."""
    tickets = tickets_of(engine, [torch.ones(n // 4) for n in nbytes])
    engine.offload(tickets)
    hand_over(tickets)


@pytest.mark.parametrize("cap", [1, SIZE - 1, SIZE, 2 * SIZE - 1])
def test_compute_waits_for_older_groups_and_not_for_the_last(cap: int) -> None:
    backend, engine = engine_with(cap)
    for number in range(4):
        offload(engine, [SIZE // 2, SIZE // 2])
        assert engine.copies.in_flight.nbytes == SIZE, "that of the last group alone"
        assert backend.pending == 2, f"group {number} was waited for"


def test_more_groups_may_be_on_their_way_where_there_is_room() -> None:
    backend, engine = engine_with(2 * SIZE)
    for number in range(4):
        offload(engine, [SIZE])
        assert engine.copies.in_flight.nbytes == SIZE * min(number + 1, 2)


def test_nothing_is_on_its_way_where_nothing_may_be() -> None:
    backend, engine = engine_with(0)
    offload(engine, [SIZE])
    assert (engine.copies.in_flight.nbytes, backend.pending) == (0, 0)


def test_a_small_group_behind_a_large_one_waits_for_that() -> None:
    _, engine = engine_with(SIZE)
    offload(engine, [8 * SIZE])
    assert engine.copies.in_flight.nbytes == 8 * SIZE
    offload(engine, [SIZE])
    assert engine.copies.in_flight.nbytes == SIZE


def test_the_default_is_twice_the_largest_group() -> None:
    _, engine = engine_with("auto")
    large, in_flight = IN_FLIGHT_BYTES // 2 + 4, engine.copies.in_flight
    assert in_flight.bound.nbytes == IN_FLIGHT_BYTES
    in_flight.bound.expect(large)
    assert in_flight.bound.nbytes == 2 * large
    in_flight.bound.expect(4)
    assert in_flight.bound.nbytes == 2 * large, "it does not shrink"
    engine.keep_in_flight_bounded(2 * large)  # gradients, for instance, which are no group
    assert in_flight.bound.nbytes == 2 * large


def test_auto_is_the_default_and_a_number_is_kept() -> None:
    assert OffloadConfig().max_in_flight_bytes == "auto"
    with use_backend(make_backend("late"), config=OffloadConfig(max_in_flight_bytes=17)) as manager:
        in_flight = manager.offloader.engine.mover.in_flight
        in_flight.bound.expect(1000)
        assert in_flight.bound.nbytes == 17


def test_engines_of_a_backend_know_each_others_streams() -> None:
    """What a forward of one computes on a stream of its own, a forward of another may save."""
    backend, engine = engine_with(0)
    with backend.activate():
        other = host_engine(backend, HostMemory(backend.allocate_host), 0)
        side = backend.new_stream("side")
        other.copies.in_flight.follow(side)
        with backend.stream(side):
            x = torch.ones(SIZE).tanh()
        backend.current_stream().wait_event(side.record_event())
        (ticket,) = tickets_of(engine, [x])
        engine.offload([ticket])
        hand_over([ticket])
        del x  # its memory is free for the side stream, which has to have waited


def lines_of_delivers(num_tensors: int) -> int:
    """Lines for 20 payloads of a group whose copies to the host are all still to be made."""
    backend, engine = late_engine()
    with backend.activate():
        pairs = [ticket_for(engine, torch.full((8,), float(i))) for i in range(num_tensors)]
        engine.offload([ticket for _, ticket in pairs])
        hand_over([ticket for _, ticket in pairs])
        assert backend.pending == num_tensors
        with interrupted(None) as lines:
            for i in range(20):
                assert engine.deliver(pairs[i][1]).eq(i).all()
    assert engine.counters.num_taken_back == 20
    return lines.count


def test_what_a_deliver_costs_does_not_depend_on_what_shares_its_pack() -> None:
    assert lines_of_delivers(400) == lines_of_delivers(40) > 0


# Whose copies are done is taken before what was just given back


def test_a_buffer_that_nobody_uses_is_taken_before_one_just_given_back() -> None:
    tier = HostMemory(System().allocate)
    held = [tier.allocate(SIZE) for _ in range(3)]
    buffers, events = [loan.buffer for loan in held], [LateEvent() for _ in held]
    for buffer, event in zip(buffers, events, strict=True):
        buffer.last_use = event
        del held[0]
        tier.statistics()
    events[0].synchronize()
    first = tier.allocate(SIZE)
    assert first.buffer is buffers[0], "its copies were made"
    for event in events:
        event.synchronize()
    second = tier.allocate(SIZE)
    assert second.buffer is buffers[2], "all were made, and this one is in the cache"
