"""Telling: the table, its print, and the debug message."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from toy import batches, make_model, run_step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadConfig,
    PipelineOffloadManager,
    debug_rank,
    fine_grained_activation_offload,
    print_offload_summary_table,
    summary_table,
    use_backend,
)
from pp_offload._groups.plan import GroupBytes
from pp_offload.backends import CpuBackend
from pp_offload.summary import format_summary

MIB = 2**20


def rows_of(table: str) -> dict[str, list[str]]:
    """Cells by the first cell of their line."""
    lines = [line.split() for line in table.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


@pytest.fixture
def trained() -> Iterator[PipelineOffloadManager]:
    """A manager after a complete step."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(CpuBackend(), config=config) as manager:
        for step in range(2):
            run_step(make_model(), batches(3, step=step), in_flight=2)
        manager.reset()
        yield manager


def test_a_row_per_rank_a_column_per_group_and_sums() -> None:
    rows = rows_of(format_summary([{"mlp": 3 * MIB, "attn": MIB // 2}, {"attn": MIB}]))
    assert rows["rank"] == ["attn", "mlp", "total", "MiB"]
    assert rows["0"] == ["0.50", "3.00", "3.50"]
    assert rows["1"] == ["1.00", "0.00", "1.00"]
    assert rows["sum"] == ["1.50", "3.00", "4.50"]


def test_the_last_column_is_what_is_computed_again() -> None:
    rows = rows_of(format_summary([{"mlp": MIB}, {"mlp": 2 * MIB}], [MIB // 2, MIB]))
    assert rows["rank"] == ["mlp", "total", "MiB", "computed", "again"]
    assert [rows[name][-1] for name in ("0", "1", "sum")] == ["0.50", "1.00", "1.50"]


def test_what_became_of_the_bytes_of_each_group() -> None:
    """The input and what gelu saves are copied, of a cast the half; two are computed again."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(256, 256, dtype=torch.bfloat16) / 16)
    with use_backend(CpuBackend(), config=config) as manager:
        for _ in range(2):
            manager.reset()
            off_interface.init_chunk_handler(None, None, 1)
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


@pytest.mark.parametrize("rows", [[{}], [{}, {}], [{"mlp": 0}, {}]])
def test_ranks_without_groups_count_as_zero(rows: list[dict[str, int]]) -> None:
    table = rows_of(format_summary(rows))
    assert table["sum"][-1] == "0.00"
    assert all(str(rank) in table for rank in range(len(rows)))


def test_columns_line_up() -> None:
    lines = format_summary([{"a_long_group_name": 1, "b": 10**12}, {}]).splitlines()
    table = [line for line in lines[1:]]
    assert len({len(line) for line in table}) == 1


def test_the_table_is_ascii() -> None:
    assert format_summary([{"mlp": 5}]).isascii()


def test_the_printed_table_is_that_of_the_bytes_given(capsys: pytest.CaptureFixture[str]) -> None:
    print_offload_summary_table({"mlp": 2 * MIB})
    assert rows_of(capsys.readouterr().out)["0"] == ["2.00", "2.00"]


def test_an_empty_table_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_offload_summary_table({})
    assert "sum" in capsys.readouterr().out


def test_the_printed_table_gathers_over_a_process_group(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_offload_summary_table({"mlp": MIB})
    assert rows_of(capsys.readouterr().out)["0"] == ["1.00", "1.00"]


def test_the_summary_of_a_manager_without_a_step_is_zero() -> None:
    assert rows_of(summary_table())["sum"] == ["0.00", "0.00"]


def test_the_summary_is_that_of_the_current_manager(trained: PipelineOffloadManager) -> None:
    assert set(trained.offload_summary_bytes) <= {"mix", "mlp"}
    assert trained.offload_summary_total_bytes == sum(trained.offload_summary_bytes.values())
    assert trained.offload_summary_total_bytes > 0
    assert summary_table() == format_summary([trained.offload_summary_bytes], [0])


def test_the_summary_gathers_over_a_process_group(
    trained: PipelineOffloadManager, one_rank: None
) -> None:
    expected = format_summary([trained.offload_summary_bytes], [0])
    assert summary_table() == expected
    assert summary_table(dist.group.WORLD) == expected


def test_telling_prints_nothing(
    trained: PipelineOffloadManager, capsys: pytest.CaptureFixture[str]
) -> None:
    summary_table()
    debug_rank("quiet")
    assert capsys.readouterr().out == ""


def test_debug_is_silent_until_switched_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        debug_rank("unheard")
    assert "unheard" not in caplog.text


def test_debug_speaks_on_its_rank_through_logging(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fine_grained_activation_offload, "DEBUG", True)
    with caplog.at_level(logging.DEBUG):
        debug_rank("heard %s")
    assert "heard %s" in caplog.text
    assert capsys.readouterr().out == ""


def test_debug_is_silent_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fine_grained_activation_offload, "DEBUG", True)
    monkeypatch.setattr(fine_grained_activation_offload, "DEBUG_RANK", 1)
    debug_rank("unheard")
    assert "unheard" not in caplog.text


def test_debug_is_switched_on_where_the_reference_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fine_grained_activation_offload, "DEBUG", True)
    debug_rank("heard")
    assert "heard" in caplog.text


def test_before_a_step_is_complete_the_table_says_so() -> None:
    with use_backend(CpuBackend(), config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        run_step(make_model(), batches(3))
        assert "counts from the next reset()" in summary_table()
        manager.reset()
        assert "counts from the next reset()" not in summary_table()


def test_the_table_does_not_show_an_earlier_step_where_nothing_is_large_enough(
    trained: PipelineOffloadManager,
) -> None:
    assert trained.offload_summary_total_bytes
    trained.init_model_chunk_offload_handler(None, None, 2**20)
    with off_interface(True, torch.ones(4, requires_grad=True), "mlp") as x:
        y = x.sin()
    off_interface.group_commit(y, name="mlp").sum().backward()
    trained.reset()
    assert trained.offload_summary_total_bytes == 0


@pytest.mark.parametrize(("smallest", "fraction"), [(1_000_000, 1.0), (1, 0.0)])
def test_a_step_that_offloads_nothing_is_warned_of_once_unless_told_to(
    smallest: int, fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    config = OffloadConfig(activation_offload_fraction=fraction)
    with use_backend(CpuBackend(), config=config) as manager:
        manager.disable_offload()
        with caplog.at_level(logging.WARNING, logger="pp_offload"):
            run_marked_step(smallest)
            manager.reset()
        assert not caplog.records, "it was switched off"
        manager.enable_offload()
        with caplog.at_level(logging.WARNING, logger="pp_offload"):
            for _ in range(4):
                run_marked_step(smallest)
            manager.reset()
    messages = [record.getMessage() for record in caplog.records]
    if fraction:
        assert len(messages) == 2, "once for each name"
        assert all("min_offloaded_tensor_size=1000000 elements" in said for said in messages)
    else:
        assert not messages


def run_marked_step(smallest: int) -> None:
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, smallest)
    make_model()(batches(1)[0]).sum().backward()
