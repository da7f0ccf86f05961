"""Telling: the table, its print, the debug message, and what messages say of tensors."""

from __future__ import annotations

import logging
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from helpers.sessions import begin_step, session
from helpers.toy import batches, make_model, run_step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadStatistics,
    debug_rank,
    fine_grained_activation_offload,
    print_offload_summary_table,
    summary_table,
    use_backend,
)
from pp_offload._common.checks import described
from pp_offload._core.statistics import COUNTERS
from pp_offload._groups.plan import GroupBytes
from pp_offload.backends import CpuBackend
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
