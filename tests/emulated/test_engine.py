"""The engine on a device whose streams are really late: the same bits. See test_waits.py, too."""

from __future__ import annotations

import gc
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.examples import train
from helpers.products import PRODUCTS, Product
from helpers.sessions import assert_idle, session
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor, nn
from torch.optim import SGD, Adam

from emulated.helpers import DELAYS, compute
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadModel, PipelineOffloadManager, offload_layers
from pp_offload._groups import auto_bounds
from pp_offload.backends import AcceleratorBackend, default_backend
from pp_offload.cli.device_speed import DeviceSpeed

pytestmark = pytest.mark.emulated

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
