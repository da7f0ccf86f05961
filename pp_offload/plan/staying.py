"""Tape of a stage from which nothing leaves: operators and memory, without groups.

tape = staying(tapes[0].stages[0])
len(tape.forward)                     # 1: there is no event in between
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pp_offload.plan.tape import Backward, Drop, Event, Gone, Stretch, Tape


def staying(tape: Tape) -> Tape:
    """Make the tape of the same stage whose groups keep what they save."""
    held = Counter(range(len(tape.source_bytes)))
    held.update(payload.source for payload in tape.payloads if payload.num_uses)
    forward = _together(tape, tape.forward, held)
    begun = held.copy()
    input_part = _together(tape, tape.input_part, begun)
    whole = [_together(tape, events, held.copy()) for events in tape.backward]
    weight = [_together(tape, events, begun.copy()) for events in tape.weight_part]
    return replace(
        tape,
        groups=(),
        payloads=(),
        source_bytes=(),
        forward=forward,
        backward=Backward(*whole),
        input_part=input_part,
        weight_part=Backward(*weight),
        reduce=_together(tape, tape.reduce, begun),
    )


def _together(tape: Tape, events: Iterable[Event], held: Counter[int]) -> tuple[Event, ...]:
    """Join events into one stretch. ``held`` counts the holders of each source, and is updated."""
    stretches = list(_stretches(tape, events, held))
    nbytes = rise = 0
    for stretch in stretches:
        rise = max(rise, nbytes + stretch.rise)
        nbytes += stretch.nbytes
    seconds = tuple(took_s for stretch in stretches for took_s in stretch.seconds)
    return (Stretch(seconds, nbytes, rise),) if stretches else ()


def _stretches(tape: Tape, events: Iterable[Event], held: Counter[int]) -> Iterator[Stretch]:
    for event in events:
        if isinstance(event, Stretch):
            yield event
        elif isinstance(event, Drop | Gone):
            source = _source(tape, event)
            held[source] -= 1
            if not held[source]:
                yield Stretch((), -tape.source_bytes[source], 0)


def _source(tape: Tape, event: Drop | Gone) -> int:
    return event.source if isinstance(event, Drop) else tape.payloads[event.payload].source
