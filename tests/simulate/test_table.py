"""The acceptance table: its rows obey the law, its search finds the best, its verdict is as said.

The defaults are asked for in a few cells; the whole table is in ``benchmarks/results``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
from virtual_models import NUM_CHOSEN, NUM_EXPERTS, PARTS, Stage, rounded
from virtual_search import MAX_NEED, MAX_RATIO, Found, least_peak, verdict
from virtual_step import Cell, Row, Rows, chunk_bytes, is_best, shown
from virtual_ways import PEERS

from pp_offload.simulate import DEVICES, VirtualBackend

SMALL = Cell("H100", "llama", 4096, 4096, num_layers=2, in_flight=3, rounds=2)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    found = Rows(SMALL)
    found.run("none", "none")
    found.run("default", "ours")
    for peer in PEERS:
        found.run(peer, peer)
    return found.found


def test_no_row_beats_the_link_or_compute(rows: dict[str, Row]) -> None:
    assert rows["none"]["ratio_to_none"] == 1.0
    for row in rows.values():
        assert row["ratio_to_none"] >= max(1.0, row["need"]) - 1e-6


def test_ways_to_save_memory_save_some(rows: dict[str, Row]) -> None:
    peaks = {name: row["peak_gib"] for name, row in rows.items()}
    assert all(peaks[name] < peaks["none"] for name in ("default", *PEERS))


def test_what_is_kept_on_the_host_has_moved(rows: dict[str, Row]) -> None:
    assert rows["none"]["need"] == rows["recompute"]["need"] == 0
    moved = {name: row["need"] * rows["none"]["step_ms"] * 1e-3 for name, row in rows.items()}
    link = DEVICES["H100"].link_bytes_per_s
    assert moved["inputs"] * link == pytest.approx(2 * 4096 * 4096 * 2)
    assert 0 < moved["default"] * link <= chunk_bytes(SMALL)
    assert moved["save_on_cpu"] * link > chunk_bytes(SMALL), "weights, too"


def test_copies_on_the_compute_stream_add_to_the_step(rows: dict[str, Row]) -> None:
    """As many bytes go each way."""
    row = rows["save_on_cpu"]
    assert row["ratio_to_none"] >= 1 + 2 * row["need"]
    assert row["ratio_to_none"] == pytest.approx(1 + 2 * row["need"], rel=0.1)


def test_a_recomputed_layer_takes_one_more_forward(rows: dict[str, Row]) -> None:
    assert 1.2 < rows["recompute"]["ratio_to_none"] < 4 / 3
    assert rows["inputs"]["ratio_to_none"] == pytest.approx(
        rows["recompute"]["ratio_to_none"], rel=0.01
    )


@pytest.mark.parametrize(
    ("model", "width", "cap", "window"),
    [
        ("gpt", 8192, 0.9, 0.25),
        pytest.param("llama", 12288, 0.9, 0.3, marks=pytest.mark.slow),
        pytest.param("moe", 6144, 0.95, 0.35, marks=pytest.mark.slow),
    ],
)
def test_default_options_keep_the_step_with_the_memory_of_the_best_bounds(
    model: str, width: int, cap: float, window: float
) -> None:
    """Those of the table, as shares of what a microbatch offloads."""
    found = Rows(Cell("H100", model, width, 4096, num_layers=2, in_flight=4, rounds=8))
    found.run("none", "none")
    row, best = found.run("default", "ours"), found.pair(cap, window)
    assert best.ratio <= MAX_RATIO
    assert verdict(row["ratio_to_none"], row["peak_gib"], row["need"], best.peak) == "ok"


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_where_the_link_is_too_slow_default_options_keep_it_busy(model: str) -> None:
    found = Rows(Cell("H100", model, 2048, 4096, num_layers=2, in_flight=4, rounds=8))
    found.run("none", "none")
    row = found.run("default", "ours")
    assert row["need"] > MAX_NEED
    assert verdict(row["ratio_to_none"], row["peak_gib"], row["need"], None) == "ok"


@pytest.mark.parametrize("model", PARTS)
def test_models_have_the_parameters_of_their_kind(model: str) -> None:
    width = 1024
    if model == "gpt":
        expected = 12 * width**2 + 13 * width
    else:
        kv_width, inner = width // 4, rounded(3.5 * width)
        expected = 2 * width**2 + 2 * width * kv_width + 3 * width * inner + 2 * width
    if model == "moe":
        half = rounded(1.75 * width)
        expected += 3 * width * (NUM_EXPERTS * half - inner) + NUM_EXPERTS * width
    assert sum(one.numel() for one in Stage(model, width, 256, 1).parameters()) == expected


def test_experts_compute_what_one_mlp_of_their_widths_does() -> None:
    """Two experts of half the width each: the same products, but for the router."""
    busy = {}
    for model in ("llama", "moe"):
        backend = VirtualBackend(replace(DEVICES["H100"], memory_bytes_per_s=1e30))
        with backend.activate():
            stage = Stage(model, 1024, 4096, 1)
            stage.backward(stage(stage.microbatch()))
        busy[model] = backend.compute.busy_s
    assert NUM_CHOSEN * rounded(1.75 * 1024) == rounded(3.5 * 1024)
    assert busy["moe"] == pytest.approx(busy["llama"], rel=0.01)


GRID = [0.25, 0.5, 0.75, 1.0]


def made_up(cap: float, window: float) -> Found:
    """Fast where both are large enough together; each byte of either is one of the peak."""
    return Found(1.0 if cap >= 0.5 and cap + window >= 1.25 else 1.1, 3 + cap + window)


def test_the_search_finds_what_trying_all_finds_with_fewer_questions() -> None:
    asked = []

    def run(cap: float, window: float) -> Found:
        asked.append((cap, window))
        return made_up(cap, window)

    every = [made_up(cap, window) for cap in GRID for window in GRID]
    expected = min(one.peak for one in every if one.ratio <= 1.01)
    assert least_peak(GRID, GRID, run, halvings=0) == expected == 4.25
    assert len(asked) <= 2 * len(GRID)


def test_the_search_looks_below_the_best_of_the_grid() -> None:
    def run(cap: float, window: float) -> Found:
        return Found(1.0 if cap >= 0.6 else 1.1, cap + window)

    assert least_peak(GRID, GRID, run) == 0.6875, "0.625 and 0.0625"
    assert least_peak(GRID, GRID, run, halvings=0) == 1.0


def test_where_no_pair_keeps_the_step_one_is_asked() -> None:
    asked = []

    def run(cap: float, window: float) -> Found:
        asked.append((cap, window))
        return Found(1.2, 1.0)

    assert least_peak(GRID, GRID, run) is None
    assert asked == [(1.0, 1.0)]


def test_the_table_shows_the_best_pair_alone_unless_all_are_asked_for() -> None:
    names = {"none": (1.0, 9.0), "default": (1.1, 2.0), "1/1": (1.0, 4.0), "0.5/1": (1.0, 3.0)}
    found: list[Row] = [
        {"bounds": name, "ratio_to_none": ratio, "peak_gib": peak, "best_bounds": "0.5/1"}
        for name, (ratio, peak) in names.items()
    ]
    assert [is_best(row, 3.0) for row in found] == [False, False, False, True]
    assert not is_best(found[1], 2.0), "it is too slow"
    brief = [row["bounds"] for row in shown(found, Namespace(full=False))]
    assert brief == ["none", "default", "0.5/1"]
    assert shown(found, Namespace(full=True)) == found


@pytest.mark.parametrize(
    ("ratio", "peak", "need", "best", "expected"),
    [
        (1.01, 1.05, 0.9, 1.0, "ok"),
        (1.011, 1.05, 0.9, 1.0, "slow"),
        (1.01, 1.06, 0.9, 1.0, "peak"),
        (1.2, 1.06, 0.5, 1.0, "slow, peak"),
        (1.0, 9.0, 0.5, None, "ok"),
        (1.02, 9.0, 0.95, 1.0, "ok"),
        (1.03, 9.0, 0.95, 1.0, "slow"),
        (1.52, 9.0, 1.5, None, "ok"),
        (1.54, 9.0, 1.5, None, "slow"),
    ],
)
def test_the_verdict(
    ratio: float, peak: float, need: float, best: float | None, expected: str
) -> None:
    assert verdict(ratio, peak, need, best) == expected
