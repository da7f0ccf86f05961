"""A pytest plugin for runs on the naive engine: of each row, tests until one fails as it should.

python -m pytest tests/field --naive -p naive_run -p field_table -m "" --junitxml report.xml
"""

from __future__ import annotations

import re
import signal
from collections.abc import Generator

import pytest
from field_table import row_of

NO_MANAGER = "checkpoints have no manager; the file shows what PyTorch does there without us"

NOT_SHOWN = {
    "F11": "parameters have no groups and no manager; the file has a naive model of its own, which "
    "fails each of its checks",
    "F12": NO_MANAGER,
    "F22": "the table over ranks is gathered by pp_offload.summary, not by a manager; its ranks "
    "are processes of their own",
    "F29": "the context makes its engine itself and asks no manager; the file shows what hooks of "
    "torch itself do instead",
    "F30": "the rows of sizes measure the host tier itself; the file shows what powers of two hold",
    "F38": NO_MANAGER,
    "F39": NO_MANAGER,
    "F44": "the naive engine says nothing; the file has programs that are warned of, and others",
    "F45": "the naive engine leaves threads and memory where they are; the file spies on both",
    "F46": "the trainer's context asks no manager either; the file counts what it offloads",
    "F52": "attach opens no chunk for what a schedule infers, whichever engine; the file counts "
    "the forwards that infer, and what is alive after them",
    "F56": "the naive engine has no destructors; the file counts the signals that are lost, and "
    "what runs while a graph dies",
    "F57": "the file cuts off the lines of our own engine, one by one",
    "F58": "the naive engine has no threads and no file that a fork could lose; each program of "
    "the file is a process of its own, with our manager",
    "F59": "what waits at the end, and what grows, are the threads and the record of a step, "
    "which the naive engine has not",
}
"""Rows that the naive engine cannot fail, and why."""

REASONS = {
    "F01": (r"on demand.*late", r"RaceError: read by stream h2d .* after the write by stream d2h"),
    "F03": (r"before_commit", r"DID NOT RAISE SavedTensorModifiedError"),
    "F05": (r"is_dropped\[cpu-same group", r"AssertionError: 0"),
    "F07": (r"late", r"RaceError: read by stream d2h .* after the write by stream side"),
    "F08": (r"late", r"RaceError: read by stream d2h .* after the write by stream compute"),
    "F10": (
        r"handed_over.*late",
        r"RaceError: read by stream d2h .* after the write by stream side",
    ),
    "F13": (r"all_config|one_layer|all_resident", r"KeyError"),
    "F14": (r"cpu", r"KeyError"),
    "F15": (r"cpu", r"KeyError"),
    "F16": (r"second_use\[cpu", r"KeyError"),
    "F18": (r"aborted_step\[cpu", r"AssertionError|RuntimeError|KeyError"),
    "F21": (r"number_of_microbatches.*cpu", r"assert \d+ >= "),
    "F24": (r"sibling", r"CaptureError|NotWhileCapturingError|RaceError"),
    "F25": (r"cpu", r"is a view and is being modified inplace"),
    "F31": (r"random_lengths.*cpu", r"assert \d+ <= \(1.05 \*"),
    "F32": (r"ordinary_memory", r"MemoryError"),
    "F33": (r"no_allocation.*cpu", r"assert \[.*\] == \["),
    "F34": (r"one_copy\[cpu-each", r"assert 3 == 1"),
    "F35": (r"who_holds.*cpu", r"ValueError: not enough values"),
    "F36": (r"a_leaf.*cpu", r"ValueError: not enough values"),
    "F37": (r"window\[.*cpu", r"assert \d+ <= "),
    "F42": (r"mixed_saves", r"NotImplementedError: Cannot copy out of meta tensor"),
    "F43": (r"cpu", r"KeyError"),
    "F47": (r"cpu", r"assert not \(?\{|not in \["),
    "F48": (r"cpu-4", r"assert \d+ == \d+"),
    "F49": (r"order_of_backward\[cpu", r"KeyError|AssertionError"),
    "F54": (r"backward_in_threads\[host", r"KeyError|AssertionError|RuntimeError|assert "),
    "F55": (r"beside_training\[modules", r"AssertionError: [TE]{6}|hooks are left"),
}
"""Where a row must fail, and how. Of a row that is not here any failure will do that is no lack."""

REASONS_IF_IT_WAITS = {
    "F02": (r"late", r"RaceError: write by stream d2h .* after the read by stream h2d"),
}
"""The same for the naive engine that waits for reloads on demand, which hides other races."""

LACKS = {
    *("AttributeError", "ImportError", "ModuleNotFoundError", "NameError"),
    *("NotImplementedError", "TypeError", "TookTooLong"),
}
"""Errors that say only that the naive engine is no full replacement."""

LEFT_OUT = {"cpu threads", "eager", "random"}
"""Backends without which every fault shows."""

CPU_S = 20
"""A test that computes for so long goes in circles: what else the machine does is not counted. One
that only waits is ended by who started the tests."""


class TookTooLong(BaseException):
    """A test hangs. No test expects it."""


def is_shown(row: str | None, test: str, message: str, *, waits: bool = False) -> bool:
    """Whether the failure of a test is for the reason of its row."""
    reason = _reason(row, waits=waits)
    if reason is None:
        return message.partition(":")[0].split(".")[-1] not in LACKS
    where, what = reason
    return bool(re.search(where, test) and re.search(what, message, re.DOTALL))


def _reason(row: str | None, *, waits: bool) -> tuple[str, str] | None:
    return (REASONS_IF_IT_WAITS if waits else REASONS).get(row or "")


_shown: set[str | None] = set(NOT_SHOWN)
_is_waiting = False


def pytest_configure(config: pytest.Config) -> None:
    """Which of the two naive engines it is."""
    global _is_waiting
    _is_waiting = config.getoption("naive") == "waits"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out backends and rows; of a file, what should fail comes first."""
    items[:] = [item for item in items if _is_wanted(item)]
    items.sort(key=lambda item: (item.path, not _should_fail(item), "late" in item.name))


def _should_fail(item: pytest.Item) -> bool:
    reason = _reason(row_of(item), waits=_is_waiting)
    return reason is None or bool(re.search(reason[0], item.name))


def _is_wanted(item: pytest.Item) -> bool:
    row, callspec = row_of(item), getattr(item, "callspec", None)
    values = [] if callspec is None else callspec.params.values()
    is_left_out = any(isinstance(value, str) and value in LEFT_OUT for value in values)
    is_elsewhere = (row in REASONS_IF_IT_WAITS) != _is_waiting
    return row not in {None, *NOT_SHOWN} and not is_left_out and not is_elsewhere


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A row that has failed as it should needs no more tests."""
    if row_of(item) in _shown:
        pytest.skip("its row is shown")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A test that hangs fails."""

    def stop(*_: object) -> None:
        raise TookTooLong(f"more than {CPU_S} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what is shown; runs in each worker for its own tests."""
    test, row = report.nodeid.split("::")[-1], dict(report.user_properties).get("field")
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        if is_shown(row, test, crash.message, waits=_is_waiting):
            _shown.add(row)
