"""The engine from inside: observers, calls, its lock, engines cut off, and what tensors leave."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from conftest import make_backend, on_two_backends
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
    settle,
)
from helpers.toy import AwayBackend, Net, inputs, make_inputs, train
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import batch_norm
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import pp_offload
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._common.workers import Piece, Workers, is_worker
from pp_offload._core.observers import Laps, Observer, Observers
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import timed_by_host
from pp_offload.errors import VerifyError

NUMEL = 2**18


def test_what_an_observer_raises_goes_to_the_program() -> None:
    class Raises(Observer):
        def used(self, saved: Any, payload: Any) -> None:
            raise VerifyError("it is something else")

    with session("late") as manager:
        manager.offloader.observers.add(Observer())
        assert manager.offloader.observers == Observers(), "what nobody overrides is not called"
        manager.offloader.observers.add(Raises())
        with pytest.raises(VerifyError, match="something else"):
            train(Net(), inputs(2), True)
        assert not manager.offloader.engine.is_torn


def test_laps_are_cut_by_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs there, so nothing has a time."""
    backend = make_backend("late")
    laps = Laps(timed_by_host(backend.current_stream()))
    assert laps.now(backend) is laps.end and not laps.is_cut
    monkeypatch.setattr(type(backend), "is_capturing", True)
    assert laps.now(backend) is None and laps.is_cut


# An engine that an exception has cut off


@pytest.mark.parametrize("kind", ["late", "random"])
def test_memory_of_a_reload_that_was_cut_off_is_not_used_again(kind: str) -> None:
    """Its copy is queued, and has no event."""

    class Refuses(Observer):
        def copied(self, lap: Any, moved: Any, event: Any, *, to_host: bool) -> None:
            if not to_host:
                raise InterruptedError

    backend: Any = make_backend(kind)
    with backend.activate():
        offloader = Offloader(backend, OffloadConfig())
        saved = offloader.engine.offload(torch.ones(NUMEL))
        backend.synchronize()
        offloader.observers.add(Refuses())
        with pytest.raises(InterruptedError):
            saved.unpack()
        del saved
        gc.collect()
        offloader.statistics()  # which lets go of what batches that are gone brought
        torch.zeros(NUMEL)
        backend.synchronize()
        backend.check()


def test_what_leaves_with_an_engine_that_has_just_ended_comes_back() -> None:
    """A thread had asked for the engine before another one began the next epoch."""
    offloader = Offloader(make_backend("cpu threads"), OffloadConfig())
    engine = offloader.engine
    engine.tear(ValueError())
    offloader.renew_if_torn()
    assert offloader.engine is not engine
    saved = engine.offload(torch.ones(NUMEL))
    engine.mover.synchronize()
    assert torch.equal(saved.unpack(), torch.ones(NUMEL))


def test_an_engine_reloads_nothing_of_the_one_before_it() -> None:
    """It would count bytes that the other engine hands out."""
    with session("late", prefetch_bytes=10**6) as manager:
        begin_step()
        first = group(drawn(4, 4).requires_grad_(), torch.sin)
        manager.offloader.engine.tear(ValueError())
        begin_microbatch()
        second = group(drawn(4, 4).requires_grad_(), torch.sin)
        settle(manager)
        second.sum().backward()
        assert manager.statistics().bytes_reloaded_unused == 0
        first.sum().backward()
        del first, second
        assert_idle(manager)


# Functions of the package that a group calls, from its start to the end of its backward


OWN = str(Path(pp_offload.__file__).parent)


