"""Trace files: what is written is read, ranks are merged, and other files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.traces import check_file, timeline_of

from pp_offload.trace import Sample, Span, Timeline, merge_ranks, part_of, read, write

BASE_NS = 1_700_000_000_000_000_001


def of_each_kind(rank: int = 0, base_ns: int = BASE_NS) -> Timeline:
    return Timeline(
        base_ns,
        [
            Span(rank, "d2h", "mlp (offload)", 0.5, 1.25, {"bytes": 3}),
            Span(rank, "compute", "mlp (forward)", 0.25, 4.0),
            Span(rank, "compute 2", "mlp (forward)", 0.25, 4.0),
            Span(rank, "h2d", "mlp (reload)", 2.0, 3.0),
        ],
        [Sample(rank, "host", 0.5, 0), Sample(rank, "host", 1.0, 7)],
        {rank: {"num_ranks": 2}},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write(of_each_kind(), path)
    assert read(path) == of_each_kind()
    assert check_file(path, 1) == {"M": 2 + 2 * 4, "X": 4, "C": 2}


def test_ranks_are_merged_on_one_clock(tmp_path: Path) -> None:
    """The second rank began 2 s later."""
    out = tmp_path / "out.json.gz"
    parts = [part_of(out, rank) for rank in range(2)]
    assert [part.name for part in parts] == ["out.rank0.json.gz", "out.rank1.json.gz"]
    write(of_each_kind(), parts[0])
    write(of_each_kind(1, BASE_NS + 2 * 10**9), parts[1])
    whole = merge_ranks(parts, out)
    assert read(out) == whole == read(*parts)
    check_file(out, 2)
    assert whole.base_ns == BASE_NS and whole.ranks == [0, 1]
    for track in ("d2h", "compute"):
        first, second = whole.of(0, track)[0], whole.of(1, track)[0]
        assert (second.begin_s, second.end_s) == (first.begin_s + 2, first.end_s + 2)
    assert [item.time_s for item in whole.counter(1, "host")] == [2.5, 3.0]


def test_files_that_are_not_those_of_a_run_are_not_merged(tmp_path: Path) -> None:
    out, paths = tmp_path / "out.json", [tmp_path / name for name in "abc"]
    for rank, path in enumerate(paths):
        write(Timeline(5, metadata={rank: {"num_ranks": 3}}), path)
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] of runs of \[3\] ranks"):
        merge_ranks([paths[0], paths[2]], out)
    with pytest.raises(ValueError, match="rank 1 is in two of the traces"):
        merge_ranks([*paths, paths[1]], out)
    with pytest.raises(ValueError, match="no trace to merge"):
        merge_ranks([], out)
    assert not out.exists()


def test_other_files_are_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json.gz"
    write(timeline_of(0), path)
    cut = path.read_bytes()[:100]
    for data in (b"not JSON", b"[]", b'{"traceEvents": []}', cut):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="expected a file that a Trace has written"):
            read(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"found no file .*gz, expected one that a Trace"):
        read(path)
    for rank in range(2):
        write(Timeline(0), part_of(path, rank))
    with pytest.raises(FileNotFoundError) as refused:
        read(path)
    parts = "found a[1].rank0.json.gz, a[1].rank1.json.gz: give these instead, or merge them"
    assert parts in str(refused.value)
