"""Each wait of the engine, and each thing it keeps alive, left out: the bytes come out wrong.

A program is run as it is, and once without each line that makes the wait. See programs.py for how;
docs/emulated.md has all of them as a table.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pp_offload
from emulated import programs
from emulated.faults import Fault
from emulated.programs import Program

ENGINE, STAGED = "_transfer/engine:TransferEngine", "_transfer/disk_staged:StagedDisk"
COPIES, IN_FLIGHT = "_transfer/copies:Copies", "_transfer/in_flight:InFlight"
RELOADS, PLAIN = "_transfer/pending_reloads:PendingReloads", "_transfer/plain_copies:PlainCopies"

Case = tuple[Any, ...]
"""A program behind what tells whether it went well, and faults: ``Callable``, then ``Fault``s."""

FORGETS_OTHERS = Fault(f"{IN_FLIGHT}._wait_for", "for one in self._streams.known", "for one in ()")
"""Only the live stream waits."""

CASES: dict[str, Case] = {
    "d2h waits for compute": (
        programs.computed_late,
        Fault(
            f"{COPIES}._d2h_waits_for_compute", "self.backend.d2h.wait_event(stream.record_event())"
        ),
    ),
    "d2h waits for each stream that computed": (
        programs.computed_late_on_another_stream,
        Fault(
            f"{COPIES}.copy_to_host",
            "_waits_for_compute(stream)",
            "_waits_for_compute(streams[0])",
        ),
    ),
    "a gather waits for the stream that computed": (
        programs.gathered_of_what_is_computed_late,
        Fault(f"{COPIES}.reading", "live.wait_event(side.record_event())"),
    ),
    "the stream that computed waits for a gather": (
        programs.gathered_late,
        Fault(f"{COPIES}.reading", "side.wait_event(live.record_event())"),
    ),
    "sources are kept until they are copied": (
        programs.source_let_go,
        Fault(f"{COPIES}.copy_to_host", "if offloaded.query():", "if True:"),
        Fault(
            f"{IN_FLIGHT}.poll",
            "(first.offloaded or first.event(self._backend.d2h)).query()",
            "True",
        ),
    ),
    "a source is emptied when it is copied": (
        programs.source_emptied,
        Fault(f"{ENGINE}.after_copies", "queue[-1].then.append(action)", "action()"),
    ),
    "compute waits where too much is in flight": (
        programs.too_much_in_flight,
        Fault(f"{IN_FLIGHT}._wait_for", "self._stopwatch.wait(stream, event)"),
    ),
    "so does each stream that may own the source": (
        programs.too_much_in_flight_of_another_stream,
        FORGETS_OTHERS,
    ),
    "and each that another engine has seen": (
        programs.too_much_in_flight_of_a_stream_that_another_engine_saw,
        Fault(
            f"{IN_FLIGHT}.__init__",
            "self._streams = compute_streams(backend)",
            "self._streams = ComputeStreams()",
        ),
    ),
    "also with a backend of another kind": (
        programs.too_much_in_flight_of_a_stream_that_another_kind_of_engine_saw,
        FORGETS_OTHERS,
    ),
    "and with that kind": (
        programs.too_much_in_flight_of_a_stream_that_an_engine_saw_which_wraps_streams,
        FORGETS_OTHERS,
    ),
    "compute joins the copies": (
        programs.joined,
        Fault(f"{COPIES}.join", "live.wait_event(side.record_event())"),
    ),
    "d2h waits for the last user of a buffer": (
        programs.buffer_read_for_another_stream,
        Fault(
            f"{COPIES}._d2h_waits_for_last_users", "event is not None and event", "False and event"
        ),
    ),
    "and so in a forward beside a backward": (
        programs.forward_beside_a_backward,
        Fault(
            f"{COPIES}._d2h_waits_for_last_users", "event is not None and event", "False and event"
        ),
    ),
    "d2h waits for those of the memory it is carved of": (
        programs.part_of_a_buffer_read_for_another_stream,
        Fault(f"{COPIES}._d2h_waits_for_last_users", "in buffer.before:", "in ():"),
        Fault(
            "_memory/host:HostMemory._carve", "buffer.before = self._uses.unfinished(buffer.ranges)"
        ),
    ),
    "slabs are dealt anew when no copy uses them": (
        programs.slab_read_for_another_stream,
        Fault("_memory/host:HostMemory.compact", "check_finished(self._last_uses())"),
    ),
    "h2d waits for the offload": (
        programs.brought_before_it_left,
        Fault(f"{COPIES}._h2d_waits_for_offloaded", "self.backend.h2d.wait_event(seen)"),
    ),
    "h2d waits for compute": (
        programs.brought_into_memory_in_use,
        Fault(
            f"{COPIES}._h2d_waits_for_compute", "self.backend.h2d.wait_event(stream.record_event())"
        ),
    ),
    "compute waits for the reload": (
        programs.used_before_it_is_back,
        Fault(f"{COPIES}._compute_waits_for", "self.stopwatch.wait(stream, event)"),
    ),
    "a target nobody wants is kept until it is written": (
        programs.target_nobody_wants,
        Fault(
            f"{RELOADS}.give_up",
            "self.abandoned.append((tensor, event, arrival.stream))",
        ),
        Fault(f"{RELOADS}.poll", " and self.abandoned[0][1].query()", ""),
    ),
    "its stream waits where there are many": (
        programs.targets_nobody_wants,
        Fault(f"{RELOADS}.keep_few_abandoned", "stream.wait_event(reloaded)"),
    ),
    "an engine that goes waits for its copies": (
        programs.engine_gone,
        Fault(f"{ENGINE}.__del__", "event.synchronize()"),
    ),
    "a source is taken back on its own stream": (
        programs.taken_back_on_another_stream,
        Fault(f"{ENGINE}._take_back", "ticket.block.stream != live", "False"),
    ),
    "what came is used on the stream it came for": (
        programs.landed_for_another_stream,
        Fault(f"{ENGINE}._is_good", "reload.is_for(live) and ", ""),
    ),
    "also what is there already": (
        programs.there_for_another_stream,
        Fault(f"{ENGINE}.deliver", "at.stream == live", "True"),
    ),
    "and shared there": (
        programs.same_bytes_landed_for_another_stream,
        Fault(f"{RELOADS}.same_bytes", "reload.is_for(live)", "reload.arrival is not None"),
    ),
    "plain: d2h waits for compute": (
        programs.plain_computed_late,
        Fault(f"{PLAIN}.copy_to_host", "wait(backend.d2h, record(stream))"),
    ),
    "plain: sources are kept until they are copied": (
        programs.plain_source_let_go,
        Fault(
            f"{PLAIN}.copy_to_host",
            "self.transfer.copies.in_flight.begin(dense,",
            "self.transfer.copies.in_flight.begin([],",
        ),
    ),
    "plain: h2d waits for compute": (
        programs.plain_brought_into_memory_in_use,
        Fault(f"{PLAIN}.copy_to_device", "wait(backend.h2d, record(stream))"),
    ),
    "plain: a target nobody wants is kept until it is written": (
        programs.plain_target_nobody_wants,
        Fault(f"{PLAIN}.copy_to_device", "[*sources, *targets]", "sources"),
        Fault(f"{PLAIN}.poll", "if not one[0].query()", "if False"),
    ),
    "plain: copies that go are waited for": (
        programs.plain_copies_gone,
        Fault(f"{PLAIN}.__del__", "event.synchronize()"),
    ),
    "plain: the host waits before it reads": (
        programs.plain_read_by_the_host,
        Fault(f"{PLAIN}.synchronize", "pending.event.synchronize()"),
    ),
    "disk: a thread writes what has arrived": (
        programs.written_before_it_arrived,
        Fault("_transfer/disk_staged:_has_arrived", "block.offloaded.query()", "True"),
    ),
    "disk: d2h waits for the copy back of what was there": (
        programs.staged_while_the_copy_back_reads,
        Fault(f"{COPIES}._d2h_waits_for_last_users", "in buffer.before:", "in ():"),
        Fault(f"{STAGED}.allocate", "= copies, None", "= (), None"),
    ),
    "disk: so does a thread that reads into it": (
        programs.read_while_the_copy_back_reads,
        Fault(f"{STAGED}._begin_to_read", "reading, after=buffer.before", "reading"),
        Fault("_memory/disk:DiskFile._queue", "wait_for((event,))"),
    ),
    "disk: d2h waits for a thread that reads into it": (
        programs.staged_while_a_thread_reads_into_it,
        Fault(f"{STAGED}.allocate", "check_finished(", "tuple("),
    ),
    "disk: h2d waits for the thread that reads": (
        programs.brought_before_it_was_read,
        Fault(
            f"{STAGED}._finish_reading",
            "check_finished((block.reading,))\n    try:\n        block.reading.synchronize()",
            "try:\n        pass",
        ),
    ),
}


PINNED = "pinned memory is nobody's before its copies were made"
BY_OTHERS = {
    f"{COPIES}.join": "a copy stream waits for compute only to be part of a capture",
    f"{STAGED}._finish_reading": "a thread has waited for these copies; only the host asks again",
    f"{ENGINE}.close": "each tier waits for the copies that use it before it drops its memory",
    "_memory/host:HostMemory.release_idle": PINNED,
    "_memory/host:HostMemory._drop_slabs": PINNED,
    "_memory/host:HostMemory._wait_for_copies": PINNED,
    "_transfer/copies:wait": "only passes it on",
    "_transfer/copies:Queued.synchronize": "only passes it on",
}
"""One wait each that can be left out on an accelerator without harm, and why.

