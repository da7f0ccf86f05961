"""The example, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.examples import train

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_example_has_the_same_bits_on_it(tier: str, tmp_path: Path) -> None:
    figures, output = train(
        tmp_path / "figures.json", *f"--stages 1 --device emulated --steps 2 --tier {tier}".split()
    )
    assert figures["bitwise_equal"] is True and "equal bit for bit" in output
    assert min(figures["offloaded_bytes_on"]) > 0
    assert min(figures["disk_peak_bytes_on"]) > 0 or tier == "host"
    assert 0 < figures["device_bytes_peak_on"][0] < figures["device_bytes_peak_off"][0]
