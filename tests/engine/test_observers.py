"""What an observer raises, how long copies took, and an engine that an exception has cut off."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.nets import Net, inputs, train
from helpers.sessions import (
    assert_idle,
    begin_microbatch,
    begin_step,
    drawn,
    group,
    session,
    settle,
)

from pp_offload import OffloadConfig
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
