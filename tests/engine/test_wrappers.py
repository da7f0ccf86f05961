"""Tensors made of others, and tensors without memory of their own: what leaves, what stays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from conftest import on_two_backends
from helpers.saving import KeepsSaved
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    gradients,
    group,
    session,
)
from helpers.toy import batches
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import batch_norm
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

# Tensor subclasses of the two kinds there are in training: quantised, and several in one


class Scaled(Tensor):
    """Eight bits an element and one scale; computes with what that stands for.

    An alias has the very tensors that it has.
    """

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(
            cls, data8.shape, strides=data8.stride(), dtype=scale.dtype, device=data8.device
        )

    def __init__(self, data8: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data8, scale

    @classmethod
    def of(cls, x: Tensor) -> Scaled:
        """``x``, rounded."""
        scale = x.abs().amax().reshape(1, 1) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Scaled:
        assert (inner["data8"].shape, inner["data8"].stride()) == (size, stride)
        return Scaled(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        args, kwargs = tree_map_only(cls, lambda t: t.data8 * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


def leaves(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside."""
    if isinstance(tensor, TwoTensor):
        return leaves(tensor.a) + leaves(tensor.b)
    if isinstance(tensor, Scaled):
        return [tensor.data8, tensor.scale]
    return [tensor]


WRAPPERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "quantised": lambda x: Scaled.of(x[0]),
    "pair": lambda x: TwoTensor(x[0], x[1]),
    "transposed": lambda x: TwoTensor(x[0].t(), x[1].t()),
    "nested": lambda x: TwoTensor(TwoTensor(x[0], x[1]), TwoTensor(x[2], x[3])),
    "mixed": lambda x: TwoTensor(Scaled.of(x[0]), Scaled.of(x[1])),
}


def inputs(num: int, device: torch.device) -> list[Tensor]:
    return [x.to(device) for x in batches(num, 6, length=4)]


@on_two_backends
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_what_left_is_gone(
    manager: PipelineOffloadManager, make: Callable[[list[Tensor]], Tensor]
) -> None:
    """Nothing of the engine keeps the memory inside a wrapper, and the wrapper comes back."""
    x, *others = inputs(5, manager.backend.device)
    begin_step()
    saved = [make(others)]
    expected = [leaf.clone() for leaf in leaves(saved[0])]
    refs = [weakref.ref(leaf.untyped_storage()) for leaf in leaves(saved[0])]
    y = group(x.requires_grad_() * 1, lambda h: KeepsSaved.apply(h, saved.pop()))
    others.clear()
    manager.backend.synchronize()
    assert manager.statistics().bytes_in_flight == 0
    assert [ref() for ref in refs] == [None] * len(refs)
    y.sum().backward()
    assert_same(leaves(KeepsSaved.seen.pop()), expected)
    del y
    assert_idle(manager)


@on_two_backends
@pytest.mark.parametrize("waits_when", ["before", "in the group", "in backward"])
def test_a_collective_leaves_when_somebody_has_waited_for_it(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch, waits_when: str
) -> None:
    """Its result is there when somebody waits, and the operation that saves it does not."""
    device = manager.backend.device
    x, arriving = inputs(2, device)
    begin_step()
    waits: list[Tensor] = []

    def wait(result: Tensor) -> Tensor:
        if not waits:  # later ones find it there
            result.copy_(arriving)
        waits.append(result)
        return result

    monkeypatch.setattr(collectives, "wait_tensor", wait)
    results = [collectives.AsyncCollectiveTensor(torch.full_like(arriving, torch.nan))]
    if waits_when == "before":
        results[0].trigger_wait()

    def compute(h: Tensor) -> Tensor:
        y = KeepsSaved.apply(h, results[0])
        if waits_when == "in the group":
            results[0].trigger_wait()
        return y

    y = group(x.requires_grad_() * 1, compute)
    assert len(waits) == (waits_when != "in backward"), "the engine never waits"
    is_there = results.pop().completed
    y.sum().backward()
    (seen,) = KeepsSaved.seen
    KeepsSaved.seen.clear()
    assert manager.statistics().bytes_offloaded == (arriving.nbytes if is_there else 0)
    assert_same([seen.trigger_wait()], [arriving])


# What stays


@on_two_backends
def test_what_its_owner_has_emptied_stays(manager: PipelineOffloadManager) -> None:
    """As FSDP frees a gathered weight after its forward, and fills it again for its backward."""
    leaf, values = inputs(2, manager.backend.device)
    begin_step()
    weight = values.clone()

    def compute(h: Tensor) -> Tensor:
        y = h * weight.view(-1).view_as(weight)
        weight.untyped_storage().resize_(0)
        return y

    y = group(leaf.requires_grad_() * 1, compute)
    weight.untyped_storage().resize_(values.nbytes)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(values)
    y.sum().backward()
    assert_same(gradients(leaf), [values])
    assert manager.statistics().bytes_offloaded == 0


@on_two_backends
def test_a_group_that_backward_used_before_its_commit_stays(
    manager: PipelineOffloadManager,
) -> None:
    begin_step()
    (x,) = inputs(1, manager.backend.device)
    x.requires_grad_()
    with off_interface(True, x * 2, "core") as h:
        y = h.sin()
        inside = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y = off_interface.group_commit(y, name="core")
    assert manager.statistics().bytes_offloaded == 0
    assert_same(torch.autograd.grad(y.sum(), x), inside)


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_zeros_of_forward_mode_have_no_memory_and_stay(kind: str) -> None:
    """A layer norm's weight has no tangent: zeros are saved for it, and others leave."""
    norm = torch.nn.LayerNorm(8)

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(4, 8).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            y, tangent = forward_ad.unpack_dual(group(dual, lambda x: norm(x).sin(), is_on))
            loss = (tangent * y).sum()
            return [loss.detach(), *torch.autograd.grad(loss, [x, *norm.parameters()])]

    with session(kind, verify=True) as manager:
        begin_step()
        assert_same(run(True), run(False))
        assert manager.statistics().bytes_offloaded > 0


@on_two_backends
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "rows"])
@pytest.mark.parametrize("trains", [(False, True, False), (True, False, True)])
def test_statistics_are_those_of_the_last_training(
    manager: PipelineOffloadManager, is_module: bool, trains: tuple[bool, ...]
) -> None:
    """Batch norm writes them and counts no change; autograd reads what is there at the backward.

    They are buffers of a module, or rows of one tensor.
    """
    device = manager.backend.device

    def step(is_on: bool, order: tuple[int, ...]) -> list[Tensor]:
        norm = torch.nn.BatchNorm1d(6).to(device)
        rows = torch.tensor([[0.0], [1.0]], device=device).expand(2, 6).clone()

        def compute(x: Tensor, is_training: bool) -> Tensor:
            if is_module:
                return norm.train(is_training)(x).sin()  # type: ignore[no-any-return]
            return batch_norm(x, *rows, None, None, is_training).sin()

        leaves, losses = inputs(3, device), []
        for x, is_training in zip(leaves, trains, strict=True):
            begin_microbatch(is_on)
            y = group(2 * x.requires_grad_(), partial(compute, is_training=is_training), is_on)
            losses.append(y.square().mean())
        for index in order:
            losses[index].backward()
        return [*(loss.detach() for loss in losses), *gradients(*leaves)]

    for order in permutations(range(3)):
        manager.reset()
        assert_same(step(True, order), step(False, order))
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0
