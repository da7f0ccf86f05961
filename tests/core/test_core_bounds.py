"""Promises 5, 7, 8 and 10: bounds in bytes, exact accounts, changing steps, and running out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.nets import ROWS, WIDTH, Net, inputs, train
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    gradients,
    group,
    session,
    settle,
)
from torch import Tensor, nn

import pp_offload.testing
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend

PART = ROWS * WIDTH * 4
"""Bytes of one activation."""

kinds = pytest.mark.parametrize("kind", ["late", "threads"])
simulated = pytest.mark.parametrize("kind", ["late", "random:1"])


def saves_one(h: Tensor) -> Tensor:
    """A part that saves exactly one tensor, which nobody else has."""
    return h.mul(2).sin()


def chain(num: int, is_on: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Parts one behind another: each saves one tensor."""
    x = h = drawn(ROWS, WIDTH, seed=seed).requires_grad_()
    for number in range(num):
        h = group(h, saves_one, is_on, f"part {number % 2}")
    return x, h


# In flight


@simulated
@pytest.mark.parametrize("cap", [0, PART, 3 * PART])
def test_bytes_in_flight_are_capped_from_the_first_step_on(kind: str, cap: int) -> None:
    """The group that was offloaded last may be above the cap, unless that is 0."""
    with session(kind, max_in_flight_bytes=cap) as manager:
        for _ in range(3):
            begin_step()
            h = drawn(ROWS, WIDTH).requires_grad_()
            for number in range(6):
                h = group(h, saves_one, name=f"part {number % 2}")
                assert manager.statistics().bytes_in_flight <= (cap and cap + PART)
            h.sum().backward()
            del h
            assert_idle(manager)


@simulated
def test_the_device_holds_less_with_offload(kind: str) -> None:
    """Twenty activations are saved; a few are on the device at a time."""
    peaks = []
    for is_on in (False, True):
        options = {"max_in_flight_bytes": PART, "prefetch_bytes": PART}
        with session(kind, **options) as manager:
            manager.backend.take_device_peak()
            begin_step()
            x, h = chain(20, is_on)
            h.sum().backward()
            peaks.append(manager.backend.take_device_peak())
    assert peaks[0] > 20 * PART
    assert peaks[1] < 10 * PART


# Prefetch


@pytest.mark.field("F37")
@kinds
@pytest.mark.parametrize("window", [0, PART, 3 * PART])
def test_no_more_than_the_window_is_reloaded_ahead(kind: str, window: int) -> None:
    """One tensor may always be."""
    with session(kind, prefetch_bytes=window) as manager:
        unused: list[int] = []
        for _ in range(3):
            begin_step()
            h = drawn(ROWS, WIDTH).requires_grad_()
            for number in range(6):
                h = group(h, saves_one, name=f"part {number % 2}")
                h.register_hook(lambda _: unused.append(manager.statistics().bytes_reloaded_unused))
            settle(manager)
            h.sum().backward()
            del h
            assert_idle(manager)
        assert unused and max(unused) <= max(window, PART)
        assert window < 2 * PART or max(unused) > 0, "nothing is prefetched"


@pytest.mark.field("F48")
@kinds
def test_reloads_are_ahead_of_their_use(kind: str) -> None:
    """In the first step most, then all; also where the first group's input needs no gradient."""
    with session(kind) as manager:
        weight = nn.Parameter(drawn(WIDTH, WIDTH))
        for step in range(4):
            before = manager.statistics()
            begin_step()
            h = drawn(ROWS, WIDTH)
            for number in range(6):
                h = group(h, lambda h: saves_one(h @ weight), name=f"part {number % 2}")
            settle(manager)
            h.sum().backward()
            done = manager.statistics().since(before)
            assert done.prefetched_reloads > done.on_demand_reloads
            assert step == 0 or done.on_demand_reloads == 0
            del h
            assert_idle(manager)


# The steady state


class NoHostWait(pp_offload.testing.SimulatedBackend):
    """Raises if the host waits for an event, or for the device, when told to."""

    is_strict = False

    def __init__(self, order: str) -> None:
        super().__init__(order)
        for stream in (self.d2h, self.h2d, self.current_stream()):
            stream.record_event = self._refusing(stream.record_event)  # type: ignore[method-assign]

    def synchronize(self) -> None:
        assert not self.is_strict, "the host waits for the device"
        super().synchronize()

    def allocate_host(self, nbytes: int) -> Tensor:
        assert not self.is_strict, "host memory is allocated"
        return super().allocate_host(nbytes)

    def _refusing(self, record: Any) -> Any:
        def record_event() -> Any:
            event = record()
            wait = event.synchronize

            def synchronize() -> None:
                assert not self.is_strict, "the host waits for an event"
                wait()

            event.synchronize = synchronize
            return event

        return record_event