def calls(num_groups: int, num_tensors: int) -> int:
    """Of a step, once it is like the one before."""
    num = Counter[str]()

    def count(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            num[frame.f_code.co_qualname] += 1

    def forward(x: Tensor) -> Tensor:
        for _ in range(num_tensors):
            x = x.sin()  # saves its input
        return x

    with session("cpu", device_limit_bytes=None, max_in_flight_bytes=2**20):
        for is_counted in (False, False, True):
            y = torch.ones(2, 512, requires_grad=True).clone()
            sys.setprofile(count if is_counted else None)
            try:
                begin_step()
                for number in range(num_groups):
                    y = group(y, forward, name=f"g{number % 2}")
                y.backward(torch.ones(2, 512))
            finally:
                sys.setprofile(None)
    return num.total()


@pytest.mark.parametrize(("num_tensors", "most"), [(4, 140), (100, 1400)])
def test_one_more_group_calls_few_functions(num_tensors: int, most: int) -> None:
    assert (calls(12, num_tensors) - calls(4, num_tensors)) / 8 <= most


# The lock is held for bookkeeping: whoever waits for a copy or a thread does not hold it


QUEUED: deque[Piece] = deque()
"""What late workers have to do."""


class LateWorkers(Workers):
    """Threads that never come to work by themselves."""

    def queue(self, piece: Piece) -> None:
        QUEUED.append(piece)


@contextmanager
def waits_seen(lock: Any) -> Iterator[list[bool]]:
    """For each time that this program blocks, whether this thread did so without the lock.

    Late workers do what they have to do up to a piece that is waited for.
    """
    seen, wait = list[bool](), Piece.wait

    def look_and_wait(piece: Piece) -> None:
        if not is_worker() and not piece.done():
            seen.append(not lock._is_owned())
        while piece in QUEUED:
            QUEUED.popleft().run()
        wait(piece)

    with patch.object(Piece, "wait", look_and_wait):
        yield seen


@patch("pp_offload._memory.disk_file.Workers", LateWorkers)
def test_nobody_waits_with_the_lock_held(tmp_path: Path) -> None:
    """A disk works only when it is waited for, so there is a wait wherever there can be one."""
    config = OffloadConfig(
        min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path, max_in_flight_bytes=500
    )
    with use_backend(AwayBackend(), config=config) as manager:
        with waits_seen(manager.offloader.lock) as seen:
            for step in range(3):
                net, xs = Net(), inputs(4, step=step, rows=9 + step)
                assert_same(train(net, xs, True, ahead=3), train(net, xs, False, ahead=3))
            manager.reset()
        assert len(seen) > 30
        assert all(seen)
        assert_idle(manager)


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


@on_two_backends
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_what_left_is_gone(
    manager: PipelineOffloadManager, make: Callable[[list[Tensor]], Tensor]
) -> None:
    """Nothing of the engine keeps the memory inside a wrapper, and the wrapper comes back."""
    x, *others = make_inputs(5, device=manager.backend.device)
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
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("waits_when", ["before", "in the group", "in backward"])
def test_a_collective_leaves_when_somebody_has_waited_for_it(
    manager: PipelineOffloadManager,
    monkeypatch: pytest.MonkeyPatch,
    waits_when: str,
    is_inside: bool,
) -> None:
    """Who saves it does not wait. So does a tensor made of its result, as a DTensor is."""
    device = manager.backend.device
    x, arriving = make_inputs(2, device=device)
    begin_step()
    waits: list[Tensor] = []

    def wait(result: Tensor) -> Tensor:
        if not waits:  # later ones find it there
            result.copy_(arriving)
        waits.append(result)
        return result

    monkeypatch.setattr(collectives, "wait_tensor", wait)
    saved = collectives.AsyncCollectiveTensor(torch.full_like(arriving, torch.nan))
    results = [saved]
    saved = TwoTensor(saved, saved) if is_inside else saved
    if waits_when == "before":
        results[0].trigger_wait()

    def compute(h: Tensor) -> Tensor:
        y = KeepsSaved.apply(h, saved)
        if waits_when == "in the group":
            results[0].trigger_wait()
        return y

    y = group(x.requires_grad_() * 1, compute)
    assert len(waits) == (waits_when != "in backward"), "the engine never waits"
    is_there = results.pop().completed
    y.sum().backward()
    seen = KeepsSaved.seen.pop()
    seen = seen.a if is_inside else seen
    assert manager.statistics().bytes_offloaded == (arriving.nbytes if is_there else 0)
    assert_same([seen.trigger_wait()], [arriving])


# What stays


@on_two_backends
def test_what_its_owner_has_emptied_stays(manager: PipelineOffloadManager) -> None:
    """As FSDP frees a gathered weight after its forward, and fills it again for its backward."""
    leaf, values = make_inputs(2, device=manager.backend.device)
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
    (x,) = make_inputs(1, device=manager.backend.device)
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

        leaves, losses = make_inputs(3, device=device), []
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
