"""What steps cost is said once it is chosen what stays, as a warning where copies cost time."""

from __future__ import annotations

import logging

import pytest
from helpers.toy import batches, make_model, run_step
from helpers.virtual_training import Training, with_limit

from pp_offload import (
    CpuBackend,
    FineGrainedActivationOffloadingInterface,
    OffloadConfig,
    summary_table,
    use_backend,
)
from pp_offload._groups.gain import GIB, DeviceFigures, Gain, StepTime, gain_table, log_gain
from pp_offload._groups.plan import GroupBytes


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def logged(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The table of a run in its log; there is one."""
    (record,) = [item for item in caplog.records if "a step and the device" in item.getMessage()]
    return record


@with_limit(40)
def test_figures_are_those_of_the_step(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    peaks = training.run(12)
    row = logged(caplog).getMessage().splitlines()[-1].replace("~", "").split()[2:]
    step_ms, first_ms, without_ms, peak, first, without, stay, sent, _ = map(float, row)
    assert 0 < without_ms == step_ms and first_ms > 0 and stay > 0
    assert peaks[-1] / GIB - 0.01 <= peak <= training.limit_bytes / GIB + 0.01
    assert 0 < first <= peak and abs(without - peak - sent) < 0.02
    assert logged(caplog).levelno == logging.INFO
    row = summary_table().splitlines()[-1].split()
    assert row[:2] == ["rank", "0"] and row[4] == f"~{step_ms:.1f}" and row[-2] == f"{sent:.2f}"


def test_without_a_clock_a_step_is_timed_by_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """After two steps there is a row; no figure of the device is made up."""
    with use_backend(CpuBackend(), config=OffloadConfig(min_offloaded_tensor_size=1)):
        for number in range(2):
            assert "without" not in summary_table()
            run_step(make_model(), batches(3, step=number))
        FineGrainedActivationOffloadingInterface.reset()
        *_, row, note = summary_table(local=True).splitlines()
        assert row.split()[4:7] == ["-", "-", "-"] and note.startswith("copies free no memory")
        assert float(row.split()[2]) > 0 < float(row.split()[3])
        assert logged(caplog).getMessage().endswith(f"{row}\n{note}")


def test_where_copies_cost_time_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    now, first, groups = StepTime(120.0, 20.0, True), StepTime(150.0), GroupBytes(copied=5 * GIB)
    gain = Gain(now, first, groups, DeviceFigures(GIB, 2 * GIB))
    log_gain(gain)
    assert logged(caplog).levelno == logging.WARNING
    assert "compute waits 20.0 ms of a step" in caplog.text
    cells = gain_table({"rank 3": gain}).splitlines()[-1].split()[2:]
    assert cells == "120.0 150.0 ~100.0 1.00 2.00 ~6.00 0.00 5.00 0.00".split()
    small = gain._replace(groups=GroupBytes(copied=5 * 2**20), device=None)
    assert gain_table({"rank 0": small}).splitlines()[-1].split()[-4:-1] == [
        "~+5.00",
        "0.00",
        "5.00",
    ]
    caplog.clear()
    log_gain(gain._replace(now=StepTime(120.0, 1.0)))
    assert logged(caplog).levelno == logging.INFO


@with_limit(200)
def test_where_all_stays_nothing_costs_time(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.run(8)
    assert logged(caplog).levelno == logging.INFO
    assert logged(caplog).getMessage().split()[-2:] == ["0.00", "0.00"]
