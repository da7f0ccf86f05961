"""Observers hear what an engine does, at once and in order; what nobody hears is not told."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
from conftest import make_backend
from lines import Line
from test_engine_programs import Layer, run
from test_one_lock import is_free
from torch import nn

from pp_offload import OffloadConfig
from pp_offload._core.group import GroupState
from pp_offload._core.observer import Observer, Observers
from pp_offload._core.stopwatch import Laps
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import timed_by_host
from pp_offload.errors import VerifyError

EVENTS = [event.name for event in fields(Observers)]
UNDER_THE_LOCK = {"opened", "reached", "copied"}
SIZES = [4, 6, 5]


class Heard(Observer):
    """Notes every event, and whether another thread could have the lock."""

    def __init__(self, lock: Any) -> None:
        self.told: list[tuple[str, str]] = []
        self.nbytes = Counter[bool]()
        self.states = Counter[GroupState]()
        self.was_free: dict[str, set[bool]] = {}
        self._lock = lock

    def _note(self, event: str, name: str = "") -> None:
        self.told.append((event, name))
        self.was_free.setdefault(event, set()).add(is_free(self._lock))

    def num(self, event: str) -> int:
        return sum(name == event for name, _ in self.told)

    def opened(self, group: Any) -> None:
        self._note("opened", group.name)

    def closed(self, group: Any, payloads: Any) -> None:
        self._note("closed", group.name)
        self.states[group.state] += 1
        away = [saved.tensor is None for members in payloads.members for saved in members]
        assert set(away) == {group.state is GroupState.OFFLOADED}
        assert sum(tensor.nbytes for tensor in payloads.tensors) == group.counts.nbytes > 0

    def reached(self, group: Any) -> None:
        self._note("reached", group.name)

    def used(self, saved: Any, payload: Any) -> None:
        self._note("used", saved.group.name)
        assert payload.nbytes == saved.batch.sizes[saved.index]

    def copied(self, lap: Any, moved: Any, event: Any, *, to_host: bool) -> None:
        self._note("copied")
        sizes = [batch.sizes[index] for batch, indices in moved for index in indices]
        assert lap.nbytes == sum(sizes)
        self.nbytes[to_host] += lap.nbytes

    def waited(self, lap: Any, event: Any) -> None:
        self._note("waited")
        assert lap.nbytes == 0


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer(8), Layer(8)])


def test_every_event_has_its_place() -> None:
    assert [name for name in vars(Observer) if not name.startswith("_")] == EVENTS


@pytest.mark.parametrize("kind", ["late", "random", "cpu", "cpu threads"])
def test_what_is_heard_is_what_happens(kind: str) -> None:
    line = Line(make_backend(kind), max_in_flight_bytes=0, prefetch_bytes=700)
    mover = line.engine.mover
    heard = Heard(mover.lock)
    line.engine.observers.add(heard)
    for _ in range(2):
        line.reset()
        run(layers(), SIZES, 1, line)
    line.engine.observers.remove(heard)
    assert heard.num("closed") == heard.num("reached") == 2 * 2 * 2 * len(SIZES)
    assert heard.states == {GroupState.OFFLOADED: heard.num("closed")}
    assert heard.nbytes[True] == mover.counts.bytes_offloaded > 0
    assert heard.nbytes[False] == mover.counts.bytes_reloaded > 0
    assert heard.num("used") > 0
    num_queued = mover.counts.prefetched_reloads + mover.counts.on_demand_reloads
    assert heard.num("used") >= num_queued or mover.counts.taken_back
    for event, was_free in heard.was_free.items():
        assert was_free == {event not in UNDER_THE_LOCK}, event
    seen = [name for event, name in heard.told if event == "reached"]
    assert seen == ["mlp", "attn"] * (len(seen) // 2)


def test_a_group_is_heard_from_open_to_use() -> None:
    offloader = Offloader(make_backend("late"), OffloadConfig())
    heard = Heard(offloader.lock)
    offloader.observers.add(heard)
    chunk = Chunk(1, offloader)
    group = chunk.start("mlp")
    packed = group.pack(torch.ones(8, 8))
    chunk.commit("mlp")
    assert [event for event, _ in heard.told] == ["opened", "copied", "closed"]
    offloader.engine.mover.synchronize()
    assert torch.equal(packed.unpack(), torch.ones(8, 8))
    assert heard.told[-4:] == [("reached", "mlp"), ("copied", ""), ("waited", ""), ("used", "mlp")]
    group = chunk.start("mlp")
    packed = group.pack(torch.ones(8, 8))
    offloader.engine.is_enabled = False
    chunk.commit("mlp")
    assert heard.told[-1] == ("closed", "mlp") and heard.states[GroupState.KEPT] == 1


def test_who_listens_no_more_hears_nothing_and_keeps_nothing() -> None:
    line = Line(make_backend("late"))
    heard, engine = Heard(line.engine.mover.lock), line.engine
    engine.observers.add(Observer())
    assert engine.observers == Observers(), "what nobody overrides is not called"
    engine.observers.add(heard)
    gc.collect()
    gc.disable()
    try:
        run(layers(), SIZES, 1, line)
        line.assert_clean()  # by references alone
    finally:
        gc.enable()
    engine.observers.remove(heard)
    assert engine.observers == Observers()
    num = len(heard.told)
    run(layers(), SIZES, 1, line)
    assert len(heard.told) == num


def test_what_an_observer_raises_goes_to_the_program() -> None:
    class Raises(Observer):
        def used(self, saved: Any, payload: Any) -> None:
            raise VerifyError("it is something else")

    line = Line(make_backend("late"))
    line.engine.observers.add(Raises())
    with pytest.raises(VerifyError, match="something else"):
        run(layers(), SIZES, 1, line)
    assert not line.engine.is_torn


def test_laps_say_how_long_copies_took(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend("cpu threads")
    assert Laps.started(backend) is None, "this device has no clock of its own"
    line = Line(backend, max_in_flight_bytes=0)
    laps = Laps(timed_by_host(backend.current_stream()))
    line.engine.observers.add(laps)
    run(layers(), SIZES, 1, line)
    end = laps.now(backend)
    line.engine.mover.synchronize()
    assert end is not None and laps.are_over() and not laps.is_cut
    assert sum(lap.nbytes for lap in laps.offloads) == line.engine.mover.counts.bytes_offloaded
    assert all(0 <= laps.seconds_until(lap.begin) <= laps.seconds_until(end) for lap in laps.waits)
    monkeypatch.setattr(type(backend), "is_capturing", property(lambda self: True))
    assert laps.now(backend) is None and laps.is_cut
