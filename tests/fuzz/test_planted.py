"""The fuzzer finds faults that are planted into the device, and makes small programs of them."""

from __future__ import annotations

import pytest
from conftest import make_backend
from helpers.fuzz import engines
from helpers.fuzz.campaign import explore
from helpers.fuzz.run import check
from planted.faults import DEVICE

LARGEST = 16
"""The most records that the smallest program may have."""


@pytest.mark.parametrize("fault", ["h2d ignores d2h", "compute ignores h2d"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_faulty(kind: str, seed: int) -> object:
        backend = make_backend(kind, seed)
        if hasattr(backend, "new_stream"):
            DEVICE[fault].change(backend)
        return backend

    monkeypatch.setattr(engines, "make_backend", make_faulty)
    failures = (failure for seed in range(1, 9) for failure in explore(seed, 400).failures)
    failure = next(f for f in failures if repr(f.program).count("(") <= LARGEST)
    monkeypatch.undo()
    check(failure.program)
