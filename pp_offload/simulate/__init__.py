"""What a step costs on an accelerator that is not here: the engine itself, on streams with clocks.

    device = VirtualBackend(DEVICES["H100"])
    with use_backend(device) as manager:
        model = make_model(device="meta")
        ...                       # forward and backward, as always; there is no data
    device.seconds, device.memory.peak_bytes

NOTE [ Three devices ]
    The simulated device asks whether an order is missing, the emulated one whether PyTorch's own
    streams are used right, and this one what it costs. Nothing is computed here, so no value is
    ever right or wrong.
"""

from __future__ import annotations

from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import DEVICES, Hardware

__all__ = ["DEVICES", "Hardware", "VirtualBackend"]
