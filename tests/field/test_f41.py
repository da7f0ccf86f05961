"""F41: tensor subclasses make the round trip, what they hold on this device alone; FSDP2 parameters
stay (see ``tests/test_fsdp.py`` for two ranks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from field_checks import make_inputs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import assert_idle, same_bits
from wrapped import Pair, Scaled, leaves

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, SavedTensorModifiedError

WORLD = 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (WORLD,))
    finally:
        dist.destroy_process_group()


def begin(manager: PipelineOffloadManager, smallest: int = 1) -> None:
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, smallest)


def in_group(is_on: bool, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    with off_interface(is_on, x, "core") as x:
        y = compute(x)
    return off_interface.group_commit(y, name="core") if is_on else y


class KeepsSaved(torch.autograd.Function):
    """x times two; backward shows the tensor that was saved along."""

    seen: list[Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        KeepsSaved.seen.append(ctx.saved_tensors[0])
        return gradient * 2, None


WRAPPERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "quantised": lambda x: Scaled.of(x[0]),
    "pair": lambda x: Pair(x[0], x[1]),
    "transposed": lambda x: Pair(x[0].t(), x[1].t()),
    "nested": lambda x: Pair(Pair(x[0], x[1]), Pair(x[2], x[3])),
    "mixed": lambda x: Pair(Scaled.of(x[0]), Scaled.of(x[1])),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_f41_round_trip(
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


@pytest.mark.parametrize("smallest", [1, 10])
def test_f41_gradient_through_a_quantised_activation(
    manager: PipelineOffloadManager, smallest: int
) -> None:
    """The scale is one element, and leaves only where so small a tensor may."""

    def run(is_on: bool) -> list[Tensor]:
        x, *values = make_inputs(3, device=manager.backend.device)
        if is_on:
            begin(manager, smallest)
        leaf = x.requires_grad_()
        quantised = [Scaled.of(value) for value in values]
        y = in_group(is_on, leaf.detach(), lambda h: leaf * quantised.pop() * quantised.pop())
        y.sum().backward()
        return [y.detach(), leaf.grad]

    assert same_bits(run(True), run(False))
    numel = 4 * 6
    assert manager.statistics().bytes_offloaded == 2 * numel + (8 if smallest == 1 else 0)
    assert_idle(manager)


@pytest.mark.parametrize("smallest", [1, 10])
@pytest.mark.parametrize("when", ["before commit", "after the copy"])
def test_f41_changed_in_place_raises(
    manager: PipelineOffloadManager, smallest: int, when: str
) -> None:
    """As without offload, although no tensor inside counts the change."""

    def run(is_on: bool) -> None:
        x, value = make_inputs(2, device=manager.backend.device)
        leaf = x.requires_grad_()
        quantised = Scaled.of(value)

        def compute(h: Tensor) -> Tensor:
            y = leaf * quantised
            if when == "before commit":
                quantised.mul_(2)
            return y

        if is_on:
            begin(manager, smallest)
        y = in_group(is_on, x.detach(), compute)
        if when == "after the copy":
            manager.backend.synchronize()
            quantised.mul_(2)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="inplace"):
        run(False)
    with pytest.raises(SavedTensorModifiedError, match=r"(?s)\(4, 6\).*core"):
        run(True)
    run_after = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    begin(manager)
    in_group(True, run_after * 1, torch.sin).sum().backward()
    assert_idle(manager)


def test_f41_dtensor_local_bytes(manager: PipelineOffloadManager, mesh: DeviceMesh) -> None:
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


@pytest.mark.parametrize("is_known", [False, True])
def test_f41_dtensor_parameters_stay(
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


def test_f41_a_collective_is_waited_for_first(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is there when somebody waits, and the operation that saves it does not."""
    device = manager.backend.device
    x, arriving = make_inputs(2, device=device)
    begin(manager)

    def wait(result: Tensor) -> Tensor:
        return result.copy_(arriving)

    monkeypatch.setattr(collectives, "wait_tensor", wait)
    results = [collectives.AsyncCollectiveTensor(torch.full_like(arriving, torch.nan))]
    y = in_group(True, x.requires_grad_() * 1, lambda h: KeepsSaved.apply(h, results.pop()))
    monkeypatch.setattr(collectives, "wait_tensor", lambda result: result)
    y.sum().backward()
    (seen,) = KeepsSaved.seen
    KeepsSaved.seen.clear()
    assert manager.statistics().bytes_offloaded == arriving.nbytes
    assert same_bits([seen.trigger_wait()], [arriving])


def test_f41_emptied_by_its_owner(manager: PipelineOffloadManager) -> None:
    """As FSDP frees a gathered weight after its forward, and fills it again for its backward."""
    device = manager.backend.device
    x, values = make_inputs(2, device=device)
    begin(manager)
    weight = values.clone()
    nbytes = weight.untyped_storage().nbytes()
    leaf = x.requires_grad_()

    def compute(h: Tensor) -> Tensor:
        y = h * weight.view(-1).view_as(weight)
        weight.untyped_storage().resize_(0)
        return y

    y = in_group(True, leaf * 1, compute)
    weight.untyped_storage().resize_(nbytes)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(values)
    y.sum().backward()
    assert same_bits([leaf.grad], [values])
    assert manager.statistics().bytes_offloaded == 0
