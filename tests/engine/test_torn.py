"""What an exception left half done in the engine is not used again, and harms nobody."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import pytest
import torch
from conftest import make_backend

from pp_offload import OffloadConfig
from pp_offload._core.observer import Observer
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import CpuBackend

NUMEL = 2**18


class Interrupted(deque):  # type: ignore[type-arg]
    """A signal is handled behind its first ``popleft``."""

    is_over = False

    def popleft(self) -> Any:
        first = super().popleft()
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return first


def test_bytes_that_stay_counted_in_flight_do_not_stop_a_commit() -> None:
    """The queue is empty, and there is nothing left to wait for."""
    engine = Offloader(CpuBackend(inline_bytes=0), OffloadConfig(max_in_flight_bytes=0)).engine
    engine.mover.in_flight.queue = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        engine.offload(torch.ones(NUMEL))
    assert engine.is_torn
    assert torch.equal(engine.offload(torch.ones(NUMEL)).unpack(), torch.ones(NUMEL))


class Refuses(Observer):
    def copied(self, lap: Any, moved: Any, event: Any, *, to_host: bool) -> None:
        if not to_host:
            raise InterruptedError


@pytest.mark.parametrize("kind", ["late", "random"])
def test_memory_of_a_reload_that_was_cut_off_is_not_used_again(kind: str) -> None:
    """Its copy is queued, and has no event."""
    backend = make_backend(kind)
    with backend.activate():  # type: ignore[attr-defined]
        offloader = Offloader(backend, OffloadConfig())
        saved = offloader.engine.offload(torch.ones(NUMEL))
        backend.synchronize()
        offloader.observers.add(Refuses())
        with pytest.raises(InterruptedError):
            saved.unpack()
        del saved
        gc.collect()
        offloader.statistics()  # which lets go of what batches left that are gone
        torch.zeros(NUMEL)
        backend.synchronize()
        backend.check()  # type: ignore[attr-defined]


def test_what_leaves_with_an_engine_that_has_just_ended_comes_back() -> None:
    """A thread had asked for the engine before another one began the next epoch."""
    offloader = Offloader(CpuBackend(inline_bytes=0), OffloadConfig())
    engine = offloader.engine
    engine.tear(ValueError())
    offloader.renew_if_torn()
    assert offloader.engine is not engine
    saved = engine.offload(torch.ones(NUMEL))
    engine.mover.synchronize()
    assert torch.equal(saved.unpack(), torch.ones(NUMEL))
