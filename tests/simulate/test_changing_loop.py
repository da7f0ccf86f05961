"""A loop that evaluates, loads a checkpoint and changes its batch, below a device limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from helpers.virtual_layers import ROWS, SAVED_BYTES, WIDTH, hardware
from helpers.virtual_training import NUM_LAYERS, Training

from pp_offload import use_backend
from pp_offload._memory.budget import as_another_process
from pp_offload.simulate import VirtualBackend

LIMIT_BYTES = 60 * SAVED_BYTES + NUM_LAYERS * WIDTH**2 * 4
"""Beside the weights, what 60 of the 72 groups in flight of a step of ``ROWS`` save."""

NUM_SETTLING, NUM_CHANGED = 6, 4
"""Steps at first, and after a change. In the last two of those the time must be the best."""

Event = Callable[[Training], None]


def nothing(training: Training) -> None: ...


def evaluates(training: Training) -> None:
    """A batch four times as long, without grad."""
    rows, training.rows = training.rows, 4 * training.rows
    with torch.no_grad():
        training.forward()
    training.rows = rows


def loads_a_checkpoint(training: Training) -> None:
    """All weights are there twice for a moment."""
    state = {name: torch.empty_like(p) for name, p in training.model.state_dict().items()}
    training.model.load_state_dict(state)


@contextmanager
def loop() -> Iterator[Training]:
    """On a link that takes four times a layer's forward for a layer's copy."""
    training = Training(LIMIT_BYTES)
    training.backend = VirtualBackend(hardware(4.0))
    with as_another_process(), use_backend(training.backend, config=training.config):
        yield training


def run(training: Training, num: int, rows: int) -> list[float]:
    """Times of so many steps, all below the limit."""
    training.rows, times = rows, []
    for _ in range(num):
        begin_s = training.backend.seconds
        assert training.step(num=4) <= LIMIT_BYTES
        training.backend.synchronize()
        times.append(training.backend.seconds - begin_s)
    return times


@cache
def best_s(rows: int) -> float:
    """Time of a settled step of a loop that never had another batch."""
    with loop() as training:
        return run(training, NUM_SETTLING, rows)[-1]


LONGER, SHORTER = ROWS * 3 // 2, ROWS // 2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([(evaluates, ROWS), (loads_a_checkpoint, ROWS)], id="pauses"),
        pytest.param([(nothing, SHORTER)], id="shorter"),
        pytest.param([(nothing, LONGER), (evaluates, ROWS)], id="back"),
    ],
)
def test_steps_are_below_the_limit_and_the_best_two_steps_after_a_change(
    changes: list[tuple[Event, int]],
) -> None:
    best = [best_s(rows) for _, rows in changes]
    with loop() as training:
        run(training, NUM_SETTLING, ROWS)
        for (event, rows), least_s in zip(changes, best, strict=True):
            event(training)
            assert max(run(training, NUM_CHANGED, rows)[2:]) < least_s * (1 + 1e-6)
