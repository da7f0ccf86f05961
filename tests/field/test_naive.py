"""No row is vacuous: on the naive engine each fails, and for a reason of its own."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from field_table import environment, find_rows, row_of_case
from naive import NaiveManager, installed
from naive_run import NOT_SHOWN, REASONS, REASONS_IF_IT_WAITS, is_shown
from processes import run
from toy import assert_idle, assert_no_hooks, batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as Interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

FIELD = Path(__file__).parent
ROWS = {row.name for row in find_rows(FIELD)}
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


Failures = dict[tuple[str | None, str], str]
"""What tests say, by their row and name."""


def failures(report: Path, kind: str) -> Failures:
    """What the field tests say of a naive engine."""
    command = [sys.executable, "-m", "pytest", str(FIELD), f"--ignore={__file__}"]
    command += [f"--naive={kind}", "-p", "naive_run", "-p", "field_table", "--tb=line"]
    command += [f"--rootdir={FIELD.parents[1]}", f"--junitxml={report}", "-m", ""]
    command += ["-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    env = {k: v for k, v in environment().items() if not k.startswith("PYTEST_")}
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FIELD), env.get("PYTHONPATH"))))
    done = run(command, report.parent, env, FIELD.parents[1])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-4000:] + done.stderr
    return {
        (row_of_case(case), case.get("name", "")): failure.get("message", "")
        for case in ElementTree.parse(report).iter("testcase")
        if (failure := case.find("failure")) is not None
    }


def shown(failed: Failures, *, waits: bool) -> set[str | None]:
    return {row for (row, test), said in failed.items() if is_shown(row, test, said, waits=waits)}


@pytest.mark.slow
def test_every_row_fails_on_the_naive_engine(tmp_path: Path) -> None:
    failed = failures(tmp_path / "all.xml", "all faults")
    failed_if_it_waits = failures(tmp_path / "waits.xml", "waits")
    rows = shown(failed, waits=False) | shown(failed_if_it_waits, waits=True)
    said: dict[str | None, list[str]] = defaultdict(list)
    for (row, test), message in (*failed.items(), *failed_if_it_waits.items()):
        said[row].append(f"{test}: {message[:200]}")
    missing = {row: said[row] for row in sorted(ROWS - rows - set(NOT_SHOWN))}
    assert not missing, "rows that an engine with their failure passes, or fails for other reasons"


def test_a_row_is_in_one_table_only() -> None:
    assert set(NOT_SHOWN) <= ROWS
    assert not set(NOT_SHOWN) & {*REASONS, *REASONS_IF_IT_WAITS}
    assert not set(REASONS) & set(REASONS_IF_IT_WAITS)


@pytest.mark.parametrize(
    "message",
    [
        "AttributeError: 'NaiveManager' object has no attribute 'x'",
        "TypeError: unexpected keyword",
        "naive_run.TookTooLong: more than 10 s",
    ],
)
def test_a_lack_is_no_reason(message: str) -> None:
    assert not is_shown("F99", "test_anything[cpu]", message)
    assert is_shown("F99", "test_anything[cpu]", "assert 2 == 1")


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("layers", [2, 3])
def test_the_naive_engine_trains(ahead: int, layers: int) -> None:
    """It is naive, not broken: in plain 1F1B it offloads, and every bit is right."""
    with installed(), use_backend(make_backend("cpu"), config=CONFIG) as manager:
        assert type(manager) is NaiveManager
        on, off = (Chain(("a", "b"), layers, is_on=b) for b in (True, False))
        for step in range(3):
            inputs, moves = make_inputs(4, step=step), schedule(4, ahead)
            expected = run_moves([off], inputs, moves, False)
            assert same_bits(run_moves([on], inputs, moves, True), expected)
            assert_idle(manager)
        statistics = manager.statistics()
        assert statistics.prefetched_reloads > statistics.on_demand_reloads > 0
        assert statistics.bytes_offloaded > 0


def test_the_naive_engine_trains_linear_layers() -> None:
    with installed(), use_backend(make_backend("cpu"), config=CONFIG) as manager:
        on, off = make_model(), make_model(groups=())
        for step in range(3):
            expected = run_step(off, batches(4, step=step), in_flight=2, offload=False)
            assert same_bits(run_step(on, batches(4, step=step), in_flight=2), expected)
            assert_idle(manager)
        assert manager.statistics().bytes_offloaded > 0


def test_nothing_of_the_naive_engine_stays() -> None:
    before = dict(vars(Interface))
    with installed():
        assert vars(Interface) != before
    assert vars(Interface) == before
    with use_backend(make_backend("cpu"), config=CONFIG) as manager:
        assert type(manager) is PipelineOffloadManager
    assert_no_hooks()
