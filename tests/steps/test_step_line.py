"""What steps cost is said once it is chosen what stays, as a warning where copies cost time."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from test_auto_plan import Training, with_limit
from test_auto_plan import training as training  # a fixture
from test_device import SAVED_BYTES

from pp_offload._groups.plan import GroupBytes
from pp_offload._groups.step_line import GIB, DeviceFigures, StepTime, step_line


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "at the peak, " in record.getMessage()]


@with_limit(40)
def test_figures_are_those_of_the_step(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        peaks = training.run(12)
    (record,) = lines(caplog)
    stay, step_ms, waiting_ms, peak, limit = map(
        float,
        re.findall(
            r"peak, ([\d.]+) GiB.*takes ([\d.]+) ms, ([\d.]+) without.*about ([\d.]+) GiB of at "
            r"most ([\d.]+)$",
            record.getMessage(),
        )[0],
    )
    assert 0 < waiting_ms == step_ms
    assert stay > 0
    assert peaks[-1] / GIB - 0.01 <= peak <= limit == round(training.limit_bytes / GIB, 2)
    assert record.levelno == logging.INFO


def test_where_copies_cost_time_it_is_a_warning() -> None:
    groups = GroupBytes(copied=5 * GIB)
    level, line = step_line(StepTime(120.0, 20.0), groups, DeviceFigures(2 * GIB, GIB))
    assert level == logging.WARNING
    assert "takes 120.0 ms, 100.0 without" in line
    assert "a larger device_limit_bytes, fewer groups" in line
    assert step_line(StepTime(120.0, 1.0), groups, None)[0] == logging.INFO


@with_limit(200)
def test_where_all_stays_nothing_costs_time(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        training.run(8)
    (record,) = lines(caplog)
    assert record.levelno == logging.INFO
    assert "0.00 are on the host, and 0.00 are computed again" in record.getMessage()


@with_limit(40)
def test_a_higher_peak_of_an_optimizer_is_named(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(12):
            training.step()
            torch.empty(80 * SAVED_BYTES, dtype=torch.uint8, device="meta")  # and gone again
    (record,) = lines(caplog)
    assert "is taken outside of groups, by an optimizer" in record.getMessage()


@with_limit(40)
def test_a_peak_in_the_loss_is_named(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    training.loss_bytes = 9 * SAVED_BYTES
    with caplog.at_level(logging.INFO):
        training.run(10)
    (record,) = lines(caplog)
    assert "behind the last group's forward: the model's head, or its loss" in record.getMessage()


@with_limit(40)
def test_a_loop_that_waits_for_each_step_gets_the_line(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Its times are there before room is chosen."""
    with caplog.at_level(logging.INFO):
        for _ in range(9):
            training.step()
            training.backend.synchronize()
    assert len(lines(caplog)) == 1
