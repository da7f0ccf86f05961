"""Each wait of the engine, and each thing it keeps alive, left out: the bytes come out wrong.

A program is run as it is, and once without each line that makes the wait: see programs.py.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from planted.faults import Fault

import pp_offload
from emulated import programs
from emulated.programs import Program

MOVER, ARRIVED = "_core/mover:Mover", "_core/mover:Arrived"
IN_FLIGHT, STREAMS = "_core/in_flight:InFlight", "_core/in_flight:ComputeStreams"
CHUNK, POOL = "_groups/chunk:Chunk", "_memory/host_pool:HostPool"
DISK, FILE = "_core/tiers:DiskTier", "_memory/disk_file:DiskFile"
PLAIN = "_slices/plain_copies:PlainCopies"

Case = tuple[Any, ...]
"""A program behind what tells whether it went well, and faults: ``Callable``, then ``Fault``s."""

CASES: dict[str, Case] = {
    "d2h waits for compute": (
        programs.computed_late,
        Fault(f"{MOVER}.offload", "d2h.wait_event(live.record_event())"),
    ),
    "d2h waits for each stream that computed": (
        programs.computed_late_on_another_stream,
        Fault(f"{MOVER}.offload", "d2h.wait_event(side.record_event())"),
        Fault("_core/group:Group.pack", "self.streams.append(stream)"),
    ),
    "a gather waits for the stream that computed": (
        programs.gathered_of_what_is_computed_late,
        Fault(f"{MOVER}._gather", "live.wait_event(side.record_event())"),
    ),
    "the stream that computed waits for a gather": (
        programs.gathered_late,
        Fault(f"{MOVER}._gather", "side.wait_event(live.record_event())"),
    ),
    "sources are kept until they are copied": (
        programs.source_let_go,
        Fault(f"{MOVER}.offload", "if not event.query()", "if False"),
        Fault(f"{IN_FLIGHT}.poll", "queue[0].offloaded.query()", "True"),
    ),
    "so is what was gathered": (
        programs.gathered_source_let_go,
        Fault("_core/mover:_leaving", "payloads.tensors", "[]"),
    ),
    "a source is emptied when it is copied": (
        programs.source_emptied,
        Fault(f"{IN_FLIGHT}.after_last", "self.then.append((self.queue[-1], action))", "action()"),
    ),
    "compute waits where too much is in flight": (
        programs.too_much_in_flight,
        Fault(
            f"{MOVER}._wait_for_oldest",
            "self._wait(streams.wait, event)",
        ),
        Fault(f"{STREAMS}.wait", "stream.wait_event(event)"),
    ),
    "so does each stream that saved a source": (
        programs.too_much_in_flight_of_another_stream,
        Fault(f"{MOVER}.offload", "self.in_flight.streams.append(stream)"),
    ),
    "each where a chunk began": (
        programs.too_much_in_flight_of_a_stream_where_the_chunk_began,
        Fault(f"{CHUNK}.__init__", "offloader.engine.follow(offloader.engine.current_stream())"),
    ),
    "each where a group began": (
        programs.too_much_in_flight_of_a_stream_where_a_group_began,
        Fault(f"{CHUNK}.start", "engine.follow(engine.current_stream())"),
    ),
    "and each that another engine has seen": (
        programs.too_much_in_flight_of_a_stream_that_another_engine_saw,
        Fault(f"{STREAMS}.of", "_OF_DEVICES.setdefault(backend.device, cls())", "cls()"),
    ),
    "compute joins the copies": (
        programs.joined,
        Fault(f"{MOVER}.join", "live.wait_event(side.record_event())"),
    ),
    "d2h waits for the last user of a buffer": (
        programs.buffer_read_for_another_stream,
        Fault(f"{MOVER}.offload", "d2h.wait_event(event)"),
        Fault(f"{MOVER}._copy_back", "batch.place.last_use = event"),
        Fault(f"{POOL}._collect", "(host.last_use,), None", "(), None"),
    ),
    "also where an owner in between did not use it": (
        programs.buffer_that_an_owner_did_not_use,
        Fault(
            f"{POOL}._collect",
            "if host.last_use is not None:",
            "host.waits_for = ()\n        if host.last_use is not None:",
        ),
    ),
    "and in a forward beside a backward": (
        programs.forward_beside_a_backward,
        Fault(f"{MOVER}.offload", "d2h.wait_event(event)"),
    ),
    "d2h waits for those of the memory it is carved of": (
        programs.part_of_a_buffer_read_for_another_stream,
        Fault(f"{POOL}._break_up", "self._unfinished(host.waits_for)", "[]"),
        Fault(f"{POOL}._claim", "self._unfinished(events.values())", "()"),
        Fault(f"{POOL}._unfinished", "not event.query()", "False"),
    ),
    "also of a slab that is not given back": (
        programs.slab_read_for_another_stream,
        Fault(f"{POOL}._break_up", "not self._unfinished([self._pending[0].event])", "True"),
        Fault(f"{POOL}._drop_slabs", "if not use.event.query()", "if False"),
    ),
    "h2d waits for the offload": (
        programs.brought_before_it_left,
        Fault(f"{MOVER}._copy_back", "h2d.wait_event(batch.offloaded)"),
    ),
    "h2d waits for compute": (
        programs.brought_into_memory_in_use,
        Fault(f"{MOVER}._copy_back", "h2d.wait_event(live.record_event())"),
    ),
    "compute waits for the reload": (
        programs.used_before_it_is_back,
        Fault(f"{MOVER}._bring", "self._wait(live.wait_event, event)"),
        Fault(f"{MOVER}._wait", " wait(event)", " pass"),
        Fault(f"{MOVER}.deliver", "reload.is_there and ", ""),
    ),
    "also while waits are timed": (
        programs.used_before_it_is_back_and_timed,
        Fault("_core/stopwatch:timed_wait", " wait(event)", " pass"),
    ),
    "a target nobody wants is kept until it is written": (
        programs.target_nobody_wants,
        Fault(f"{MOVER}.offload", "arrived.backs.add(batch.back)"),
        Fault(f"{ARRIVED}.put_away", "self.abandoned.append((tensor, reload.event))"),
        Fault(f"{ARRIVED}.poll", "self.abandoned[0][1].query()", "True"),
    ),
    "so is one that came for another stream": (
        programs.target_of_another_stream,
        Fault(f"{ARRIVED}.put_away", "self.abandoned.append((tensor, reload.event))"),
    ),
    "and one that a part of a backward does not use": (
        programs.target_that_a_part_of_backward_does_not_use,
        Fault(f"{ARRIVED}.put_away", "self.abandoned.append((tensor, reload.event))"),
    ),
    "an engine that goes waits for its copies": (
        programs.engine_gone,
        Fault(
            f"{MOVER}.__del__",
            "for event in events:\n                event.synchronize()",
        ),
    ),
    "after an exception the next one waits for them": (
        programs.engine_torn,
        Fault("_groups/offloader:Offloader.renew_if_torn", "self.backend.synchronize()"),
    ),
    "a source is taken back on its own stream": (
        programs.taken_back_on_another_stream,
        Fault(f"{MOVER}.take_back", "leaving.stream != live", "False"),
    ),
    "what came is used on the stream it came for": (
        programs.landed_for_another_stream,
        Fault(f"{MOVER}._bring", "reload is None or reload.stream != live", "reload is None"),
    ),
    "also what is there already": (
        programs.there_for_another_stream,
        Fault(f"{MOVER}.deliver", "reload.is_there and reload.stream == live", "reload.is_there"),
    ),
    "and what it got lives": (
        programs.used_up_by_another_stream,
        Fault(
            f"{MOVER}._bring",
            "reload is not None and reload.stream == live",
            "reload is not None",
        ),
    ),
    "disk: a thread writes what has arrived": (
        programs.written_before_it_arrived,
        Fault(f"{DISK}.write", "after=[batch.offloaded]", "after=[]"),
        Fault(f"{FILE}.write", "wait_for_all(after)"),
    ),
    "disk: host memory is kept until it is written": (
        programs.staged_before_it_was_written,
        Fault(f"{DISK}.poll", "not batch.write.event.query()", "False"),
    ),
    "disk: d2h waits for the copy back of what was there": (
        programs.staged_while_the_copy_back_reads,
        Fault(f"{MOVER}._send_on", "reload.event = host.last_use =", "reload.event ="),
    ),
    "disk: so does a thread that reads into it": (
        programs.read_while_the_copy_back_reads,
        Fault(f"{DISK}.read", ", after=host.waits_for", ""),
        Fault(f"{FILE}.read_into", "wait_for_all([event])"),
    ),
    "disk: host memory is kept until it was read to": (
        programs.staged_while_a_thread_reads_into_it,
        Fault(f"{MOVER}._read", "self.tier.reads.append(read)"),
    ),
    "disk: h2d waits for the thread that reads": (
        programs.brought_before_it_was_read,
        Fault(f"{MOVER}._send_on", "read.event.synchronize()"),
    ),
    "disk: h2d waits for compute": (
        programs.read_for_memory_in_use,
        Fault(f"{MOVER}._send_on", "h2d.wait_event(event)"),
        Fault(f"{MOVER}._send_on", "(read.allocated, *host.waits_for)", "host.waits_for"),
    ),
    "plain: d2h waits for compute": (
        programs.plain_computed_late,
        Fault(f"{PLAIN}.copy_to_host", "backend.d2h.wait_event(stream.record_event())"),
    ),
    "plain: sources are kept until they are copied": (
        programs.plain_source_let_go,
        Fault(f"{PLAIN}._queue", "copy.end()", "copy.sources = ()"),
    ),
    "plain: compute waits where too much is in flight": (
        programs.plain_too_much_in_flight,
        Fault(f"{PLAIN}._keep_bounded", "self._streams.wait(going[0].end())"),
        Fault(f"{PLAIN}.copy_to_host", "self._streams.follow(stream)"),
    ),
    "plain: h2d waits for compute": (
        programs.plain_brought_into_memory_in_use,
        Fault(f"{PLAIN}.copy_to_device", "backend.h2d.wait_event(stream.record_event())"),
    ),
    "plain: a target nobody wants is kept until it is written": (
        programs.plain_target_nobody_wants,
        Fault(f"{PLAIN}._queue", "self._under_way.append(copy)"),
        Fault(f"{PLAIN}.poll", "copy.end().query()", "True"),
    ),
    "plain: copies that go are waited for": (
        programs.plain_copies_gone,
        Fault(f"{PLAIN}.__del__", "copy.end().synchronize()"),
    ),
    "plain: the host waits before it reads": (
        programs.plain_read_by_the_host,
        Fault(f"{PLAIN}.synchronize", "pending.end().synchronize()"),
    ),
}


PINNED = "pinned memory is nobody's before its copies were made"
BY_OTHERS = {
    f"{MOVER}.join": "a copy stream waits for compute only to be part of a capture",
    f"{MOVER}.synchronize": PINNED,
    f"{MOVER}.seen": "else a recipe would seem to give other bits, and its tensor be copied",
    "_groups/offloader:Offloader.trim": PINNED,
    "_core/engine:Engine.check_freed": "it reports what is in use, and frees nothing",
    "_core/engine:Engine.send": "until there is room; else it would ask again and again",
    f"{MOVER}.poll": "the same question, so that this never blocks",
    "_memory/disk_file:wait_for_all": "only passes it on",
    f"{FILE}.read_into": "the core has bytes read that it knows to be written",
    "_core/stopwatch:Laps.are_over": "times are read behind it, and no bytes",
    f"{POOL}._fit_slabs": "else more slabs would be made while those that copies use stay",
}
"""One wait each that can be left out on an accelerator without harm, and why.

PyTorch's allocator of pinned memory knows each copy that used a block. Where the device is the host
nobody does.
"""

PACKAGE = Path(pp_offload.__file__).parent
ORDERING = (
    *sorted(f"_core/{path.stem}" for path in (PACKAGE / "_core").glob("*.py")),
    "_groups/offloader",
    "_memory/host_pool",
    "_memory/disk_file",
    "_slices/plain_copies",
)
WAITING = ("wait_event", "synchronize", "wait", "wait_for_all", "query")


def waits_in(module: str) -> Iterator[str]:
    """The functions of a module that wait, or ask whether they need not, each as often."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
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
