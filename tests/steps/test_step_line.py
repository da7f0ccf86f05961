"""What steps cost is said once it is chosen what stays, as a warning where copies cost time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from helpers.virtual_layers import SAVED_BYTES
from helpers.virtual_training import Training, with_limit

from pp_offload._groups.plan import GroupBytes
from pp_offload._groups.step_line import GIB, DeviceFigures, StepTime, step_line

Line = Callable[[], logging.LogRecord]


@pytest.fixture
def line(caplog: pytest.LogCaptureFixture) -> Line:
    """The line of a run; there is one."""
    caplog.set_level(logging.INFO)

    def only() -> logging.LogRecord:
        (record,) = [item for item in caplog.records if "at the peak, " in item.getMessage()]
        return record

    return only


@with_limit(40)
def test_figures_are_those_of_the_step(training: Training, line: Line) -> None:
    peaks = training.run(12)
    stay, step_ms, without_ms, peak, limit = map(
        float,
        re.findall(
            r"peak, ([\d.]+) GiB.*takes ([\d.]+) ms, ([\d.]+) without.*about ([\d.]+) GiB of at "
            r"most ([\d.]+)$",
            line().getMessage(),
        )[0],
    )
    assert 0 < without_ms == step_ms
    assert stay > 0
    assert peaks[-1] / GIB - 0.01 <= peak <= limit == round(training.limit_bytes / GIB, 2)
    assert line().levelno == logging.INFO


def test_where_copies_cost_time_it_is_a_warning() -> None:
    groups = GroupBytes(copied=5 * GIB)
    level, text = step_line(StepTime(120.0, 20.0), groups, DeviceFigures(2 * GIB, GIB))
    assert level == logging.WARNING
    assert "takes 120.0 ms, 100.0 without" in text
    assert "a larger device_limit_bytes, fewer groups" in text
    assert step_line(StepTime(120.0, 1.0), groups, None)[0] == logging.INFO


@with_limit(200)
def test_where_all_stays_nothing_costs_time(training: Training, line: Line) -> None:
    training.run(8)
    assert line().levelno == logging.INFO
    assert "0.00 are on the host, and 0.00 are computed again" in line().getMessage()


@with_limit(40)
def test_a_higher_peak_of_an_optimizer_is_named(training: Training, line: Line) -> None:
    for _ in range(12):
        training.step()
        torch.empty(80 * SAVED_BYTES, dtype=torch.uint8, device="meta")  # and gone again
    assert "is taken outside of groups, by an optimizer" in line().getMessage()


@with_limit(40)
def test_a_peak_in_the_loss_is_named(training: Training, line: Line) -> None:
    training.loss_bytes = 9 * SAVED_BYTES
    training.run(10)
    assert "that is behind the last group's forward: the model's head" in line().getMessage()
