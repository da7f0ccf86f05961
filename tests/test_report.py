"""Telling: the table, the debug message, what steps cost, and what messages say of tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from helpers.sessions import begin_step, session
from helpers.toy import batches, make_model, run_step
from helpers.virtual_training import SAVED_BYTES, Training, with_limit

from pp_offload import (
    CpuBackend,
    OffloadStatistics,
    debug_rank,
    fine_grained_activation_offload,
    print_offload_summary_table,
    summary_table,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._common.checks import described
from pp_offload._common.text import GIB
from pp_offload._core.statistics import COUNTERS
from pp_offload._groups.plan import GroupBytes
from pp_offload._groups.step_line import DeviceFigures, Gain, StepTime, gain_table, step_line
from pp_offload.compat import megatron
from pp_offload.summary import format_summary

MIB = 2**20


def rows_of(table: str) -> dict[str, list[str]]:
    """Cells by the first cell of their line."""
    lines = [line.split() for line in table.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


def test_a_row_per_rank_a_column_per_group_and_sums() -> None:
    rows = rows_of(format_summary([{"mlp": 3 * MIB, "attn": MIB // 2}, {"attn": MIB}]))
    assert rows["rank"] == ["attn", "mlp", "total", "MiB"]
    assert rows["0"] == ["0.50", "3.00", "3.50"]
    assert rows["1"] == ["1.00", "0.00", "1.00"]
    assert rows["sum"] == ["1.50", "3.00", "4.50"]
    text = format_summary([{"mlp": MIB}, {}], [MIB // 2, MIB])
    rows = rows_of(text)
    assert rows["rank"] == ["mlp", "total", "MiB", "computed", "again"]
    assert [rows[name][-1] for name in ("0", "1", "sum")] == ["0.50", "1.00", "1.50"]
    assert text.isascii() and len({len(line) for line in text.splitlines()[1:]}) == 1
    assert rows_of(format_summary([{}, {}]))["1"] == ["0.00"], "a rank without groups"


def test_what_became_of_the_bytes_of_each_group() -> None:
    """The input and what gelu saves are copied, of a cast the half; two are computed again."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(256, 256, dtype=torch.bfloat16) / 16)
    with session(CpuBackend()) as manager:
        for _ in range(2):
            begin_step()
            y = torch.randn(1024, 256, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2):
                with off_interface(True, y, "mlp") as y:
                    y = torch.nn.functional.gelu((y @ weight).float().sin())
                    y = (y * y).bfloat16()
                y = off_interface.group_commit(y, name="mlp")
            y.sum().backward()
        manager.reset()
        groups, table = manager.group_bytes, rows_of(summary_table(local=True))
    nbytes = 7 * MIB // 2  # of each group; backward begins with the second, which stays
    assert groups == {"mlp": GroupBytes(2 * nbytes, nbytes, 2 * MIB, 2 * MIB, MIB // 2)}
    assert table["mlp"] == table["sum"] == ["7.00", "3.50", "2.00", "2.00", "0.50"]


def test_the_printed_table_is_that_of_the_bytes_given(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_offload_summary_table({"mlp": 2 * MIB})
    assert rows_of(capsys.readouterr().out)["0"] == ["2.00", "2.00"]
    print_offload_summary_table({})
    assert rows_of(capsys.readouterr().out)["sum"] == ["0.00"]
    megatron.print_offload_summary_table({"mlp": MIB}, {"mlp": (3, MIB // 2)}, dist.group.WORLD)
    (*_, line) = capsys.readouterr().out.splitlines()
    assert line == "rank 0, mlp: 3 copies of what was copied before, 512.00 KiB"


def test_debug_speaks_on_its_rank_through_logging(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for is_on, rank in ((False, 0), (True, 1), (True, 0)):
        monkeypatch.setattr(fine_grained_activation_offload, "DEBUG", is_on)
        monkeypatch.setattr(fine_grained_activation_offload, "DEBUG_RANK", rank)
        assert not caplog.messages
        debug_rank("100% %s")
    assert caplog.messages == ["pp_offload [rank 0]: 100% %s"]


def test_the_summary_is_that_of_the_current_manager(one_rank: None) -> None:
    with session(CpuBackend()) as manager:
        for step in range(2):
            run_step(make_model(), batches(3, step=step), in_flight=2)
        manager.reset()
        summary = manager.offload_summary_bytes
        assert set(summary) <= {"mix", "mlp"}
        assert manager.offload_summary_total_bytes == sum(summary.values()) > 0
        assert summary_table().startswith(format_summary([summary], [0]))
        with use_backend(CpuBackend()):
            assert "counts from the next reset()" in summary_table(), "no step is complete yet"


def test_a_reset_takes_part_in_no_collective(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may end their steps at other times, and without groups."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a collective")

    for name in ("all_gather_object", "all_reduce", "barrier", "gather_object"):
        monkeypatch.setattr(dist, name, refuse)
    with session(CpuBackend()) as manager:
        run_step(make_model(), batches(3), in_flight=2)
        megatron.FineGrainedActivationOffloadingInterface.reset(dist.group.WORLD)
        assert manager.offload_summary_total_bytes > 0
        face = megatron.PipelineOffloadManager.get_instance()
        face.post_warmup_callback(process_group=dist.group.WORLD)


def test_any_tensor_can_be_described() -> None:
    """A nested one has no shape."""
    assert described(torch.ones(2, 3)) == "a tensor of shape (2, 3), dtype torch.float32"
    assert described(torch.nested.nested_tensor([torch.ones(2)])) == "a Tensor"


# Statistics of a step, and as a logger takes them

NAMES = [field.name for field in fields(OffloadStatistics)]

GAUGES = """host_bytes_in_use host_bytes_peak host_bytes_reserved bytes_in_flight
bytes_reloaded_unused live_tensors step_ms stalled_ms disk_bytes_in_use disk_bytes_peak""".split()


def numbered(first: int) -> OffloadStatistics:
    """Each number is another one."""
    return OffloadStatistics(**{name: first + 7 * i for i, name in enumerate(NAMES)})


def test_every_number_is_a_counter_or_is_as_it_is_now() -> None:
    assert sorted([*COUNTERS, *GAUGES]) == sorted(NAMES)
    before, now = numbered(3), numbered(1000)
    difference = now.since(before)
    for name in COUNTERS:
        assert getattr(difference, name) == 997, name
    for name in GAUGES:
        assert getattr(difference, name) == getattr(now, name), name


def test_a_logger_gets_plain_numbers() -> None:
    figures = replace(numbered(1), stalled_ms=2.5).as_dict("offload/")
    assert list(figures) == [f"offload/{name}" for name in NAMES]
    assert all(type(number) in (int, float) for number in figures.values())
    assert figures["offload/stalled_ms"] == 2.5
    assert numbered(1).as_dict()["bytes_offloaded"] == 1
    unknown = replace(numbered(1), stalled_ms=None).as_dict()
    assert set(NAMES) - set(unknown) == {"stalled_ms"}


def test_a_table_has_what_is_not_zero() -> None:
    none = OffloadStatistics(**dict.fromkeys(NAMES, 0))
    statistics = replace(none, bytes_offloaded=3 * 2**29, taken_back=2, stalled_ms=1.25)
    assert [line.rsplit(maxsplit=2) for line in statistics.table().splitlines()] == [
        ["bytes offloaded", "1.50", "GiB"],
        ["taken", "back", "2"],
        ["stalled", "ms", "1.25"],
    ]


# What steps cost is said once it is chosen what stays, as a warning where copies cost time


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
        off_interface.reset()
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
