"""Faults for the core tests to catch: of the package's functions, and of the device under it.

    FAULTS["sources are not kept"].plant(monkeypatch)

A fault of the device knows the backend's interface alone, so it outlives any rewrite of the engine.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """A fault of one function: a piece of its source is replaced, in this process alone."""

    function: str
    """Its module in the package, and its name there: ``_core/mover:Mover.join``."""

    line: str
    """What must be there exactly once. Short, so that it outlives what is written around it."""

    instead: str = "pass"
    """What stands there then."""

    tests: str = "tests/core"
    """File or folder of which a test has to fail."""

    def source(self) -> str:
        """The function with the fault.

        Raises:
            ValueError: ``line`` is not there exactly once.
        """
        source = textwrap.dedent(inspect.getsource(self._resolved()))
        if source.count(self.line) != 1:
            num = source.count(self.line)
            raise ValueError(f"{self.line!r} is {num} times in {self.function}, expected once")
        return source.replace(self.line, self.instead)

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Give the function its faulty code, wherever it was imported to."""
        function = self._resolved()
        scope: dict[str, Any] = {}
        exec(self.source(), function.__globals__, scope)
        faulty = _function(scope[function.__name__])
        patch.setattr(function, "__code__", faulty.__code__)

    def _resolved(self) -> Any:
        return _function(resolve_name(f"pp_offload.{self.function.replace('/', '.')}"))


def _function(method: Any) -> Any:
    """The plain function of a method or of a decorated function."""
    return inspect.unwrap(getattr(method, "__func__", method))


@dataclass(frozen=True)
class DeviceFault:
    """A fault of each simulated backend that is made from now on."""

    change: Callable[[Any], None]
    """Changes a backend that was just made."""

    tests: str = "tests/core/test_order.py"
    """File or folder of which a test has to fail."""

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the public class."""
        import pp_offload.testing

        change = self.change

        class Faulty(pp_offload.testing.SimulatedBackend):
            """A simulated device with the fault."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                change(self)

        patch.setattr(pp_offload.testing, "SimulatedBackend", Faulty)


def ignores(waiting: str, other: str) -> DeviceFault:
    """A stream that does not wait for events of another; each is compute, d2h or h2d."""

    def is_of_other(backend: Any, stream: Any) -> bool:
        return not stream.is_copy if other == "compute" else stream is getattr(backend, other)

    def change(backend: Any) -> None:
        def forget(stream: Any) -> None:
            wait = stream.wait_event
            stream.wait_event = lambda event: (
                None if is_of_other(backend, event.stream) else wait(event)
            )

        if waiting == "compute":
            _each_compute_stream(backend, forget)
        else:
            forget(getattr(backend, waiting))

    return DeviceFault(change)


def _each_compute_stream(backend: Any, change: Callable[[Any], None]) -> None:
    """Change the main compute stream, and those that are made later."""
    change(backend.current_stream())
    new_stream = backend.new_stream

    def make(name: str) -> Any:
        stream = new_stream(name)
        change(stream)
        return stream

    backend.new_stream = make


def events_lie(name: str) -> DeviceFault:
    """Events of a copy stream that say they are done at once."""

    def change(backend: Any) -> None:
        stream = getattr(backend, name)
        record_event = stream.record_event

        def record() -> Any:
            event = record_event()
            event.query = lambda: True
            return event

        stream.record_event = record

    return DeviceFault(change)


def copies_to_host(change: Callable[[list[Any]], list[Any]]) -> DeviceFault:
    """Copies to the host whose targets are changed."""

    def replace(backend: Any) -> None:
        copy = backend.copy

        def queue(stream: Any, targets: list[Any], sources: list[Any], label: str) -> None:
            is_to_host = stream is backend.d2h
            targets = change(targets) if is_to_host else targets
            copy(stream, targets, sources[: len(targets)], label)

        backend.copy = queue

    return DeviceFault(replace, "tests/core/test_payloads.py")


def _swapped(targets: list[Any]) -> list[Any]:
    """Where two tensors of one shape are copied at a time, each goes where the other should."""
    shapes = [(t.shape, t.dtype) for t in targets]
    return targets[::-1] if shapes == shapes[::-1] else targets


def _host_memory_is_given_twice(backend: Any) -> None:
    given: dict[int, Any] = {}
    allocate = backend.allocate_host

    def allocate_host(nbytes: int) -> Any:
        if nbytes not in given:
            given[nbytes] = allocate(nbytes)
        return given[nbytes]

    backend.allocate_host = allocate_host


def _live_stream_is_cached(backend: Any) -> None:
    """The engine sees the stream that was current at first; operators run on the live one."""
    live, first, activate = backend.current_stream, backend.current_stream(), backend.activate

    def activated() -> Any:
        backend.current_stream = live
        try:
            return activate()
        finally:
            backend.current_stream = lambda: first

    backend.activate = activated
    backend.current_stream = lambda: first


_ORDER = "tests/core/test_order.py"
_PAYLOADS = "tests/core/test_payloads.py"
_RECIPES = "tests/core/test_recipes.py"
_SHARING = "tests/core/test_lifetime_and_sharing.py"
_BOUNDS = "tests/core/test_bounds_and_disk.py"
_CUT_OFF = "tests/core/test_threads_and_interruptions.py"

DEVICE = {
    "d2h ignores compute": ignores("d2h", "compute"),
    "h2d ignores compute": ignores("h2d", "compute"),
    "h2d ignores d2h": ignores("h2d", "d2h"),
    "d2h ignores h2d": ignores("d2h", "h2d"),
    "compute ignores h2d": ignores("compute", "h2d"),
    "compute ignores d2h": ignores("compute", "d2h"),
    "d2h events say yes": events_lie("d2h"),
    "h2d events say yes": events_lie("h2d"),
    "live stream is cached": DeviceFault(_live_stream_is_cached),
    "host memory is given twice": DeviceFault(_host_memory_is_given_twice),
    "last copy to host is forgotten": copies_to_host(lambda targets: targets[:-1]),
    "copies to host are swapped": copies_to_host(_swapped),
}

