"""The fuzzer finds faults that are planted into the engine, and makes small programs of them."""

from __future__ import annotations

import pytest
from campaign import explore
from planted.faults import Fault
from programs import size
from run import check

READS_HOST_EARLY = Fault("_core/mover:Mover._copy_back", "h2d.wait_event(batch.offloaded)")
USES_EARLY = Fault("_core/mover:Mover._bring", "self._wait(live.wait_event, event)")
NO_VERSIONS = Fault("_core/saved:Saved.unpack", "tensor._version != self.version", "False")
NO_OFFSETS = Fault("_core/tensors:Geometry.on_storage_of", "self.offset)", "0)")

FAULTS = [
    pytest.param(READS_HOST_EARLY, 12, id="host memory is read before it is written"),
    pytest.param(USES_EARLY, 12, id="a tensor is used before it is back"),
    pytest.param(NO_VERSIONS, 25, id="versions are not compared", marks=pytest.mark.slow),
    pytest.param(NO_OFFSETS, 20, id="where a view began is forgotten", marks=pytest.mark.slow),
]
"""With the most records that the smallest program may have."""


@pytest.mark.parametrize(("fault", "largest"), FAULTS)
def test_a_planted_fault_is_found(
    fault: Fault, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.plant(monkeypatch)
    failures = (failure for seed in range(1, 9) for failure in explore(seed, 400).failures)
    # What is drawn changes with the source, for the constants in it are tried; so do the sizes.
    failure = next(failure for failure in failures if size(failure.program) <= largest)
    monkeypatch.undo()
    check(failure.program)
