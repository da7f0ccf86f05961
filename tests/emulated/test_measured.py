"""What ``pp-offload doctor --measure`` says of an accelerator."""

from __future__ import annotations

import pytest
import torch

from pp_offload.cli.device_speed import DeviceSpeed

pytestmark = pytest.mark.emulated


def test_rates_and_costs_of_an_accelerator() -> None:
    hardware = DeviceSpeed(torch.device("emulated", 0), nbytes=2**16).hardware()
    assert hardware.name == "measured emulated"
    assert hardware.pin_bytes_per_s is not None, "which a CPU has no figure for"
    assert hardware.both_links_bytes_per_s != min(hardware.d2h_rate, hardware.h2d_rate)
