"""Listeners hear what the engine does, at once and in order; what nobody hears is not told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs
from test_captures import manager_of, pair, step
from test_one_lock import is_free
from toy import assert_idle, assert_no_hooks, batches, make_model, run_step, same_bits

from pp_offload import OffloadConfig, OffloadModel, PipelineOffloadManager, use_backend
from pp_offload._groups.group import GroupState
from pp_offload._memory.budget import reserved_bytes
from pp_offload._transfer.counters import TransferCounters
from pp_offload._transfer.listeners import Listener, Listeners
from pp_offload._transfer.ticket import NOWHERE, Ticket

EVENTS = [event.name for event in fields(Listeners)]
WITHOUT_LOCK = {"leaving", "left", "kept", "group_closed", "delivered", "step_begun"}
TIERS: list[tuple[str, ...]] = [("host",), ("disk",), ("host", "disk")]


class Heard(Listener):
    """Notes every event, with what it was told and whether another thread could have the lock.

    Of tickets their labels, and no tensor: whoever holds those keeps them alive.
    """

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []
        self.was_free: dict[str, set[bool]] = {}
        self._lock = manager.wiring.transfer.lock
        manager.wiring.transfer.listeners.add(self)

    def note(self, event: str, *told: Any) -> None:
        self.told.append((event, tuple(map(label_of, told))))
        self.was_free.setdefault(event, set()).add(is_free(self._lock))

    def of(self, event: str) -> list[tuple[Any, ...]]:
        return [told for name, told in self.told if name == event]


def label_of(told: Any) -> Any:
    if isinstance(told, Ticket):
        return told.label
    if isinstance(told, list | torch.Tensor):
        return len(told)
    return told


def hears(event: str) -> Callable[..., None]:
    def hear(self: Heard, *args: Any, **options: Any) -> None:
        self.note(event, *args, *options.values())

    return hear


for _event in EVENTS:
    setattr(Heard, _event, hears(_event))


def test_every_event_has_its_place() -> None:
    methods = [name for name in vars(Listener) if not name.startswith("_")]
    assert methods == EVENTS


@pytest.mark.covering(1)
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("kind", BACKENDS)
def test_what_is_heard_is_what_happens(kind: str, tiers: tuple[str, ...], tmp_path: Path) -> None:
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
        host_budget_bytes=reserved_bytes() + 2**18 if len(tiers) == 2 else None,
    )
    with use_backend(make_backend(kind), config=config) as manager:
        device = str(manager.backend.device)
        heard = Heard(manager)
        on, off = make_model(device=device), make_model(groups=(), device=device)
        for number in range(3):
            inputs = [x.to(device) for x in batches(3, step=number)]
            expected = run_step(off, inputs, in_flight=2, offload=False)
            assert same_bits(run_step(on, inputs, in_flight=2), expected)
        statistics = manager.statistics()
        assert_idle(manager)
    groups = [group for (group,) in heard.of("group_opened")]
    assert [group.name for group in groups] == ["mix", "mlp"] * 3 * 3 * 3
    assert [group for (group,) in heard.of("group_closed")] == groups
    assert Counter(group.name for (group,) in heard.of("group_reached")) == {"mix": 27, "mlp": 27}
    assert sum(nbytes for _, nbytes in heard.of("offloaded")) == statistics.bytes_offloaded > 0
    assert sum(n for _, n in heard.of("reload_started")) == statistics.bytes_reloaded > 0
    num = Counter[bool]()
    for queued, is_ahead in heard.of("reloads_queued"):
        num[is_ahead] += queued
    assert num[True] == statistics.prefetched_reloads > 0
    assert num[False] == statistics.on_demand_reloads
    assert len(heard.of("taken_back")) == statistics.taken_back
    left = [group for group in groups if group.state is GroupState.OFFLOADED]
    assert len(heard.of("leaving")) == len(left) > 0
    assert heard.of("left") == heard.of("leaving")
    kept = [group for group in groups if group.state is GroupState.KEPT]
    assert len(heard.of("kept")) == len(kept) > 0
    assert {label for label, _ in heard.of("delivered")} == {"mix", "mlp"}
    assert heard.of("step_begun") == [()] * 3 and not heard.of("replaced")
    for event, was_free in heard.was_free.items():
        assert was_free == {event in WITHOUT_LOCK}, event


class Order(Listener):
    """A group's events, and a payload's."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def group_opened(self, group: Any) -> None:
        self.events.append(f"{group.name} opened")

    def leaving(self, tickets: Sequence[Any]) -> None:
        assert all(ticket.block is NOWHERE for ticket in tickets)
        self.events.append(f"{tickets[0].label} leaves")

    def offloaded(self, label: str, nbytes: int) -> None:
        self.events.append(f"{label} offloaded")

    def group_closed(self, group: Any) -> None:
        assert group.state is GroupState.OFFLOADED
        self.events.append(f"{group.name} closed")

    def group_reached(self, group: Any) -> None:
        self.events.append(f"{group.name} reached")

    def delivered(self, ticket: Any, tensor: torch.Tensor) -> None:
        assert tensor.nbytes == ticket.nbytes
        self.events.append(f"{ticket.label} delivered")


