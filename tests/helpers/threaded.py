"""Programs on several threads: how they are run, and what must be left of them.

barrier = Lockstep(2)
results = on_threads([lambda: one(0), lambda: one(1)], barrier)
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from helpers.processes import HANG_S
from helpers.scenarios import make_inputs
from helpers.toy import AwayBackend, assert_idle
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._activations.stash import ActivationStash
from pp_offload.backends import CpuBackend

WIDTH = 12

KINDS = ["host", "copy threads", "disk", "host and disk", "staged disk"]
"""Where bytes go. The simulated backends follow one thread, so they are not among these."""


class Lockstep(threading.Barrier):
    """A barrier at which nobody waits for ever."""

    def __init__(self, parties: int, action: Callable[[], None] | None = None) -> None:
        super().__init__(parties, action, timeout=HANG_S)


def on_threads(
    work: Sequence[Callable[[], Any]], barrier: threading.Barrier | None = None
) -> list[Any]:
    """What each piece of work returns, all run at once, or the first error of any.

    Args:
        work: A thread for each.
        barrier: Where they meet; broken by an error, so that the others do not wait for it.
    """
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work[number]()
        except BaseException as error:
            errors.append(error)
            if barrier is not None:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(work))]
    for thread in threads:
        thread.start()
    _join(threads)
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in own or errors:
        raise error
    return results


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [thread for thread in threads if thread.is_alive()]
    assert not hanging, f"{len(hanging)} of {len(threads)} threads hang at\n{_where(hanging)}"


def _where(threads: Sequence[threading.Thread]) -> str:
    frames = sys._current_frames()  # kept no longer than this: they hold what is in their variables
    return "\n".join("".join(traceback.format_stack(frames[t.ident])[-6:]) for t in threads)


@contextmanager
def manager_of(
    kind: str, directory: Path, *, window_bytes: int | None = None
) -> Iterator[PipelineOffloadManager]:
    """A manager for tensors of any size.

    Args:
        kind: One of :data:`KINDS`.
        directory: Of the disk tier, if there is one.
        window_bytes: What may be under way, in either direction; None for the defaults.
    """
    tiers = {"disk": ("disk",), "staged disk": ("disk",), "host and disk": ("host", "disk")}
    options: dict[str, Any] = {}
    if window_bytes is not None:
        options = {"prefetch_bytes": window_bytes, "max_in_flight_bytes": window_bytes}
    if kind == "host and disk":
        gc.collect()  # the budget is that of the process: engines of other tests must be gone
        options["host_budget_bytes"] = 2**16
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers.get(kind, ("host",)),
        disk_dir=directory if kind in tiers else None,
        **options,
    )
    backend = CpuBackend(inline_bytes=0) if kind == "copy threads" else CpuBackend()
    with use_backend(AwayBackend() if kind == "staged disk" else backend, config=config) as manager:
        yield manager


def settled(owner: PipelineOffloadManager | OffloadActivations | ActivationStash) -> None:
    """Wait until what is under way to the host or the disk is there.

    Raises:
        AssertionError: It is long over, for these are a few kilobytes, and still counted.
    """
    deadline = time.monotonic() + HANG_S
    while owner.statistics().bytes_in_flight > 0:
        assert time.monotonic() < deadline, "copies are under way for ever"
        time.sleep(0.001)  # a disk has no event that tells of the last piece of work


def assert_all_idle(manager: PipelineOffloadManager | OffloadActivations) -> None:
    """Nothing is alive, on the way or counted, neither too much nor too little."""
    settled(manager)
    assert_idle(manager)
    statistics = manager.statistics()
    assert statistics.bytes_in_flight == 0
    assert statistics.disk_bytes_in_use == 0


def block(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, is_on: bool) -> torch.Tensor:
    """One group, which saves its own results, and a table that others save, too."""
    with off_interface(is_on, x, "block") as x:
        y = torch.tanh((x @ weight) * table).sin()
    return off_interface.group_commit(y, name="block") if is_on else y


class Net(torch.nn.Module):
    """Groups one behind the other. The same weights for the same seed, the same table for all."""

    def __init__(self, seed: int, *, layers: int = 3, is_on: bool = True) -> None:
        super().__init__()
        self.is_on = is_on
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(WIDTH, WIDTH, generator=generator) / 2 for _ in range(layers)]
        self.weights = torch.nn.ParameterList(drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + block(x, weight, TABLE, self.is_on)
        return x


TABLE = torch.linspace(0.5, 1.5, WIDTH)
"""Neither parameter nor buffer, so every group of every thread saves it."""


def input_of(number: int, step: int) -> torch.Tensor:
    """Of thread ``number``; its shape is another in each step."""
    length = 1 + (7 * step + 3 * number) % 40
    return make_inputs(1, step=100 * step + number, length=length, width=WIDTH)[0]


def gradients(model: torch.nn.Module, leaf: torch.Tensor) -> list[torch.Tensor]:
    """Of the input and the parameters, which are taken from them."""
    found = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [gradient for gradient in found if gradient is not None]


def plain(seed: int, number: int, step: int) -> list[torch.Tensor]:
    """The gradients of one microbatch without offload."""
    model = Net(seed, is_on=False)
    leaf = input_of(number, step).requires_grad_()
    model(leaf).square().mean().backward()
    return gradients(model, leaf)