PyTorch's allocator of pinned memory knows each copy that used a block. Where the device is the host
nobody does; tests/transfer/test_hazards.py shows these waits there.
"""

ORDERING = (
    *(
        f"_transfer/{name}"
        for name in (
            "engine",
            "copies",
            "pending_reloads",
            "in_flight",
            "plain_copies",
            "disk_staged",
            "disk_direct",
        )
    ),
    "_memory/host",
    "_memory/disk",
)
WAITING = ("wait_event", "synchronize", "wait", "wait_for", "check_finished")


def waits_in(module: str) -> Iterator[str]:
    """The functions of a module that wait, each as often as it does."""
    path = Path(pp_offload.__file__).parent / f"{module}.py"
    tree = ast.parse(path.read_text())
    classes = [(f"{one.name}.", one.body) for one in tree.body if isinstance(one, ast.ClassDef)]
    for prefix, body in [("", tree.body), *classes]:
        for function in (one for one in body if isinstance(one, ast.FunctionDef)):
            for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
                if getattr(call.func, "attr", getattr(call.func, "id", None)) in WAITING:
                    yield f"{module}:{prefix}{function.name}"


def waits() -> Counter[str]:
    return Counter(one for module in ORDERING for one in waits_in(module))


def waits_left_out() -> Iterator[str]:
    """The functions that lose one, each as often as it does; a condition counts as one."""
    for fault in {fault for _, *faults in CASES.values() for fault in faults}:
        num = sum(fault.line.count(f"{name}(") for name in WAITING)
        yield from [fault.function] * max(num, 1)


def test_every_wait_is_among_these() -> None:
    shown = Counter([*waits_left_out(), *BY_OTHERS])
    assert {one: num - shown[one] for one, num in waits().items() if num > shown[one]} == {}


def test_all_of_them_are_in_the_table() -> None:
    text = (Path(pp_offload.__file__).parents[1] / "docs" / "emulated.md").read_text()
    assert [name for name in CASES if f"| {name} |" not in text] == []
    assert f"{len(CASES)} rules, {len(list(each_alone()))} lines" in text
    assert f"{sum(waits().values())} calls that wait" in text


def each_alone() -> Iterator[Any]:
    for name, (case, *faults) in CASES.items():
        for number, fault in enumerate(faults, 1):
            yield pytest.param(case, fault, id=f"{name} {number}" if len(faults) > 1 else name)


@pytest.mark.parametrize(("case", "fault"), list(each_alone()))
def test_each_line_is_where_it_is_said(
    case: Callable[[Program], bool], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.plant(monkeypatch)


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "fault"), list(each_alone()))
def test_without_a_wait_the_bytes_are_wrong(
    emulated: ModuleType,
    case: Callable[[Program], bool],
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fault.plant(monkeypatch)
    assert not case(Program(emulated, waits=False, folder=tmp_path))


@pytest.mark.emulated
@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in CASES.values()))
def test_with_all_waits_they_are_right(
    emulated: ModuleType, case: Callable[[Program], bool], tmp_path: Path
) -> None:
    assert case(Program(emulated, waits=True, folder=tmp_path))
