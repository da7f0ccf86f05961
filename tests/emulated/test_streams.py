"""Streams, events and threads of the emulated device behave as those of a device do."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
from torch import Tensor

from emulated.helpers import compute, late, some

pytestmark = pytest.mark.emulated

N = 1000


@pytest.mark.parametrize("waits", [False, True])
def test_another_stream_is_late_unless_it_is_waited_for(emulated: ModuleType, waits: bool) -> None:
    given, side = some(N), torch.Stream(device="emulated")
    source, result = given.to("emulated"), torch.zeros(N, device="emulated")
    with late(emulated, side, lambda: torch.mul(source, 2, out=result)) as gate:
        if waits:
            compute().wait_event(side.record_event())
            gate.release()
        seen = result + 0
        compute().synchronize()
    assert seen.cpu().equal(given * 2) is waits
    assert result.cpu().equal(given * 2)


def test_work_is_queued_and_the_host_goes_on(emulated: ModuleType) -> None:
    x = torch.ones(N, device="emulated")
    with emulated.hold(compute()):
        y = x + 1
        event = compute().record_event()
        assert not event.query() and not compute().query()
    event.synchronize()
    assert event.query()
    assert y.sum().item() == 2 * N


def test_an_event_says_when_the_stream_was_there(emulated: ModuleType) -> None:
    emulated.set_delays(kernel_us=20_000)
    x = torch.ones(N, device="emulated")
    start, end = (torch.Event(device="emulated", enable_timing=True) for _ in range(2))
    compute().synchronize()
    start.record()
    x.add_(1)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 20


def test_an_event_recorded_again_is_another_point(emulated: ModuleType) -> None:
    side = torch.Stream(device="emulated")
    event = torch.Event(device="emulated")
    event.record()
    event.synchronize()
    with emulated.hold(side):
        event.record(side)
        assert not event.query()
    event.synchronize()


def test_the_pool_hands_out_its_streams_in_turn() -> None:
    ids = [torch.Stream(device="emulated").stream_id for _ in range(65)]
    assert len(set(ids)) == 32
    assert ids[0] == ids[32] == ids[64]
    assert 0 not in ids, "that is the default stream"


def test_each_thread_has_its_own_current_stream() -> None:
    side = torch.Stream(device="emulated")
    seen: list[torch.Stream] = []
    with side:
        thread = threading.Thread(target=lambda: seen.append(compute()))
        thread.start()
        thread.join()
        assert compute() == side
    assert seen[0].stream_id == 0


def test_waiting_lets_another_thread_open_the_gate(emulated: ModuleType) -> None:
    gate = emulated.hold(compute())
    thread = threading.Timer(0.05, gate.release)
    thread.start()
    compute().synchronize()
    thread.join()


def test_a_kernel_that_fails_is_told_by_the_next_wait() -> None:
    rows = torch.ones(4, 3, device="emulated")
    torch.index_select(rows, 0, torch.tensor([7], device="emulated"))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        compute().synchronize()
    compute().synchronize()


@pytest.mark.parametrize(
    ("left", "right", "message"), [((2,), (3,), "size"), ((2, 3), (2, 3), "shapes")]
)
def test_wrong_shapes_raise_in_the_caller(
    left: tuple[int, ...], right: tuple[int, ...], message: str
) -> None:
    a, b = torch.ones(left, device="emulated"), torch.ones(right, device="emulated")
    with pytest.raises(RuntimeError, match=message):
        a @ b if len(left) == 2 else a + b


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="emulated") + torch.ones(2)
    assert (torch.ones(2, device="emulated") + torch.tensor(1.0)).tolist() == [2, 2]


def test_backward_runs_in_a_thread_of_autograd_on_the_stream_of_its_forward() -> None:
    seen: list[tuple[int, torch.Stream]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            seen.append((threading.get_ident(), compute()))
            return grad

    side = torch.Stream(device="emulated")
    with side:
        y = Look.apply(torch.ones(2, device="emulated", requires_grad=True))
    y.sum().backward()
    assert len(seen) == 1
    thread, stream = seen[0]
    assert thread != threading.get_ident()
    assert stream == side
