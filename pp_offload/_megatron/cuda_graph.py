"""Recording the engine's streams into a captured CUDA graph.

A captured graph must join every stream it forked, so a captured forward and a captured backward
each end with a record. The graph keeps the host memory of its copies until the manager is dropped.
Run a step before the capture: host memory cannot be allocated inside it.

    off_interface.forward_record(forward_event)               # at the end of a captured forward
    y = fine_grained_offloading_backward_record(y, event)     # on what the captured part returns
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pp_offload._common.checks import said
from pp_offload._megatron.manager import PipelineOffloadManager


def fine_grained_offloading_forward_record(event: torch.cuda.Event) -> None:
    """Record ``event`` on the current stream, which then waits for the copies to the host."""
    _check_event(event)
    record_and_join(event)


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """Identity whose backward records an event and joins the copies to the device.

    Source: Megatron-LM ``FineGrainedOffloadingBackwardRecordFunction``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, event: torch.cuda.Event) -> Tensor:
        _check_event(event)  # here: in backward the error would come too late
        ctx.event = event
        return tensor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Record the event on the current stream, which then waits for the h2d stream."""
        record_and_join(ctx.event)
        return grad_output, None


def fine_grained_offloading_backward_record(tensor: Tensor, event: torch.cuda.Event) -> Tensor:
    """``tensor``; in its backward ``event`` is recorded and the h2d stream joined."""
    return FineGrainedOffloadingBackwardRecordFunction.apply(tensor, event)


def _check_event(event: object) -> None:
    if isinstance(event, type) or not hasattr(event, "record"):
        raise TypeError(f"event is {said(event)}, expected an event, such as torch.cuda.Event()")


def record_and_join(event: Any) -> None:
    """Record ``event`` on the current stream, which then waits for all copies queued so far."""
    offloader = PipelineOffloadManager.get_instance().offloader
    event.record(offloader.backend.current_stream())
    offloader.engine.mover.join()
