"""The fuzzer finds faults that are planted into the engine, and makes small programs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from campaign import explore
from programs import size
from run import check
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._core.tensors import Geometry
from pp_offload._hooks.regions import is_in_backward
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.engine import TransferEngine
from pp_offload._core.saved import Resident
from pp_offload._core.saved import Saved as SavedActivation, Ticket

Patch = pytest.MonkeyPatch


def nothing(*args: Any) -> None:
    """A rule that is not kept."""


def reads_host_before_it_was_written(patch: Patch) -> None:
    patch.setattr(Copies, "_h2d_waits_for_offloaded", nothing)


def uses_tensor_before_it_is_back(patch: Patch) -> None:
    patch.setattr(Copies, "_compute_waits_for", nothing)


def gives_buffer_back_when_reload_is_queued(patch: Patch) -> None:
    copy_back = Copies.copy_to_device

    def give_back(self: Copies, tickets: Sequence[Ticket]) -> int:
        num = copy_back(self, tickets)
        for block in {ticket.block for ticket in tickets}:
            if block is not None and block.buffer is not None:
                block.buffer.last_use = None
        return num

    patch.setattr(Copies, "copy_to_device", give_back)


def compares_no_versions(patch: Patch) -> None:
    unpack = SavedActivation.unpack

    def of_any_version(self: SavedActivation) -> Tensor:
        if not isinstance(self.held, Ticket):
            self.version = self.held._version
        return unpack(self)

    patch.setattr(SavedActivation, "unpack", of_any_version)
    patch.setattr(Block, "check_sources", nothing)
    patch.setattr(Resident, "unpack", lambda self: self.tensor)


def takes_a_tensor_once(patch: Patch) -> None:
    deliver = TransferEngine.deliver

    def pop(self: TransferEngine, ticket: Ticket) -> Tensor:
        if ticket.num_waiting <= 0:
            raise KeyError("it was taken before")
        return deliver(self, ticket)

    patch.setattr(TransferEngine, "deliver", pop)


def forgets_where_a_view_began(patch: Patch) -> None:
    def at_the_begin(self: Geometry, payload: Tensor) -> Tensor:
        whole = payload.nbytes - payload.nbytes % self.dtype.itemsize
        flat = payload if payload.dtype == self.dtype else payload[:whole].view(self.dtype)
        return flat.as_strided(self.size, self.stride, 0)

    patch.setattr(Geometry, "on_storage_of", at_the_begin)


def does_nothing_when_it_runs_again(patch: Patch) -> None:
    enter = off_interface.__enter__

    def only_in_forward(self: off_interface) -> Tensor:
        return self.tensor if is_in_backward() else enter(self)

    patch.setattr(off_interface, "__enter__", only_in_forward)


FAULTS: list[tuple[Callable[[Patch], None], int]] = [
    (reads_host_before_it_was_written, 12),
    (uses_tensor_before_it_is_back, 12),
    (gives_buffer_back_when_reload_is_queued, 25),
    (compares_no_versions, 25),
    (takes_a_tensor_once, 12),
    (forgets_where_a_view_began, 20),
    (does_nothing_when_it_runs_again, 20),
]
"""With the most records that the smallest program may have."""


SOON_FOUND = {
    "reads_host_before_it_was_written",
    "uses_tensor_before_it_is_back",
    "gives_buffer_back_when_reload_is_queued",
}
LATE_FOUND = {"takes_a_tensor_once", "does_nothing_when_it_runs_again"}


def effort(name: str) -> Any:
    """How long the search takes."""
    if name in SOON_FOUND:
        return ()
    return pytest.mark.exhaustive if name in LATE_FOUND else pytest.mark.slow


CASES = [
    pytest.param(plant, largest, marks=effort(plant.__name__), id=plant.__name__)
    for plant, largest in FAULTS
]


@pytest.mark.parametrize(("plant", "largest"), CASES)
def test_a_planted_fault_is_found(
    plant: Callable[[Patch], None], largest: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = (failure for seed in range(1, 9) for failure in explore(seed, 400).failures)
    # What is drawn changes with the source, for the constants in it are tried; so do the sizes.
    failure = next(one for one in found if size(one.program) <= largest)
    monkeypatch.undo()
    check(failure.program)