PACKAGE = {
    "a recipe that was refused is used": Fault(
        "_core/recipes:Recipes.proved", "proof is _REFUSED", "False", _RECIPES
    ),
    "an input of a recipe was changed": Fault(
        "_core/search:Walk._leaf", "tensor._version != packed.version", "False", _RECIPES
    ),
    "a recipe has a parameter, and no copy of it": Fault(
        "_core/recipes:Recipes._copied",
        "leaf.tensor not in self.eligibility.residents",
        "True",
        _RECIPES,
    ),
    "a change of a saved tensor is not noticed": Fault(
        "_core/saved:Saved.unpack", "tensor._version != self.version", "False", _PAYLOADS
    ),
    "a change of what stays is not noticed": Fault(
        "_core/saved:Resident.unpack", "tensor._version != self.version", "False", _PAYLOADS
    ),
    "a change of a source is not noticed": Fault(
        "_core/batch:Leaving.changed", "tensor._version != version", "False", _PAYLOADS
    ),
    "changes are forgotten when the source goes": Fault(
        "_core/in_flight:InFlight.let_go_first", "batch.changed |= leaving.changed()", "pass"
    ),
    "what came for another stream is handed out": Fault(
        "_core/mover:Mover.deliver", "reload.stream == live", "True", _ORDER
    ),
    "a copy is shared by all versions": Fault(
        "_core/shared:_is_same",
        "member.version != first.version or member.wrapper is not None",
        "False",
        _SHARING,
    ),
    "uses by other groups are not counted": Fault(
        "_core/batch:Batch.use_again", "back.uses_left[index] += num", "pass", _SHARING
    ),
    "a shared copy has one shape for all": Fault(
        "_core/shared:restored_from",
        "shape != tensor.shape or dtype != tensor.dtype or not tensor.is_contiguous()",
        "False",
        _SHARING,
    ),
    "what a backward changed is used again": Fault(
        "_core/mover:Mover._use", "before not in (-1, version)", "False", _PAYLOADS
    ),
    "what backward got before and changed is given again": Fault(
        "_core/mover:Mover._again", "tensor._version != back.versions[index]", "False", _PAYLOADS
    ),
    "what was computed again and changed is given again": Fault(
        "_core/recipes:Recipe.give", "tensor._version != given[1]", "False", _PAYLOADS
    ),
    "statistics are an input of a recipe": Fault(
        "_core/search:Walk.input", "may_be_statistics(packed.tensor)", "False", _RECIPES
    ),
    "a tensor is emptied behind the copy of the oldest group": Fault(
        "_core/mover:Mover.after_copies",
        "self.in_flight.queue[-1]",
        "self.in_flight.queue[0]",
        _PAYLOADS,
    ),
    "copies are shared with the last step": Fault(
        "_core/engine:Engine.begin_step",
        "self.shared.begin_step(self.eligibility.residents)",
        "pass",
        _SHARING,
    ),
    "reloads do not count in the window": Fault(
        "_core/mover:Mover._copy_back", "self.arrived.unused_bytes += nbytes", "pass", _PAYLOADS
    ),
    "sources are not kept": Fault(
        "_core/mover:Mover.offload", "self.in_flight.queue.append(leaving)", "pass", _PAYLOADS
    ),
    "sources above the bound go without a wait": Fault(
        "_core/mover:Mover._wait_for_oldest", "self._wait(streams.wait, event)", "pass", _ORDER
    ),
    "no bound on what is in flight": Fault(
        "_core/engine:Engine.send",
        "mover.keep_bounded(group.counts.copied_bytes)",
        "pass",
        _BOUNDS,
    ),
    "unused memory is dropped under its copy": Fault(
        "_core/in_flight:Arrived.put_away",
        "self.abandoned.append((tensor, reload))",
        "pass",
        _ORDER,
    ),
    "host memory is given on without its last use": Fault(
        "_memory/host_pool:HostPool._collect",
        "host.waits_for, host.last_use = (host.last_use,), None",
        "host.waits_for, host.last_use = (), None",
        _ORDER,
    ),
    "a reload is no use of host memory": Fault(
        "_core/mover:Mover._copy_back", "batch.place.last_use = event", "pass", _ORDER
    ),
    "d2h does not wait for side streams": Fault(
        "_core/mover:Mover.offload", "d2h.wait_event(side.record_event())", "pass", _ORDER
    ),
    "a forked process uses the graphs of its parent": Fault(
        "_core/mover:_after_fork", "mover.current_stream = forked", "pass", _CUT_OFF
    ),
    "no room is an error": Fault(
        "_core/engine:Engine._try_to_send", "except MemoryError as", "except KeyError as", _BOUNDS
    ),
    "bytes from the disk are not compared": Fault(
        "_memory/disk_file:DiskFile.read_into", "!= extent.checksum", "is None", _BOUNDS
    ),
    "hooks stay where a forward is cut off": Fault(
        "_hooks:HookScope.leave",
        "if top_pack() is self._pack or self._pack in all_packs():",
        "if failure is None:",
        _CUT_OFF,
    ),
    "microbatches that the plan does not know stay": Fault(
        "_groups/plan:Plan.keeps",
        "return groups[:1]",
        "return bool(self.names) or groups[:1]",
        _BOUNDS,
    ),
}

FAULTS: dict[str, Fault | DeviceFault] = {**DEVICE, **PACKAGE}
"""By name. One that does not apply any more is renewed, or goes with what it was in."""
