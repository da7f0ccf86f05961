"""Calls that undo what was done run the last first, and all of them, whatever interrupts them."""

from __future__ import annotations

from contextlib import suppress

from helpers.injected import Injected, files, interrupt_at, points_in

from pp_offload._common.undo import UndoStack

LINES = files("_common/undo")


def test_an_interrupted_run_goes_on_where_it_was() -> None:
    undone: list[int] = []

    def stack() -> UndoStack:
        undone.clear()
        undo = UndoStack()
        for number in range(3):
            undo.add(undone.append, number)
        return undo

    for number in range(len(points_in(LINES, stack().run)) + 1):
        undo = stack()
        with suppress(Injected), interrupt_at(number, LINES):
            undo.run()
        undo.run()
        undo.run()
        assert list(dict.fromkeys(undone)) == [2, 1, 0], number