def test_events_come_in_order() -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend("late"), config=config) as manager:
        order = Order()
        manager.wiring.transfer.listeners.add(order)
        run_step(make_model(layers=1, groups=("mix",)), batches(1))
    delivered = order.events[5:]
    assert order.events[:5] == [
        "mix opened",
        "mix leaves",
        "mix offloaded",
        "mix closed",
        "mix reached",
    ]
    assert delivered == ["mix delivered"] * len(delivered) and delivered


def test_in_a_capture_nothing_is_said_to_leave() -> None:
    """What leaves there holds no bytes yet that somebody could read."""
    with manager_of("late") as (manager, device):
        on, _ = pair()
        inputs = make_inputs(1)
        step(on, inputs)  # which makes host memory
        heard = Heard(manager)
        step(on, inputs, device)
        assert heard.of("group_closed") and heard.of("offloaded")
        assert not heard.of("leaving")
        step(on, inputs)
        assert heard.of("leaving")


def test_of_another_engine_it_is_heard_when_the_manager_has_it() -> None:
    with use_backend(make_backend("late")) as manager:
        engines: list[Any] = []

        class Follows(Listener):
            def replaced(self) -> None:
                engines.append(manager.wiring.transfer)

        old = manager.wiring.transfer
        old.listeners.add(Follows())
        manager.configure(manager.config)
        assert not engines, "these options were there"
        manager.configure(OffloadConfig(min_offloaded_tensor_size=1))
        assert engines == [manager.wiring.transfer] and engines != [old]
        assert not manager.wiring.transfer.listeners.replaced


class Raises(Listener):
    """When the third payload is given out."""

    num = 0

    def delivered(self, ticket: Any, tensor: torch.Tensor) -> None:
        self.num += 1
        if self.num == 3:
            raise ArithmeticError("heard enough")


def test_what_a_listener_raises_goes_to_the_program_and_the_next_step_is_right() -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend("late"), config=config) as manager:
        on, off = make_model(), make_model(groups=())
        manager.wiring.transfer.listeners.add(Raises())
        with pytest.raises(ArithmeticError, match="heard enough"):
            run_step(on, batches(2))
        on.zero_grad()
        manager.reset()
        expected = run_step(off, batches(2), offload=False)
        assert same_bits(run_step(on, batches(2)), expected)
        assert_idle(manager)
        assert_no_hooks()


def test_who_overrides_nothing_is_not_called() -> None:
    listeners = Listeners()
    listeners.add(Listener())
    assert not any(getattr(listeners, event) for event in EVENTS)
    listeners.add(order := Order())
    listeners.add(counters := TransferCounters())
    assert listeners.offloaded == (order.offloaded, counters.offloaded)
    assert not listeners.reload_started[1:] and not listeners.leaving[1:]
    listeners.remove(order)
    assert listeners.offloaded == (counters.offloaded,) and not listeners.leaving
    listeners.remove(order)
    assert listeners.offloaded == (counters.offloaded,)


def test_of_a_model_in_slices_its_copies_are_heard() -> None:
    class Labels(Listener):
        def __init__(self) -> None:
            self.out, self.back = Counter[str](), Counter[str]()

        def offloaded(self, label: str, nbytes: int) -> None:
            self.out[label] += nbytes

        def reload_started(self, label: str, nbytes: int) -> None:
            self.back[label] += nbytes

    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = OffloadModel(layers, torch.device("cpu"), num_slices=2)
    transfer: Any = model._cache.copies.transfer
    transfer.listeners.add(labels := Labels())
    model(torch.randn(2, 4)).sum().backward()
    assert labels.back.keys() == {"slice 0", "slice 1"}
    assert sum(labels.back.values()) == model.statistics().bytes_reloaded
    assert sum(labels.out.values()) == model.statistics().bytes_offloaded > 0
