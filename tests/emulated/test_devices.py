"""Two devices in one process: each has its streams, and the engine leaves the current one alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.products import PRODUCTS, Product
from helpers.toy import same_bits
from torch import Tensor, nn

from emulated.helpers import DELAYS
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import AcceleratorBackend, default_backend

pytestmark = pytest.mark.emulated

WIDTH = 32
SECOND: Any = "emulated:1"
"""There is no such device before it is loaded, so it is a name here."""


CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


@pytest.fixture(autouse=True)
def on_the_first_device(emulated: ModuleType) -> Iterator[None]:
    """The second device is not the current one, before, meanwhile and afterwards."""
    assert torch.accelerator.current_device_index() == 0
    yield
    current = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(0)
    assert current == 0, f"emulated:{current} is the current device now"


# The engine on the one that is not current


def make_layer() -> nn.Module:
    wide = 4 * WIDTH
    mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
    return nn.Sequential(OrderedDict(mlp=mlp, norm=nn.BatchNorm1d(WIDTH)))


def make_net() -> nn.Module:
    """With the names that products ask for."""
    layers = nn.Sequential(*(make_layer() for _ in range(4)))
    return nn.Sequential(OrderedDict(layers=layers))


def train(product: Product, device: torch.device, num_steps: int = 3) -> list[Tensor]:
    """Losses, gradients and parameters."""
    torch.manual_seed(1)
    model = product.inside(make_net().to(device))
    product.outside(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for _ in range(num_steps):
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
    expected = train(Product(AcceleratorBackend(second)), second)
    first_bytes = torch.accelerator.max_memory_allocated(0)
    emulated.set_delays(**DELAYS[delays])
    with use_backend(default_backend(second), config=CONFIG) as manager:
        product = PRODUCTS[name](manager.backend)
        got = train(product, second)
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
    with use_backend(AcceleratorBackend(), config=CONFIG):
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
