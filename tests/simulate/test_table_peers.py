"""Rows of other libraries: there where one is installed, left out and said so where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import virtual_megatron
import virtual_step
from virtual_step import Cell, Row, Rows, measure
from virtual_ways import PEERS, peers

from pp_offload import OffloadConfig

SMALL = Cell("H100", "gpt", 2048, 2048, num_layers=2, in_flight=3, rounds=2)


def fails() -> None:
    raise ImportError("it is not here")


@pytest.fixture
def without_megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    virtual_megatron.why_not.cache_clear()
    monkeypatch.setattr(virtual_megatron, "_modules", fails)
    yield
    virtual_megatron.why_not.cache_clear()


def test_who_is_not_installed_is_left_out_and_the_table_says_so(
    without_megatron: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--quick", "--without-pairs", "--hidden", "2048"]
    monkeypatch.setattr(sys, "argv", ["virtual_step.py", *flags])
    virtual_step.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "megatron is left out: ImportError: it is not here"
    assert [line.split()[3] for line in lines[3:]] == ["none", "default", *PEERS]


def test_a_host_that_waits_hides_no_copy() -> None:
    """After each forward it waits for what is copied out, and compute with it."""
    found = {}
    for is_synchronized in (False, True):
        cell = Cell("H100", "gpt", 4096, 4096, 2, 3, 2, is_synchronized=is_synchronized)
        rows = Rows(cell)
        rows.run("none", "none")
        found[is_synchronized] = rows.run("default", "ours")
    waits, goes_on = found[True], found[False]
    assert waits["ratio_to_none"] > 1 + 0.9 * waits["need"]
    assert goes_on["ratio_to_none"] < 1.02 * max(1.0, goes_on["need"])


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    assert peers() == (*PEERS, "megatron")
    found = Rows(SMALL)
    for name, way in (("none", "none"), ("default", "ours"), ("megatron", "megatron")):
        found.run(name, way)
    return found.found


def test_megatron_moves_what_each_operator_has_saved_and_no_parameter(rows: dict[str, Row]) -> None:
    """By hand, in widths of a token: what is saved twice moves twice."""
    attention = 2 + 3 + 1 + 1  # norm, qkv; query, key, value; their output; its copy for `out`
    mlp = 2 + 4 + 4  # norm, up; gelu; down
    nbytes = SMALL.num_layers * (attention + mlp) * SMALL.length * SMALL.width * 2
    moved_ms = rows["megatron"]["need"] * rows["none"]["step_ms"]
    link_bytes_per_s = virtual_step.DEVICES["H100"].d2h_rate
    assert moved_ms * 1e-3 * link_bytes_per_s == pytest.approx(nbytes)


def test_megatron_obeys_the_link_and_keeps_what_its_copies_have_not_left(
    rows: dict[str, Row],
) -> None:
    row = rows["megatron"]
    assert row["ratio_to_none"] >= max(1.0, row["need"]) - 1e-6
    assert row["peak_gib"] > rows["none"]["peak_gib"], "the host is ahead of the copies"
    waits = Cell("H100", "gpt", 2048, 2048, 2, 3, 2, is_synchronized=True)
    assert measure(waits, "megatron", OffloadConfig())["peak_gib"] < rows["none"]["peak_gib"]


def test_megatron_leaves_nothing_behind(rows: dict[str, Row]) -> None:
    module, engine = virtual_megatron._modules()
    assert module.PipelineOffloadManager.OFFLOAD_MGR is None
    assert not isinstance(engine.cpu_offload, SimpleNamespace)
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"


def test_the_table_does_not_import_it_to_be_imported() -> None:
    code = "import sys, virtual_step; sys.exit('megatron.core' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(virtual_step.__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0
