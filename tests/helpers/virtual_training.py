"""A training on a virtual device below a limit, and what the device took in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.virtual_layers import ROWS, SAVED_BYTES, WIDTH, Layers, hardware
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager
from pp_offload.simulate import VirtualBackend

NUM_LAYERS = 24


class Training:
    """Steps of microbatches in turn, as on a stage of 1F1B, and what the device took in each."""

    def __init__(
        self, limit_bytes: int | str, *, resets: bool = False, num_layers: int = NUM_LAYERS
    ) -> None:
        self.config = OffloadConfig(
            device_limit_bytes=limit_bytes,
            host_budget_bytes=2**40,  # numbers alone, whatever this machine has
            min_offloaded_tensor_size=1,
            max_in_flight_bytes=2 * SAVED_BYTES,
            prefetch_bytes=2 * SAVED_BYTES,
        )
        self.backend = VirtualBackend(hardware(1.0))
        self.model = Layers(num_layers, WIDTH)
        self.resets = resets
        self.states: list[Tensor] = []
        self.rows = ROWS
        self.loss_bytes = 0

    def forward(self) -> Tensor:
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.empty(self.rows, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
        return self.model(x, offload=True)  # type: ignore[no-any-return]

    def step(self, in_flight: int = 3, num: int = 6) -> int:
        """The peak of its forwards and backwards."""
        if self.resets:  # as by a program that logs peaks
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

    def optimizer_step(self, nbytes: int) -> None:
        """The first one makes states, which stay."""
        if not self.states:
            self.states = [torch.empty(nbytes, dtype=torch.uint8, device="meta")]

    def run(self, num_steps: int, **how: Any) -> list[int]:
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
    limit = (
        "auto" if num_saved is None else int(num_saved * SAVED_BYTES) + NUM_LAYERS * WIDTH**2 * 4
    )
    return pytest.mark.parametrize("training", [{"limit_bytes": limit, **how}], indirect=True)
