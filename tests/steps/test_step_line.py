"""What steps cost is said once it is chosen what stays, as a warning where copies cost time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from helpers.sessions import session
from helpers.toy import batches, make_model, run_step
from helpers.virtual_training import SAVED_BYTES, Training, with_limit

from pp_offload import CpuBackend, FineGrainedActivationOffloadingInterface, summary_table
from pp_offload._common.text import GIB
from pp_offload._groups.plan import GroupBytes
from pp_offload._groups.step_line import DeviceFigures, Gain, StepTime, gain_table, step_line

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
    peaks = training.run(9, num=4)
    stay, sent, step_ms, without_ms, first_ms, peak, limit, first, without = map(
        float,
        re.findall(
            r"peak, ([\d.]+) GiB.*device, ([\d.]+) are on.*takes ([\d.]+) ms, ([\d.]+) without.*"
            r"took ([\d.]+) as the first.*about ([\d.]+) GiB of at most ([\d.]+), was ([\d.]+) in "
            r"the first step, and up to ([\d.]+) without offload \(estimated\)$",
            line().getMessage(),
        )[0],
    )
    assert 0 < without_ms == step_ms and first_ms > 0
    assert stay > 0
    assert peaks[-1] / GIB - 0.01 <= peak <= limit == round(training.limit_bytes / GIB, 2)
    assert 0 < first <= peak and abs(without - peak - sent) < 0.02
    assert line().levelno == logging.INFO
    row = summary_table().splitlines()[-1].split()
    assert row[:2] == ["rank", "0"] and row[4] == f"~{step_ms:.1f}" and row[-2] == f"{sent:.2f}"


def test_without_a_clock_a_step_is_timed_by_the_host(line: Line) -> None:
    """After two steps there is a line, and a row; no figure of the device is made up."""
    with session(CpuBackend()):
        for number in range(2):
            assert "without" not in summary_table()
            run_step(make_model(), batches(3, step=number))
        FineGrainedActivationOffloadingInterface.reset()
        assert re.search(r"takes [\d.]+ ms, and took [\d.]+ as the first", line().getMessage())
        assert "the peak is up to 0.00 MiB higher (estimated)" in line().getMessage()
        assert line().getMessage().endswith("free no memory here, where the device is the host")
        *_, row, note = summary_table(local=True).splitlines()
        assert row.split()[4:7] == ["-", "-", "-"] and note.startswith("copies free no memory")


def test_where_copies_cost_time_it_is_a_warning() -> None:
    now, first, groups = StepTime(120.0, 20.0, True), StepTime(150.0), GroupBytes(copied=5 * GIB)
    gain = Gain(now, first, groups, DeviceFigures(GIB, 2 * GIB, 2 * GIB))
    level, text = step_line(gain)
    assert level == logging.WARNING
    assert "takes 120.0 ms, 100.0 without waiting for copies (estimated), and took 150.0" in text
    assert "1.00 GiB of at most 2.00, was 2.00 in the first step, and up to 6.00 without" in text
    assert "a larger device_limit_bytes, fewer groups" in text
    cells = gain_table({"rank 3": gain}).splitlines()[-1].split()[2:]
    assert cells == "120.0 150.0 ~100.0 1.00 2.00 ~6.00 0.00 5.00 0.00".split()
    small = gain._replace(groups=GroupBytes(copied=5 * 2**20), device=None)
    assert "the peak is up to 5.00 MiB higher" in step_line(small)[1]
    assert gain_table({"rank 0": small}).splitlines()[-1].split()[-2] == "5.00"
    few_waits = gain._replace(now=StepTime(120.0, 1.0), device=None)
    assert step_line(few_waits)[0] == logging.INFO


@pytest.mark.parametrize("training", [{"limit_bytes": None, "resets": True}], indirect=True)
def test_without_a_limit_the_peak_is_that_of_a_step(training: Training, line: Line) -> None:
    """It was what the device had reported since the user's own reset, just before the next step."""
    peaks = training.run(12)
    (peak,) = re.findall(r"peak is about ([\d.]+) GiB, was", line().getMessage())
    assert float(peak) == pytest.approx(peaks[-1] / GIB, rel=0.05)


@with_limit(40)
def test_a_higher_peak_of_an_optimizer_is_named(training: Training, line: Line) -> None:
    for _ in range(9):
        training.step(num=4)
        torch.empty(80 * SAVED_BYTES, dtype=torch.uint8, device="meta")  # and gone again
    assert "is taken outside of groups, by an optimizer" in line().getMessage()


@with_limit(40)
def test_a_peak_in_the_loss_is_named(training: Training, line: Line) -> None:
    training.loss_bytes = 9 * SAVED_BYTES
    training.run(9, num=4)
    assert "that is behind the last group's forward: the model's head" in line().getMessage()
