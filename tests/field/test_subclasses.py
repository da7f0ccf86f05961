"""F41: tensor subclasses make the round trip, with what they hold on this device alone; no byte of
a DTensor parameter leaves, nor of what FSDP2 gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from conftest import on_two_backends
from field_checks import make_inputs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import assert_idle, same_bits
from wrapped import WRAPPERS, KeepsSaved, begin, in_group, leaves

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, offload_modules

pytestmark = pytest.mark.field("F41")

WORLD = 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (WORLD,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_round_trip(
    manager: PipelineOffloadManager, make: Callable[[list[Tensor]], Tensor]
) -> None:
    device = manager.backend.device
    for step in range(3):
        x, *others = make_inputs(5, step=step, device=device)
        begin(manager)
        before = make(others)
        expected = [leaf.clone() for leaf in leaves(before)]
        strides = [leaf.stride() for leaf in leaves(before)]
        leaf = x.requires_grad_()
        kind, nbytes = type(before), sum(t.nbytes for t in expected)
        y = in_group(True, leaf * 1, lambda h, saved=before: KeepsSaved.apply(h, saved))
        del before, others
        y.sum().backward()
        (seen,) = KeepsSaved.seen
        assert type(seen) is kind
        assert same_bits(leaves(seen), expected)
        assert [t.stride() for t in leaves(seen)] == strides
        if step == 0:  # later the plan keeps the last group
            assert manager.statistics().bytes_offloaded == nbytes
        KeepsSaved.seen.clear()
        del seen
        assert_idle(manager)


def test_dtensor_local_bytes(manager: PipelineOffloadManager, mesh: DeviceMesh) -> None:
    device = manager.backend.device
    if device.type != "cpu":
        pytest.skip("the mesh is one of CPUs")

    def run(is_on: bool) -> list[Tensor]:
        (x,) = make_inputs(1, length=8, device=device)
        if is_on:
            begin(manager)
        leaf = DTensor.from_local(x[:2], mesh, [Shard(0)]).requires_grad_()
        y = in_group(is_on, leaf * 1, lambda h: h.sin().exp().t() * 2)
        assert y.shape == (6, 2 * WORLD)
        y.backward(torch.ones_like(y))
        return [y.to_local().detach(), leaf.grad.to_local()]

    assert same_bits(run(True), run(False))
    assert manager.statistics().bytes_offloaded == 2 * (2 * 6 * 4)
    assert_idle(manager)


@on_two_backends
@pytest.mark.parametrize("is_known", [False, True])
def test_dtensor_parameters_stay(
    manager: PipelineOffloadManager, mesh: DeviceMesh, is_known: bool
) -> None:
    """Autograd saves views of them; only the activation's local part moves."""
    device = manager.backend.device
    if device.type != "cpu":
        pytest.skip("the mesh is one of CPUs")
    weight = distribute_tensor(torch.linspace(-1, 1, 8 * 6).view(8, 6), mesh, [Shard(0)])
    weight = nn.Parameter(weight)
    if is_known:
        off_interface.mark_not_offloadable(weight)
    value = weight.detach() if is_known else weight
    begin(manager)
    (x,) = make_inputs(1, length=2, device=device)
    leaf = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
    activation = leaf * 1
    in_group(True, activation, lambda h: (h * value).t() * weight.t()).to_local().sum().backward()
    assert weight.grad is not None
    # The activation, for the weight's gradient where it has one; and the product.
    saved = (0 if is_known else 1) + 1
    assert manager.statistics().bytes_offloaded == saved * x.nbytes
    del activation
    assert_idle(manager)


class Twice(nn.Module):
    """Uses its weight, first so that autograd does not see whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach().t()) @ self.weight


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@on_two_backends
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_parameters_stay(
    manager: PipelineOffloadManager, one_rank: DeviceMesh, reshard: bool
) -> None:
    """More ranks, and pipelines of them, are in ``tests/test_fsdp.py``."""
    device = manager.backend.device
    if device.type != "cpu":
        pytest.skip("the mesh is one of CPUs")

    def run(is_on: bool) -> list[Tensor]:
        model = nn.Sequential(Twice(), nn.Identity())
        fully_shard(model[0], mesh=one_rank, reshard_after_forward=reshard)
        fully_shard(model, mesh=one_rank)
        if is_on:
            offload_modules(model, {"twice": "0"})
            begin(manager)
        x = make_inputs(1, device=device)[0].requires_grad_()
        y = model(x * 1)
        y.sum().backward()
        return [y.detach(), x.grad, model[0].weight.grad.to_local()]

    assert same_bits(run(True), run(False))
    assert manager.statistics().bytes_offloaded == 4 * 6 * 4  # the result of tanh
    assert_idle(manager)
