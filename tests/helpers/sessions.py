"""A program with offload and without, compared bit for bit, and the checks behind it.

def program(is_on):            # builds its tensors, marks groups if is_on, returns tensors
    ...
check(program, "late")         # several steps; equal bits; nothing in use afterwards
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

import pp_offload.testing
from pp_offload import (
    CpuBackend,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    OffloadConfig,
    PipelineOffloadManager,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_start,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._core.mover import _MOVERS
from pp_offload._core.observers import Observer
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import Backend, default_backend
from pp_offload.errors import TierError

Program = Callable[[bool], Sequence[Tensor]]
"""Runs one step, with groups if its argument is True, and returns what it computed."""

KINDS = ("late", "random:1", "threads")
SIMULATED = ("late", "random:1")
_numbers = itertools.count()


def make_backend(kind: str, seed: int = 0) -> Any:
    """A fresh backend: ``cpu``, ``threads``, ``cuda``, ``emulated``, or the order of a simulated
    one, which its seed may follow: ``random:1``.
    """
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return default_backend()
    if kind == "emulated":
        return default_backend(torch.device("emulated", 0))
    if kind in ("cpu", "threads", "cpu threads"):
        return CpuBackend(inline_bytes=256 * 1024 if kind == "cpu" else 0)
    order, _, number = kind.partition(":")
    # Looked up each time: a planted fault replaces it.
    return pp_offload.testing.SimulatedBackend(order, seed=int(number or seed))


def side_stream(backend: Any) -> Any:
    """Another compute stream of a simulated device."""
    return backend.new_stream(f"side {next(_numbers)}")


class MostUnused(Observer):
    """Notes how much was ever reloaded ahead of its use."""

    def __init__(self, offloader: Offloader) -> None:
        self.nbytes = 0
        self._arrived = offloader.engine.mover.arrived
        offloader.observers.add(self)

    def copied(self, lap: object, moved: object, event: object, *, to_host: bool) -> None:
        if not to_host:
            self.nbytes = max(self.nbytes, self._arrived.unused_bytes)


@contextmanager
def session(kind: str | Backend = "late", **options: Any) -> Iterator[PipelineOffloadManager]:
    """A manager of its own, for tensors of any size, on a backend or a kind of one."""
    backend = make_backend(kind) if isinstance(kind, str) else kind
    config = OffloadConfig(**{"min_offloaded_tensor_size": 1, **options})
    if "host_budget_bytes" in options:
        gc.collect()  # the budget is that of the process: engines of other tests must be gone
    with use_backend(backend, config=config) as manager:
        yield manager


def begin_step() -> None:
    """A step of one microbatch on one stage."""
    off_interface.reset()
    begin_microbatch()


def begin_microbatch(is_on: bool = True, stages: int = 1, stage: int = 0) -> None:
    """The forward of a microbatch begins."""
    if is_on:
        off_interface.init_chunk_handler(stages, stage, 1)


def group(
    x: Tensor,
    compute: Callable[[Tensor], Any],
    is_on: bool = True,
    name: str = "part",
    **commit: Any,
) -> Any:
    """``compute(x)`` as one group, committed at once."""
    with off_interface(is_on, x, name) as x:
        y = compute(x)
    return off_interface.group_commit(y, name=name, **commit) if is_on else y


def by_functions(x: Tensor, compute: Callable[[Tensor], Tensor], name: str = "part") -> Tensor:
    """A group by the functions that mark it."""
    x = fine_grained_offloading_group_start(x, name)
    with off_interface.get_context(True):
        y = compute(x)
    return fine_grained_offloading_group_commit(y, name)


def by_autograd_functions(
    x: Tensor, compute: Callable[[Tensor], Tensor], name: str = "part"
) -> Tensor:
    """A group by the reference's functions of autograd."""
    chunk = PipelineOffloadManager.get_instance().cur_forward_chunk()
    x = FineGrainedOffloadingGroupStartFunction.apply(x, chunk, name)
    with PipelineOffloadManager.get_instance():
        y = compute(x)
    return FineGrainedOffloadingGroupCommitFunction.apply(y, chunk, name, None, False)


def check(
    program: Program,
    kind: str = "late",
    *,
    steps: int = 2,
    moves: bool = True,
    **options: Any,
) -> None:
    """Run steps of ``program`` with offload and compare each with the run without.

    Args:
        kind: See :func:`make_backend`.
        moves: Whether bytes have to be offloaded.
        options: Of the engine.
    """
    expected = program(False)
    with session(kind, **options) as manager:
        for number in range(steps):
            before = manager.statistics().bytes_offloaded
            begin_step()
            assert_same(program(True), expected, f"step {number}")
            if moves and number == 0:
                assert manager.statistics().bytes_offloaded > before, "nothing was offloaded"
            assert_idle(manager)
        off_interface.reset()
        assert_idle(manager)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements as bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).clone()


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], where: str = "") -> None:
    """All tensors have the same bits, shapes and dtypes."""
    assert len(got) == len(expected), where
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        at = f"{where}, tensor {number} of {len(got)}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        assert torch.equal(as_bytes(a), as_bytes(b)), f"{at} is\n{a}\nexpected\n{b}"


def assert_idle(owner: Any) -> None:
    """No saved tensor lives, its bytes are back, and no hook is installed."""
    if any(in_use(owner).values()):
        autograd_lets_go()
        gc.collect()  # an exception holds frames, and they hold tensors
        rest = {name for name, number in in_use(owner).items() if number}
        assert rest <= {"host_bytes_in_use"}, in_use(owner)  # a read keeps nothing else
        end_reads()
        assert not any(in_use(owner).values()), in_use(owner)
    assert_no_hooks()


def autograd_lets_go() -> None:
    """Of what is left of a graph whose backward raised: its queues keep that until the next one."""
    for device in (torch.accelerator.current_accelerator(check_available=True), "cpu"):
        if device is not None:
            torch.zeros((), device=device, requires_grad=True).clone().backward()


def end_reads() -> None:
    """Wait for threads that read ahead what nobody needs any more."""
    for mover in tuple(_MOVERS):
        for read in tuple(mover.tier.reads):
            with suppress(TierError):
                if read.event is not None:
                    read.event.synchronize()


def in_use(owner: Any) -> dict[str, int]:
    """What has to be zero when no graph is alive."""
    statistics = owner.statistics()
    names = "host_bytes_in_use", "disk_bytes_in_use", "live_tensors", "bytes_reloaded_unused"
    return {name: getattr(statistics, name) for name in names}


def assert_no_hooks() -> None:
    """Autograd saves a tensor itself: no pair of saved-tensor hooks is on this thread's stack."""
    node: Any = torch.ones(2, 2, requires_grad=True).exp().grad_fn
    node._raw_saved_result.register_hooks(lambda t: t, lambda t: t)  # raises if there are some


def unseen(backend: Any) -> AbstractContextManager[object]:
    """Operators that the simulated device does not see, so that the engine alone has to notice."""
    return no_dispatch() if backend.name.startswith("simulated") else nullcontext()


def settle(manager: PipelineOffloadManager | Offloader) -> None:
    """All copies have run, and the engine knows."""
    for _ in range(2):
        manager.backend.synchronize()
        manager.statistics()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(*tensors: Tensor) -> list[Tensor]:
    """The gradients, which are taken away; zero elements where there is none."""
    results = [torch.zeros(0) if t.grad is None else t.grad.clone() for t in tensors]
    for tensor in tensors:
        tensor.grad = None
    return results


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Threads take turns so often that few lines run without another thread in between."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
