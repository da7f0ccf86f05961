"""Models on ``meta``, and their training on a virtual device: what it took in each step.

training = Training(None, device=hardware(2.0))
with training.running():
    training.steady(in_flight=3).seconds
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._memory.budget import as_another_process
from pp_offload.simulate import DEVICES, Hardware, Modules, VirtualBackend

KIND: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


def chain(
    num: int, layers: Callable[[], Sequence[nn.Module]], example: Tensor, /, **options: Any
) -> Modules:
    """Stages of such layers, each of which is a group, with a sum as the loss."""
    stages = [nn.Sequential(*layers()) for _ in range(num)]
    options = {"loss_fn": lambda y: y.sum(), "groups": {"layer": "*"}} | options
    return Modules(stages, example=example, **options)


class Layers(nn.Module):
    """Products of which each saves its input; a group around each."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=False, **KIND) for _ in range(num)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *, offload: bool = True) -> Tensor:
        for layer in self.layers:
            with off_interface(offload, x, "layer"):
                y = layer(x)
            x = off_interface.group_commit(y, name="layer") if offload else y
        return x


WIDTH, ROWS = 4096, 8192

FLOPS = 2 * ROWS * WIDTH * WIDTH
"""Of a forward of one layer."""

SAVED_BYTES = ROWS * WIDTH * 2


def hardware(copies_to_compute: float) -> Hardware:
    """A device on which a layer's copy takes so many times its forward."""
    machine = DEVICES["H100"]
    forward_s = FLOPS / (machine.matmul_flops * machine.matmul_fraction)
    return replace(machine, link_bytes_per_s=SAVED_BYTES / (forward_s * copies_to_compute))


NUM_LAYERS = 24


@dataclass(frozen=True)
class Steady:
    """A turn of a forward and a backward in the steady state."""

    seconds: float
    stalled_s: float
    peak_bytes: int


class Training:
    """Steps of microbatches in turn, as on a stage of 1F1B, and what the device took in each.

    By default a model of groups, and a device on which a layer's copy takes as long as its forward.

    Args:
        limit_bytes: The option ``device_limit_bytes``; ``options`` are others.
        is_blocking: Whether the host waits for each operator.
        resets: Whether a program that logs peaks resets them before each step.
    """

    def __init__(
        self,
        limit_bytes: int | str | None,
        *,
        device: Hardware | None = None,
        model: nn.Module | None = None,
        offload: bool = True,
        is_blocking: bool = False,
        resets: bool = False,
        **options: Any,
    ) -> None:
        defaults = {
            "host_budget_bytes": 2**40,  # numbers alone, whatever this machine has
            "min_offloaded_tensor_size": 1,
            "max_in_flight_bytes": 2 * SAVED_BYTES,
            "prefetch_bytes": 2 * SAVED_BYTES,
        }
        self.config = OffloadConfig(device_limit_bytes=limit_bytes, **{**defaults, **options})
        self.backend = VirtualBackend(device or hardware(1.0), is_blocking=is_blocking)
        self.model = model or Layers(NUM_LAYERS, WIDTH)
        self.offload, self.resets = offload, resets
        self.rows = ROWS
        self.loss_bytes = 0
        """Of what is in no group, and not there when backward begins."""

    @contextmanager
    def running(self) -> Iterator[PipelineOffloadManager]:
        """Inside, its engine is the process's."""
        with as_another_process(), use_backend(self.backend, config=self.config) as manager:
            yield manager

    def forward(self) -> Tensor:
        off_interface.init_chunk_handler(None, None, self.config.min_offloaded_tensor_size)
        x = torch.empty(self.rows, WIDTH, device="meta", dtype=torch.bfloat16)
        return self.model(x.requires_grad_(), offload=self.offload)  # type: ignore[no-any-return]

    def step(self, in_flight: int = 3, num: int = 4) -> int:
        """The peak of its forwards and backwards."""
        if self.resets:
            self.backend.memory.take_peak()
        off_interface.reset()
        own = self.backend.memory.take_peak() if not self.resets else 0
        for _ in self.turns(in_flight, num):
            continue
        peak = self.backend.memory.peak_bytes
        self.backend.memory._peak_bytes = max(own, peak)  # what the device would tell
        return peak

    def turns(self, in_flight: int, num: int) -> Iterator[int]:
        """Forwards of so many microbatches, and their backwards in turn; yields after each turn."""
        waiting: deque[Tensor] = deque()
        for number in range(num + in_flight):
            if number < num:
                waiting.append(self.forward())
            if number >= in_flight - 1 and waiting:
                y = waiting.popleft()
                torch.empty(self.loss_bytes, dtype=torch.uint8, device="meta")  # and gone again
                y.backward(torch.empty_like(y))
                del y
            yield number

    def steady(self, in_flight: int = 4, rounds: int = 4) -> Steady:
        """A step, and the mean of so many of its turns."""
        off_interface.reset()
        compute, memory = self.backend.compute, self.backend.memory
        for number in self.turns(in_flight, in_flight + 1 + rounds):
            if number == in_flight:
                begin_s, stalled_s = compute.free_at_s, compute.stalled_s
                memory.take_peak()
            elif number == in_flight + rounds:
                seconds, stalled_s = compute.free_at_s - begin_s, compute.stalled_s - stalled_s
                steady = Steady(seconds / rounds, stalled_s / rounds, memory.peak_bytes)
        self.backend.synchronize()
        return steady

    def run(self, num_steps: int, **how: Any) -> list[int]:
        """Peaks of so many steps."""
        return [self.step(**how) for _ in range(num_steps)]

    @property
    def limit_bytes(self) -> int:
        """Where it is a number."""
        assert isinstance(self.config.device_limit_bytes, int)
        return self.config.device_limit_bytes

    @property
    def sent(self) -> int:
        return PipelineOffloadManager.get_instance().statistics().bytes_offloaded

    def sent_by_a_step(self, **how: Any) -> int:
        before = self.sent
        self.step(**how)
        return self.sent - before


def with_limit(num_saved: float | None, **how: Any) -> Any:
    """A training whose limit is as much as so many layers save beside what is there anyway."""
    weights = NUM_LAYERS * WIDTH**2 * 4
    limit = "auto" if num_saved is None else int(num_saved * SAVED_BYTES) + weights
    return pytest.mark.parametrize("training", [{"limit_bytes": limit, **how}], indirect=True)
