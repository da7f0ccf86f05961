"""Every rule of the transfer engine is broken once, and the simulated backend must notice.

A fault counts as caught when the step raises :class:`RaceError` or its numbers are wrong. Without a
fault the same program passes: see ``test_engine.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from conftest import make_backend
from torch import nn
from toy import batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, RaceError, use_backend
from pp_offload._memory.buffers import Loan
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.in_flight import InFlight
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Event, Stream


class CopiesBeforeComputeWroteIt(Copies):
    def _d2h_waits_for_compute(self, home: Stream) -> None:
        pass


class OverwritesBufferStillRead(Copies):
    def _d2h_waits_for_last_users(self, copies: Sequence[Block]) -> None:
        pass


class ReloadsIntoMemoryStillUsed(Copies):
    def _h2d_waits_for_compute(self, home: Stream) -> None:
        pass


class ReadsHostBeforeItWasWritten(Copies):
    def _h2d_waits_for_offloaded(self, copies: Sequence[Block]) -> None:
        pass


class UsesTensorBeforeItIsBack(Copies):
    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        pass


class WaitsOnAStreamCapturedOnce(Copies):
    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        self.backend.d2h.wait_event(event)


class DropsSources(Copies):
    def keep_sources(self, *args: object) -> None:
        self.in_flight.queue[-1].finish()


class FreesHostBufferEarly(TransferEngine):
    def offload(self, tickets: Sequence[Ticket]) -> int:
        nbytes = super().offload(tickets)
        for block in {ticket.block for ticket in tickets}:
            assert block is not None and block.buffer is not None
            block.buffer.last_use = None
            block.loan = Loan(block.buffer)  # which the tier knows nothing of
        return nbytes


class ReleasesSourcesWithoutWaiting(InFlight):
    def keep_bounded(self, last_bytes: int, poll: Callable[[], None]) -> None:
        while (pending := self._first_to_wait_for(last_bytes, poll)) is not None:
            self.finish(pending)


SEEN_IN_ANY_ORDER = [
    CopiesBeforeComputeWroteIt,
    ReloadsIntoMemoryStillUsed,
    UsesTensorBeforeItIsBack,
    WaitsOnAStreamCapturedOnce,
    FreesHostBufferEarly,
]
"""Nothing orders the accesses, so a copy that ran early is an error as well."""

SEEN_WHEN_LATE = [
    *SEEN_IN_ANY_ORDER,
    DropsSources,
    OverwritesBufferStillRead,
    ReadsHostBeforeItWasWritten,
    ReleasesSourcesWithoutWaiting,
]
"""A copy that ran early was seen finished by the host, which does order them."""


def steps_are_right(model: nn.Module, plain: nn.Module) -> bool:
    """Three 1F1B steps of changing length, each behind a backward that stops half way.

    What was prefetched for its second half is never used, and its host buffers are written again.
    """
    for step in range(3):
        inputs = batches(4, step=step, length=3 + step)
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        middle = model[1](model[0](inputs[0].clone().requires_grad_()))
        torch.autograd.grad(model[2](middle).sum(), middle)
        del middle
        got = run_step(model, inputs, in_flight=2)
        if not same_bits(got, run_step(plain, inputs, in_flight=2, offload=False)):
            return False
    return True


def plant(fault: type, engine: TransferEngine) -> None:
    """Into that part of the engine that is to have it."""
    (part,) = (
        part
        for part in (engine, engine.copies, engine.copies.in_flight)
        if issubclass(fault, type(part))
    )
    part.__class__ = fault


def is_caught(fault: type, order: str) -> bool:
    """Whether the steps on an engine with ``fault`` go wrong in a way that shows."""
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=2000)
    try:
        with use_backend(make_backend(order), config=config) as manager:
            plant(fault, manager.offloader.transfer)
            return not steps_are_right(make_model(), make_model(groups=()))
    except RaceError:
        return True


@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("fault", SEEN_IN_ANY_ORDER, ids=lambda fault: fault.__name__)
def test_fault_is_caught_though_lucky(fault: type, order: str) -> None:
    assert is_caught(fault, order)


@pytest.mark.parametrize("fault", SEEN_WHEN_LATE, ids=lambda fault: fault.__name__)
def test_fault_is_caught(fault: type) -> None:
    assert is_caught(fault, "late")


@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_without_a_fault_nothing_is_caught(order: str) -> None:
    assert not is_caught(TransferEngine, order)
