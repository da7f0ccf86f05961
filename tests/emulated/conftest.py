"""For the files beside it, which run in a process of their own: see tests/test_emulated.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from emulated import load, why_not


@pytest.fixture(autouse=True)
def emulated() -> Iterator[ModuleType]:
    """The device, without delays, and with nothing queued before or after."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    device = load()
    device.set_delays()
    yield device
    device.set_delays()
    device.synchronize()