@pytest.mark.field("F33")
@pytest.mark.parametrize("order", ["late", "eager"])
@pytest.mark.parametrize("cap", [0, 4 * PART])
def test_the_steady_state_neither_waits_nor_allocates(order: str, cap: int) -> None:
    backend = NoHostWait(order)
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=cap)
    net = Net()
    with use_backend(backend, config=config) as manager:
        expected = train(net, inputs(4), False, ahead=2)
        for step in range(4):
            backend.is_strict = step > 0
            assert_same(train(net, inputs(4), True, ahead=2), expected, f"step {step}")
        backend.is_strict = False
        off_interface.reset()
        assert_idle(manager)


# Exact accounts


@kinds
def test_statistics_are_exact(kind: str) -> None:
    with session(kind) as manager:
        before = manager.statistics()
        begin_step()
        x, h = chain(4)
        assert manager.statistics().since(before).bytes_offloaded == 4 * PART
        assert manager.statistics().live_tensors > 0
        settle(manager)
        assert manager.statistics().bytes_in_flight == 0
        assert manager.statistics().host_bytes_in_use >= 4 * PART
        h.sum().backward()
        del h
        done = manager.statistics().since(before)
        assert done.bytes_reloaded == done.bytes_offloaded == 4 * PART
        assert done.prefetched_reloads + done.on_demand_reloads > 0
        assert done.host_bytes_peak >= 4 * PART
        assert_idle(manager)


# Steps that differ


@pytest.mark.field("F21")
@kinds
@pytest.mark.parametrize("counts", [(2, 6, 3, 8), (3, 4, 1)], ids=str)
def test_every_microbatch_offloads_however_many_there_are(
    kind: str, counts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes scale with microbatches: nothing is silently left on the device."""
    caplog.set_level("INFO")
    net = Net(("part",), layers=3)
    with session(kind) as manager:
        for step, num in enumerate(counts):
            before = manager.statistics().bytes_offloaded
            got = train(net, inputs(num, step=step), True, ahead=2)
            moved = manager.statistics().bytes_offloaded - before
            assert_same(got, train(net, inputs(num, step=step), False, ahead=2), f"step {step}")
            # A group saves two tensors or three; one group of each name may stay.
            assert moved >= num * 2 * 2 * PART
            assert_idle(manager)
    changes = [line for line in caplog.messages if "the step changed from" in line]
    assert len(changes) == len(counts) - 2, "a plan is made of the steps before the last"


@pytest.mark.field("F14")
@pytest.mark.field("F15")
@kinds
def test_a_pass_without_grad_changes_nothing(kind: str) -> None:
    """First, between a forward and its backward, and between steps; bytes are those without it."""
    net = Net()
    moved = []
    for evaluates in (False, True):
        with session(kind) as manager:

            def evaluate(is_on: bool = evaluates) -> None:
                if is_on:
                    with torch.no_grad():
                        begin_microbatch()
                        net(drawn(3, WIDTH))
                    with torch.inference_mode():
                        begin_microbatch()
                        net(drawn(3, WIDTH))

            net.is_on = True
            evaluate()
            for _ in range(3):
                off_interface.reset()
                evaluate()
                begin_microbatch()
                x = drawn(ROWS, WIDTH).requires_grad_()
                loss = net(x).square().mean()
                evaluate()
                loss.backward()
                got = [loss.detach(), *gradients(x), *gradients(*net.parameters())]
                del loss
                evaluate()
                assert_same(got, train(net, [x.detach()], False))
                net.is_on = True
                assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
    assert moved[0] == moved[1] > 0


# Running out


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.field("F32")
@kinds
def test_over_the_host_budget_a_group_stays_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pp_offload"):
        with session(kind, host_budget_bytes=2**14) as manager:
            for _ in range(3):
                begin_step()
                x = h = drawn(256, WIDTH).requires_grad_()
                for number in range(6):
                    h = group(h, saves_one, name=f"part {number % 2}")
                assert manager.statistics().host_bytes_reserved <= 2**14
                h.sum().backward()
                got = gradients(x)
                y = x
                for _ in range(6):
                    y = saves_one(y)
                assert_same(got, torch.autograd.grad(y.sum(), x))
                del h, y
                assert_idle(manager)
    about = [m for m in messages(caplog) if "host_budget_bytes" in m or "budget" in m]
    assert len(about) == 1, messages(caplog)


class NoMemory(pp_offload.testing.SimulatedBackend):
    """The host gives so many bytes and no more."""

    def __init__(self, order: str, nbytes: int) -> None:
        super().__init__(order)
        self.left = nbytes

    def allocate_host(self, nbytes: int) -> Tensor:
        if nbytes > self.left:
            raise MemoryError(f"no {nbytes} more bytes")
        self.left -= nbytes
        return super().allocate_host(nbytes)


@pytest.mark.field("F32")
@pytest.mark.parametrize("nbytes", [0, 2**17])
def test_a_host_that_gives_no_memory_loses_nothing(
    nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    net = Net()
    xs = inputs(2, rows=512)
    with caplog.at_level(logging.WARNING, "pp_offload"):
        with use_backend(NoMemory("late", nbytes), config=config) as manager:
            for _ in range(2):
                assert_same(train(net, xs, True, ahead=2), train(net, xs, False, ahead=2))
                assert_idle(manager)
    assert len(messages(caplog)) == 1, messages(caplog)
