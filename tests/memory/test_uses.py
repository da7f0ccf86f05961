"""Uses of bytes against a model that marks every byte; no interrupt loses one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import every_line, interrupted
from test_host_tier import LateEvent

from pp_offload._memory.arena import Range
from pp_offload._memory.uses import Uses

NUM_BYTES = 30

Ranges = st.builds(
    lambda slab, begin, nbytes: Range(slab, begin, min(nbytes, NUM_BYTES - begin), 0),
    st.integers(0, 1),
    st.integers(0, NUM_BYTES - 1),
    st.integers(1, NUM_BYTES),
)


def bytes_of(one: Range) -> list[tuple[int, int]]:
    return [(one.slab, at) for at in range(one.offset, one.end)]


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["set", "clear", "end"]), Ranges), max_size=30))
def test_each_byte_has_the_uses_set_last(steps: list[tuple[str, Range]]) -> None:
    uses, model = Uses(), dict[tuple[int, int], LateEvent]()
    for verb, one in steps:
        if verb == "end":
            for at in bytes_of(one)[:1]:
                model.get(at, LateEvent()).synchronize()
        elif verb == "clear":
            uses.clear(one)
            for at in bytes_of(one):
                model.pop(at, None)
        else:
            event = LateEvent()
            uses.set(one, (event,))
            model.update(dict.fromkeys(bytes_of(one), event))
        check(uses, model)
    assert set(uses.events()) == set(model.values())


def check(uses: Uses, model: dict[tuple[int, int], LateEvent]) -> None:
    for slab in range(2):
        for begin in range(0, NUM_BYTES, 7):
            one = Range(slab, begin, 5, 5)
            expected = {model[at] for at in bytes_of(one) if at in model}
            found = uses.unfinished([one, one])
            assert len(found) == len(set(found)), "each once"
            assert set(found) == {event for event in expected if not event.has_passed}


def test_an_interrupt_at_any_line_loses_no_use_of_other_bytes() -> None:
    whole, middle, part = Range(0, 0, 30, 0), Range(0, 10, 10, 0), Range(0, 15, 10, 0)

    def made() -> tuple[Uses, LateEvent]:
        uses, event = Uses(), LateEvent()
        uses.set(whole, (event,))
        return uses, event

    numbers = every_line(lambda: made()[0].set(middle, (LateEvent(),)))
    for number in numbers:
        uses, event = made()
        with interrupted(number):
            uses.set(middle, (LateEvent(),))
        uses.mend()
        newer = LateEvent()
        uses.set(part, (newer,))
        assert event in uses.unfinished([Range(0, 0, 10, 0)])
        assert event in uses.unfinished([Range(0, 25, 5, 0)])
        assert uses.unfinished([part]) == (newer,)
