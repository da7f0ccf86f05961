"""For the files beside it: they make late what they want late."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from conftest import DELAYS

from emulated import load


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The device, without delays, and with nothing queued before or after."""
    delays = request.config.getoption("emulated")
    if delays != "fast":
        pytest.skip("this sets delays of its own; run it with --emulated fast")
    device = load()
    device.set_delays()
    yield device
    device.set_delays(**DELAYS[delays])
    device.synchronize()
