"""Simulation of a step's cost on any accelerator: the engine itself, on streams with clocks::

    device = VirtualBackend(DEVICES["H100"])
    with use_backend(device) as manager:
        model = make_model(device="meta")
        ...                       # forward and backward, as always; there is no data
    device.seconds, device.memory.peak_bytes

A whole pipeline, each rank on such a device::

    order = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=16)
    step = run_pipeline(order, Modules(stages, example=x, loss_fn=loss_fn), DEVICES["H100"])

NOTE [ Three devices ]
    The simulated device finds missing orders, the emulated one finds wrong use of PyTorch's own
    streams, and this one measures cost. Nothing is computed here, so no value is ever right or
    wrong.
"""

from __future__ import annotations

from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import DEVICES, Hardware
from pp_offload.simulate.pipeline import PeerLink, PipelineStep, RankStep, run_pipeline
from pp_offload.simulate.schedules import PipelineOrder
from pp_offload.simulate.stages import Modules, Times

__all__ = [
    "DEVICES",
    "Hardware",
    "Modules",
    "PeerLink",
    "PipelineOrder",
    "PipelineStep",
    "RankStep",
    "Times",
    "VirtualBackend",
    "run_pipeline",
]
