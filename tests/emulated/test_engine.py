"""The engine on a device whose streams are really late: the same bits, and each of its waits."""

from __future__ import annotations

import gc
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.processes import train
from helpers.products import PRODUCTS, Product
from helpers.sessions import assert_idle, session, settle
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor, nn
from torch.optim import SGD, Adam

from pp_offload import (
    ChunkOffloadHandler,
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    PipelineOffloadManager,
    offload_layers,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._groups import auto_bounds
from pp_offload._groups.offloader import Offloader
from pp_offload._memory.host_pool import MIN_SLAB_BYTES
from pp_offload.backends import AcceleratorBackend, default_backend
from pp_offload.cli.doctor import DeviceSpeed

pytestmark = pytest.mark.emulated

DELAYS: dict[str, dict[str, int]] = {
    "none": {},
    "late compute": {"kernel_us": 300},
    "late d2h": {"d2h_us": 2000},
    "late h2d": {"h2d_us": 2000},
    "late copies": {"d2h_us": 1500, "h2d_us": 1500},
    "by chance": {"kernel_us": 50, "jitter_us": 1500, "seed": 3},
}
WAIT_S = 0.1
"""Work that waits for nothing is done by then."""


def compute() -> torch.Stream:
    """The current stream."""
    return torch.accelerator.current_stream()


@contextmanager
def late(emulated: ModuleType, stream: torch.Stream, *others: torch.Stream) -> Iterator[None]:
    """A gate that holds ``stream`` back until ``others`` have done all that they can without it.

    Where a wait is missing, the others are through before the gate opens, and the bytes are wrong.
    """
    emulated.synchronize()
    with emulated.hold(stream):
        yield
        end = time.monotonic() + WAIT_S
        while not all(other.query() for other in others) and time.monotonic() < end:
            time.sleep(0.001)
    emulated.synchronize()


def some(n: int) -> Tensor:
    """Other numbers each time, so that what an earlier test wrote is never right."""
    return torch.randn(n)


WIDTH = 32
OPTIONS: dict[str, dict[str, Any]] = {
    "host": {},
    "host, few in flight": {"max_in_flight_bytes": 40_000},
    "disk": {"tiers": ("disk",), "max_in_flight_bytes": 40_000},
    "host and disk": {"tiers": ("host", "disk"), "host_budget_bytes": 1_000_000},
}


def steps_are_equal(num: int = 3, growth: int = 1) -> bool:
    """Steps of changing length, four microbatches in flight, against the same without offload."""
    on = make_model(width=WIDTH, device="emulated")
    off = make_model(width=WIDTH, groups=(), device="emulated")
    for step in range(num):
        inputs = [x.to("emulated") for x in batches(5, WIDTH, step, length=9 + growth * step)]
        got = run_step(on, inputs, in_flight=4)
        if not same_bits(got, run_step(off, inputs, in_flight=4, offload=False)):
            return False
    return True


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_with_and_without_offload_have_the_same_bits(
    emulated: ModuleType, options: str, delays: str
) -> None:
    emulated.set_delays(**DELAYS[delays])
    with session(AcceleratorBackend(), **OPTIONS[options]) as manager:
        assert steps_are_equal()
        statistics = manager.statistics()
        assert statistics.bytes_offloaded > 0 and statistics.bytes_reloaded > 0
        gc.collect()
        assert_idle(manager)


# Copy streams come from a pool of 32, in turn, so another may have the same


@pytest.mark.parametrize("options", ["host", "disk"])
@pytest.mark.parametrize("stream", ["d2h", "h2d"])
def test_compute_on_a_copy_stream_has_the_same_bits(
    emulated: ModuleType, stream: str, options: str
) -> None:
    emulated.set_delays(**DELAYS["late copies"])
    backend = AcceleratorBackend()
    with session(backend, **OPTIONS[options]):
        before = compute()
        torch.accelerator.set_stream(getattr(backend, stream))
        try:
            assert steps_are_equal(2)
        finally:
            torch.accelerator.set_stream(before)


# Bounds that are chosen from times, on streams that take time and know it


@pytest.mark.parametrize("delays", DELAYS)
def test_bounds_are_chosen_and_bits_are_the_same(
    emulated: ModuleType, delays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)
    emulated.set_delays(**DELAYS[delays])
    with session(AcceleratorBackend(), device_limit_bytes=None) as manager:
        assert manager.statistics().stalled_ms is None
        mover = manager.offloader.engine.mover
        bounds = [mover.in_flight.bound.nbytes]
        for _ in range(4):
            assert steps_are_equal(1)
            torch.accelerator.synchronize()
            off_interface.reset()  # which knows the times of the step
            bounds.append(mover.in_flight.bound.nbytes)
        assert bounds[0] > bounds[-1] > 0
        assert len(set(bounds[2:])) == 1, "the second step was the last that was timed"
        assert manager.statistics().stalled_ms is not None
        assert steps_are_equal(3, growth=30), "steps that differ are timed again"
        gc.collect()
        assert_idle(manager)


def test_by_default_what_has_room_stays(emulated: ModuleType) -> None:
    """Nobody has to say that there is enough."""
    sent = [0]
    with session(AcceleratorBackend()) as manager:
        for _ in range(5):
            assert steps_are_equal(1)
            sent.append(manager.statistics().bytes_offloaded)
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert steps[0] > 0 and steps[-2:] == [0, 0]


# Gradients on the host and a GradScaler of the device


def scaled(how: str, make: Any, *, is_clipped: bool) -> list[Tensor]:
    """Parameters after some steps of a training whose second loss is infinite."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers)
    if how == "device":
        model.to("emulated")
    elif how == "layers":  # the last one stays on the device
        model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2])
        offload_layers(model, "0", device="emulated")
    else:
        model = OffloadModel(model, "emulated", num_slices=3)
    optimizer = make(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("emulated", init_scale=1024.0)
    x = torch.randn(8, 16).to("emulated")
    for factor in (1.0, float("inf"), 1.0, 1.0):
        scaler.scale(model(x).square().mean() * factor).backward()
        if is_clipped:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("make", [SGD, partial(SGD, fused=True), partial(Adam, fused=True)])
@pytest.mark.parametrize("how", ["layers", "model"])
def test_the_scale_has_arrived(emulated: ModuleType, how: str, make: Any, is_clipped: bool) -> None:
    plain = scaled("device", make, is_clipped=is_clipped)
    emulated.set_delays(d2h_us=300)
    offloaded = scaled(how, make, is_clipped=is_clipped)
    assert all(map(torch.equal, plain, offloaded))


# Two devices in one process: each has its streams, and the engine leaves the current one alone

SECOND: Any = "emulated:1"
"""There is no such device before it is loaded, so it is a name here."""


@pytest.fixture(autouse=True)
def on_the_first_device(emulated: ModuleType) -> Iterator[None]:
    """The second device is not the current one, before, meanwhile and afterwards."""
    assert torch.accelerator.current_device_index() == 0
    yield
    current = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(0)
    assert current == 0, f"emulated:{current} is the current device now"


def make_layer() -> nn.Module:
    """With the name that products ask for."""
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(OrderedDict(mlp=mlp, norm=nn.BatchNorm1d(WIDTH)))


def trained(product: Product, device: torch.device) -> list[Tensor]:
    """Losses, gradients and parameters."""
    torch.manual_seed(1)
    layers = nn.Sequential(*(make_layer() for _ in range(4)))
    model = product.inside(nn.Sequential(OrderedDict(layers=layers)).to(device))
    product.outside(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for _ in range(3):
        product.begin_step()
        for _ in range(2):
            with product.forward():
                loss = model(torch.randn(16, WIDTH).to(device)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
    return [tensor.cpu() for tensor in seen]


@pytest.mark.parametrize("delays", ["late compute", "late d2h", "late h2d", "by chance"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_has_the_same_bits_on_a_device_that_is_not_current(
    emulated: ModuleType, name: str, delays: str
) -> None:
    second = torch.device(SECOND)
    expected = trained(Product(AcceleratorBackend(second)), second)
    first_bytes = torch.accelerator.max_memory_allocated(0)
    emulated.set_delays(**DELAYS[delays])
    with session(default_backend(second)) as manager:
        product = PRODUCTS[name](manager.backend)
        got = trained(product, second)
        statistics = product.statistics()
        PipelineOffloadManager.reset_instance()
    assert same_bits(got, expected)
    assert statistics.bytes_offloaded > 0
    assert torch.accelerator.max_memory_allocated(0) == first_bytes, "nothing is on the other one"


# A device without a number


@pytest.mark.parametrize("index", [0, 1])
def test_a_device_without_a_number_is_the_current_one(emulated: ModuleType, index: int) -> None:
    with emulated.device(index):
        device = torch.device("emulated")
        backends = [AcceleratorBackend(), AcceleratorBackend(device), default_backend(device)]
    for backend in backends:
        assert backend.device == torch.device("emulated", index)
        assert backend.current_stream() == torch.accelerator.current_stream(index)


def test_another_kind_of_device_is_refused(emulated: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"device is meta, expected emulated.*CpuBackend"):
        AcceleratorBackend(torch.device("meta"))


@pytest.mark.parametrize("kind", ["groups", "context"])
def test_tensors_on_another_device_than_the_engine_are_warned_of(
    emulated: ModuleType, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On every rank but the first, where the engine was made before ``set_device``."""
    layer = nn.Linear(WIDTH, WIDTH).to(SECOND)
    context = OffloadActivations(min_offload_size=1, backend=AcceleratorBackend())
    with session(AcceleratorBackend()):
        for _ in range(3):
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            x = torch.randn(4, WIDTH, device=SECOND, requires_grad=True)
            with off_interface(True, x, "mlp") if kind == "groups" else context:
                y = layer(x).tanh()
            if kind == "groups":
                off_interface.group_commit(y, name="mlp")
            y.sum().backward()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "offloaded nothing" in line
    assert "tensors on emulated:1 were saved, and this engine works on emulated:0" in line


# The example and the doctor


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_example_has_the_same_bits_on_it(tier: str, tmp_path: Path) -> None:
    """In a process of its own."""
    figures, output = train(
        tmp_path / "figures.json", *f"--stages 1 --device emulated --steps 2 --tier {tier}".split()
    )
    assert figures["bitwise_equal"] is True and "equal bit for bit" in output
    assert min(figures["offloaded_bytes_on"]) > 0
    assert min(figures["disk_peak_bytes_on"]) > 0 or tier == "host"
    assert 0 < figures["device_bytes_peak_on"][0] < figures["device_bytes_peak_off"][0]


def test_rates_and_costs_are_measured() -> None:
    hardware = DeviceSpeed(torch.device("emulated", 0), nbytes=2**16).hardware()
    assert hardware.name == "measured emulated"
    assert hardware.pin_bytes_per_s is not None, "which a CPU has no figure for"
    assert hardware.both_links_bytes_per_s != min(hardware.link_bytes_per_s, hardware.h2d_rate)


# Each wait of the engine through PyTorch's own streams: without it the bytes come out wrong
#
# In each test one stream stands still at a closed gate, and the others run on as far as they can.
# Groups are opened and committed by Megatron's chunk, so that a test says what happens when.


N = MIN_SLAB_BYTES // 4
"""Numbers that fill a slab of host memory."""


class Chunk(ChunkOffloadHandler):
    """A chunk on an engine of its own."""

    def __init__(self, **options: Any) -> None:
        gc.collect()  # an engine that is left over might have seen the same streams
        config = OffloadConfig(min_offloaded_tensor_size=1, device_limit_bytes=None, **options)
        backend: Any = AcceleratorBackend()
        super().__init__(1, None, offloader=Offloader(backend, config))
        self.d2h, self.h2d = backend.d2h, backend.h2d

    def side(self) -> torch.Stream:
        """A stream of PyTorch's pool that is none of the copy streams."""
        copies = self.d2h, self.h2d
        return next(
            s for s in iter(lambda: torch.Stream(device="emulated"), None) if s not in copies
        )

    def save(
        self, *tensors: Tensor, on: torch.Stream | None = None, released: list[Tensor] | None = None
    ) -> list[Any]:
        """Tags of a group that was saved on the stream ``on`` and is committed on the live one."""
        self.on_group_start_forward("g")
        with on or nullcontext():
            tags = [self.tensor_push(tensor) for tensor in tensors]
        self.on_group_commit_forward(released)
        return tags

    def away(self, *given: Tensor) -> list[Any]:
        """Tags of tensors whose bytes are in host memory alone."""
        tags = self.save(*[tensor.to("emulated") for tensor in given])
        settle(self.offloader)
        return tags

    def brings(self, tag: Any, expected: Tensor) -> bool:
        """Whether a tensor comes back from the host with these bytes."""
        settle(self.offloader)
        return self.tensor_pop(tag).cpu().equal(expected)


def use_of_memory() -> Tensor:
    """A kernel on the live stream that gets the memory that was freed last."""
    return torch.full((N,), 5.0, device="emulated")


# Copies to the host


@pytest.mark.parametrize("is_aside", [False, True], ids=["live stream", "side stream"])
@pytest.mark.parametrize("columns", [1024, 700], ids=["whole", "gathered"])
def test_a_copy_to_the_host_waits_for_what_computed_the_tensor(
    emulated: ModuleType, is_aside: bool, columns: int
) -> None:
    chunk, given = Chunk(), some(N).view(-1, 1024)
    x = given.to("emulated")
    stream = chunk.side() if is_aside else compute()
    others = [chunk.d2h, compute()] if is_aside else [chunk.d2h]
    with late(emulated, stream, *others):
        with stream:
            y = x * 2
        (tag,) = chunk.save(y[:, :columns], on=stream)
    assert chunk.brings(tag, (given * 2)[:, :columns])


def test_the_stream_that_computed_waits_for_a_gather(emulated: ModuleType) -> None:
    """It writes there again, and no version tells."""
    chunk, given = Chunk(), some(N).view(-1, 1024)
    x, side = given.to("emulated"), chunk.side()
    with late(emulated, compute(), side):
        (tag,) = chunk.save(x[:, :700], on=side)
        with side:
            x.data.fill_(7)
    assert chunk.brings(tag, given[:, :700])


@pytest.mark.parametrize("is_aside", [False, True], ids=["live stream", "side stream"])
@pytest.mark.parametrize("is_held", [False, True], ids=["let go", "force-released"])
@pytest.mark.parametrize(
    "options", [{}, {"max_in_flight_bytes": 0}], ids=["auto", "none in flight"]
)
def test_a_source_lives_until_it_is_copied(
    emulated: ModuleType, is_held: bool, is_aside: bool, options: dict[str, int]
) -> None:
    chunk, given = Chunk(**options), some(N)
    stream = chunk.side() if is_aside else compute()
    with stream:
        x = given.to("emulated")
    with late(emulated, chunk.d2h, stream):
        held = [x] if is_held else []
        (tag,) = chunk.save(x, on=stream, released=held)
        del x
        chunk.offloader.statistics()
        with stream:
            use_of_memory()
    assert chunk.brings(tag, given)


@pytest.mark.parametrize("next_numel", [N, N // 2], ids=["the same bytes", "a part of them"])
def test_host_memory_is_written_behind_its_last_reader(
    emulated: ModuleType, next_numel: int
) -> None:
    """A reload for one stream is late; a forward on another one is given the same host memory."""
    chunk, given = Chunk(), some(N)
    (tag,), side = chunk.away(given), chunk.side()
    x = some(next_numel).to("emulated")
    with late(emulated, chunk.h2d, side, chunk.d2h):
        result = chunk.tensor_pop(tag) * 2
        del tag
        with side:
            tags = chunk.save(x)
    assert result.cpu().equal(given * 2)
    assert chunk.offloader.statistics().host_bytes_reserved == MIN_SLAB_BYTES
    del tags


# Copies to the device


def test_a_reload_waits_for_the_offload(emulated: ModuleType) -> None:
    """For another stream, which may not take the source back."""
    chunk, given = Chunk(), some(N)
    x, side = given.to("emulated"), chunk.side()
    with late(emulated, chunk.d2h, chunk.h2d):
        (tag,) = chunk.save(x)
        with side:
            result = chunk.tensor_pop(tag)
    assert result.cpu().equal(given)


def test_a_reload_waits_for_compute(emulated: ModuleType) -> None:
    """A kernel still reads another tensor in the memory that it is given."""
    chunk, given, others = Chunk(), some(N), some(N)
    (tag,) = chunk.away(others)
    gc.collect()
    emulated.empty_cache()
    x = given.to("emulated")
    address = x.data_ptr()
    with late(emulated, compute(), chunk.h2d):
        result = x * 2
        del x
        target = chunk.tensor_pop(tag)
    assert target.data_ptr() == address
    assert result.cpu().equal(given * 2) and target.cpu().equal(others)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["on demand", "ahead"])
def test_compute_waits_for_a_reload(emulated: ModuleType, is_ahead: bool) -> None:
    chunk, given = Chunk(), some(N)
    (tag,) = chunk.away(given)
    with late(emulated, chunk.h2d, compute()):
        if is_ahead:
            chunk.bulk_reload_group()
        result = chunk.tensor_pop(tag) * 2
    assert result.cpu().equal(given * 2)


def test_memory_that_nobody_wants_is_free_behind_its_reload(emulated: ModuleType) -> None:
    """Also where the graph is part of a cycle, in which no weak reference calls anybody."""
    chunk = Chunk()
    tags = chunk.away(some(N))
    tags.append(tags)
    gc.collect()
    emulated.empty_cache()
    with late(emulated, chunk.h2d, compute()):
        chunk.bulk_reload_group()
        del tags
        gc.collect()
        chunk.offloader.statistics()  # lets go of what came for tensors that are gone
        result = use_of_memory()
    assert result.eq(5).all()


# Streams of somebody else


def test_a_source_is_taken_back_on_its_own_stream(emulated: ModuleType) -> None:
    chunk, given = Chunk(), some(N)
    x, side = given.to("emulated"), chunk.side()
    with late(emulated, side, compute()):
        with side:
            (tag,) = chunk.save(x * 2)
        result = chunk.tensor_pop(tag) * 2
    assert result.cpu().equal(given * 4)


@pytest.mark.parametrize("how", ["ahead", "with a use left", "used up"])
def test_what_came_for_another_stream_is_not_used_here(emulated: ModuleType, how: str) -> None:
    """That stream uses the memory again while a kernel of this one reads it."""
    chunk, given = Chunk(), some(N)
    x, side = given.to("emulated"), chunk.side()
    tags = chunk.save(*[x] * (2 if how == "with a use left" else 1))
    del x
    settle(chunk.offloader)
    with side:
        first = None
        if how == "ahead":
            chunk.bulk_reload_group()
        else:
            first = chunk.tensor_pop(tags[0])
    with late(emulated, compute(), side):
        result = chunk.tensor_pop(tags[-1]) * 2
        del tags, first
        with side:
            use_of_memory()
    assert result.cpu().equal(given * 2)


# The device alone: it is loaded in time, and where a wait is left out it gives other bytes


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_copy_first", [False, True], ids=["to the host", "to the device"])
def test_a_copy_and_a_kernel_wait_for_each_other(
    emulated: ModuleType, is_copy_first: bool, waits: bool
) -> None:
    given, copies = some(N), torch.Stream(device="emulated")
    streams = [copies, compute()] if is_copy_first else [compute(), copies]
    source, host = given.to("emulated"), given.pin_memory()
    target = torch.zeros(N, device="emulated") if is_copy_first else torch.zeros(N, pin_memory=True)
    with late(emulated, *streams):
        with streams[0]:
            x = target.copy_(host, non_blocking=True) if is_copy_first else source * 2
        if waits:
            streams[1].wait_event(streams[0].record_event())
        with streams[1]:
            result = x * 2 if is_copy_first else target.copy_(x, non_blocking=True)
    assert result.cpu().equal(given * 2) is waits


@pytest.mark.parametrize("keeps", ["nothing", "a wait", "record_stream"])
def test_freed_memory_is_used_again_in_the_order_of_its_stream(
    emulated: ModuleType, keeps: str
) -> None:
    given, side = some(N), torch.Stream(device="emulated")
    x, result = given.to("emulated"), torch.zeros(N, device="emulated")
    with late(emulated, side, compute()):
        with side:
            torch.add(x, 0, out=result)
        if keeps == "a wait":
            compute().wait_event(side.record_event())
        if keeps == "record_stream":
            x.record_stream(side)
        del x
        torch.zeros(N, device="emulated")
    assert result.cpu().equal(given) is (keeps != "nothing")
