"""The simulated device: copies in any order, poison, and a race for each wait that is missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from pp_offload import OffloadActivations
from pp_offload._common.workers import Workers
from pp_offload.backends.base import Event
from pp_offload.errors import CaptureError, NotWhileCapturingError, RaceError
from pp_offload.testing import SimulatedBackend
from pp_offload.testing.streams import ORDERS


@pytest.fixture(params=ORDERS)
def backend(request: pytest.FixtureRequest) -> SimulatedBackend:
    return SimulatedBackend(request.param, seed=3)


@pytest.fixture
def late() -> SimulatedBackend:
    return SimulatedBackend("late")


def host_like(backend: SimulatedBackend, tensor: Tensor) -> Tensor:
    return backend.allocate_host(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def ones(backend: SimulatedBackend) -> tuple[Tensor, Tensor]:
    """A source, and host memory for it."""
    source = torch.ones(4)
    return source, host_like(backend, source)


def offload(backend: SimulatedBackend, source: Tensor, host: Tensor, label: str = "g") -> Event:
    backend.d2h.wait_event(backend.current_stream().record_event())
    backend.copy(backend.d2h, [host], [source], label)
    return backend.d2h.record_event()


def reload(
    backend: SimulatedBackend, host: Tensor, offloaded: Event, label: str = "g"
) -> tuple[Tensor, Event]:
    target = torch.empty_like(host)
    backend.h2d.wait_event(backend.current_stream().record_event())
    backend.h2d.wait_event(offloaded)
    backend.copy(backend.h2d, [target], [host], label)
    return target, backend.h2d.record_event()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64])
def test_late_runs_a_copy_only_when_compute_waits(
    late: SimulatedBackend, dtype: torch.dtype
) -> None:
    """Its target is poison before."""
    source, host = torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    event = offload(late, source, host)
    assert late.pending == 1
    assert not event.query()
    assert (host.view(torch.uint8) == 0xFF).all()
    late.current_stream().wait_event(event)
    assert late.pending == 0
    assert event.query()
    assert torch.equal(host, source)


def random_trace(seed: int) -> list[int]:
    backend = SimulatedBackend("random", seed=seed)
    sources = [torch.full((4,), float(i)) for i in range(20)]
    hosts = [host_like(backend, source) for source in sources]
    trace, targets = [], []
    for source, host in zip(sources, hosts, strict=True):
        targets.append(reload(backend, host, offload(backend, source, host))[0])
        trace.append(backend.pending)
    backend.synchronize()
    assert all(map(torch.equal, sources, targets))
    return trace


def test_random_is_reproducible_from_its_seed() -> None:
    assert random_trace(1) == random_trace(1)
    assert len({tuple(random_trace(seed)) for seed in range(8)}) > 1


def test_poison_spares_what_a_queued_copy_still_reads(late: SimulatedBackend) -> None:
    first, second = torch.ones(4), torch.full((4,), 2.0)
    host = host_like(late, first)
    target, reloaded = reload(late, host, offload(late, first, host))
    late.d2h.wait_event(reloaded)
    offloaded = offload(late, second, host)
    late.current_stream().wait_event(offloaded)
    assert torch.equal(target, first)
    assert torch.equal(host, second)


@pytest.mark.parametrize("waits", ["none", "host", "stream"])
def test_copies_keep_nothing_alive_and_an_early_free_is_a_race(
    backend: SimulatedBackend, waits: str
) -> None:
    is_race = waits == "none"
    with pytest.raises(RaceError, match="free by.*'early'") if is_race else nullcontext():
        with backend.activate():
            source, host = ones(backend)
            event = offload(backend, source, host, "early")
            if waits == "host":
                event.synchronize()
            elif waits == "stream":
                backend.current_stream().wait_event(event)
            del source


def test_an_emptied_source_counts_as_freed(late: SimulatedBackend) -> None:
    source, host = ones(late)
    event = offload(late, source, host)
    source.untyped_storage().resize_(0)
    with pytest.raises(RaceError, match="freed before the copy ran"):
        event.synchronize()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_here", [False, True], ids=["on a thread of a tier", "here"])
def test_host_memory_is_freed_behind_a_wait_of_the_thread_that_frees_it(
    backend: SimulatedBackend, is_here: bool, waits: bool
) -> None:
    """On the thread of a tier, as of an engine that is garbage, and collected there."""
    source, *memory = ones(backend)
    event = offload(backend, source, memory[0])
    backend.current_stream().wait_event(event)  # compute knows; the host, which frees, does not

    def free() -> None:
        if waits:
            event.synchronize()
        memory.clear()

    free() if is_here else Workers("test").submit(free).result()
    with nullcontext() if waits else pytest.raises(RaceError, match="storage released"):
        backend.check()


@pytest.mark.parametrize("waits_too_early", [False, True])
def test_missing_wait_of_d2h_for_compute(backend: SimulatedBackend, waits_too_early: bool) -> None:
    with backend.activate():
        source, host = ones(backend)
        too_early = backend.current_stream().record_event()
        source.mul_(2)
        if waits_too_early:
            backend.d2h.wait_event(too_early)
        with pytest.raises(RaceError, match="read by stream d2h.*'attn'.*compute"):
            backend.copy(backend.d2h, [host], [source], "attn")


def test_missing_wait_of_h2d_for_offloaded(backend: SimulatedBackend) -> None:
    source, host = ones(backend)
    offload(backend, source, host)
    backend.h2d.wait_event(backend.current_stream().record_event())
    with pytest.raises(RaceError, match="read by stream h2d.*write by stream d2h"):
        backend.copy(backend.h2d, [torch.empty(4)], [host], "g")


USES: dict[str, Callable[[Tensor], object]] = {
    "read": lambda t: t + 1,
    "write": lambda t: t.add_(1),
    "read of a view": lambda t: t.t().detach().view(4).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_missing_wait_of_compute_for_reloaded(backend: SimulatedBackend, use: str) -> None:
    with backend.activate():
        source, host = ones(backend)
        target, reloaded = reload(backend, host, offload(backend, source, host))
        words = f"{use.split()[0]} by stream compute.*write by stream h2d"
        with pytest.raises(RaceError, match=words):
            USES[use](target)
        backend.current_stream().wait_event(reloaded)
        assert torch.equal(target, source)


def test_a_host_buffer_overwritten_under_a_reader(backend: SimulatedBackend) -> None:
    slab = backend.allocate_host(64)
    first, second = torch.ones(8), torch.ones(8)
    host = slab[:32].view(torch.float32)
    target, _ = reload(backend, host, offload(backend, first, host, "one"), "one")
    with pytest.raises(RaceError, match="write by stream d2h.*'two'.*read by stream h2d.*'one'"):
        offload(backend, second, slab[16:48].view(torch.float32), "two")
    assert target.shape == (8,)


def test_in_place_write_to_a_queued_source(backend: SimulatedBackend) -> None:
    with backend.activate():
        source, host = ones(backend)
        event = offload(backend, source, host, "mlp")
        assert source.sum() == 4
        for write, says in [
            (lambda: source.add_(1), "compute.*add_.*d2h.*'mlp'"),
            (lambda: torch.add(source, 1, out=source), "compute"),
            (lambda: torch._foreach_add_([source], 1), "compute"),
            (lambda: torch.ops.aten.zeros_like.out(source, out=source), "compute"),
        ]:
            with pytest.raises(RaceError, match=f"write by stream {says}"):
                write()
        backend.current_stream().wait_event(event)
        source.add_(1)
        assert torch.equal(host, torch.ones(4))


def test_handing_a_target_to_another_stream_needs_a_wait_there(backend: SimulatedBackend) -> None:
    second = backend.new_stream("second")
    with backend.activate():
        source, host = ones(backend)
        target, reloaded = reload(backend, host, offload(backend, source, host))
        backend.current_stream().wait_event(reloaded)
        with backend.stream(second):
            with pytest.raises(RaceError, match="read by stream second"):
                target.sum()
            second.wait_stream(backend.current_stream())
            with pytest.raises(RaceError, match="read by stream second"):
                target.sum()
            second.wait_event(reloaded)
            assert target.sum() == 4


@pytest.mark.parametrize("make", [torch.rand_like, lambda t: t.new_ones(2), lambda t: t.t_()])
def test_an_operator_that_reads_no_byte_is_free_to_run(late: SimulatedBackend, make: Any) -> None:
    with late.activate():
        source, host = ones(late)
        target, _ = reload(late, host, offload(late, source, host))
        make(target)
        late.synchronize()


@pytest.mark.field("F24")
def test_rules_of_captures() -> None:
    device = SimulatedBackend("late")
    compute, d2h = device.current_stream(), device.d2h
    before = compute.record_event()
    for forbidden, says in [
        (lambda: compute.wait_event(before), "no capture"),
        (before.query, "queried"),
        (lambda: d2h.wait_event(compute.record_event()), "has not waited for stream d2h"),
    ]:
        with pytest.raises(CaptureError, match=says), device.capture():
            forbidden()
    with pytest.raises(NotWhileCapturingError), device.capture():
        device.allocate_host(8)
    with device.capture():
        captured = compute.record_event()
        d2h.wait_event(captured)
        compute.wait_event(d2h.record_event())
    with pytest.raises(CaptureError, match="recorded in capture"), device.capture():
        d2h.wait_event(captured)
    with pytest.raises(CaptureError, match="asked about"):
        captured.query()


def _jagged_attention(x: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    heads = rows.unflatten(-1, (2, 4)).transpose(1, 2)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return attended.transpose(1, 2).flatten(-2).values()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "jagged": _jagged_attention,
    "nested": lambda x: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x, x]), 0),
    "coo": lambda x: x.detach().to_sparse() @ x.T,
    "csr": lambda x: x.detach().to_sparse_csr() @ x.T,
    "csc": lambda x: x.detach().to_sparse_csc() @ x.T,
    "mkldnn": lambda x: x.to_mkldnn().relu().to_dense(),
}


@pytest.mark.field("F64")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_of_each_layout_run_under_watch(layout: str, backend: SimulatedBackend) -> None:
    """An error of the watch would end the process: torch calls it where nothing may be raised.

    In a context, too, which leaves what is not strided where it is.
    """

    def run(context: Any = None) -> list[Tensor]:
        x = torch.arange(64.0).view(8, 8).requires_grad_()
        with context or nullcontext():
            y = LAYOUTS[layout](x)
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    expected = run()
    with backend.activate():
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)
        assert all(map(torch.equal, run(), expected))
        assert all(map(torch.equal, run(context), expected))
