"""Processes that tests start. No verdict depends on how fast the machine is, or what else it does.

A process that hangs says nothing, however long one waits; one that is slow says something at last.
So the limit is far beyond any machine seen, starts anew with every sign of life, and what runs into
it is asked for the stacks of its threads before it is ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

HANG_S = 1800
"""Without a sign of life for so long it hangs: on a quiet machine the fast suite takes 180 s, and
on the busiest one seen, five times as long; no part of it a tenth of that."""

Run = subprocess.CompletedProcess[str]


def start(
    command: Sequence[str], env: Mapping[str, str], out: Path, err: Path, cwd: Path | None = None
) -> subprocess.Popen:
    """A process that writes to files, and its stacks when it is told to abort."""
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(
            list(command),
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={**env, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,  # its own processes end with it
        )


def watch(process: subprocess.Popen, *files: Path) -> bool:
    """Wait until a process has ended; whether it did not hang.

    As long as one of the files grows that it writes, it does not.
    """
    written, since = -1, time.monotonic()
    try:
        while process.poll() is None:
            now = sum(file.stat().st_size for file in files)
            if now != written:
                written, since = now, time.monotonic()
            if time.monotonic() - since > HANG_S:
                return False
            time.sleep(0.02)
        return True
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """End a process that still runs, and those it started, with their stacks for the record."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGABRT)
        process.wait()
    with suppress(ProcessLookupError):  # none of those it started is left
        os.killpg(process.pid, signal.SIGKILL)


def run(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Run:
    """Run a command to its end; what it writes goes to an empty folder."""
    out, err = folder / "stdout", folder / "stderr"
    process = start(command, env, out, err, cwd)
    is_well = watch(process, out, err)
    assert is_well, f"{command} hangs:\n{out.read_text()}\n{err.read_text()}"
    return subprocess.CompletedProcess(
        command, process.returncode, out.read_text(), err.read_text()
    )


FORKS = """
import json, os, sys
folder, programs = sys.argv[1], json.loads(sys.argv[2])
{prologue}
for name, program in programs.items():
    child = os.fork()
    if child == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{{folder}}/{{name}}.{{number}}", os.O_CREAT | os.O_WRONLY), number)
        break
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(program)
"""


def run_each(programs: Mapping[str, str], folder: Path, prologue: str) -> dict[str, list[str]]:
    """Run programs to their end, each in a process of its own: the lines that each has printed.

    None writes an error, and all end with status 0. The prologue runs once, before they are forked:
    so imports are made once.
    """
    codes = {name: textwrap.dedent(code) for name, code in programs.items()}
    code = FORKS.format(prologue=textwrap.dedent(prologue))
    done = run([sys.executable, "-W", "ignore", "-c", code, str(folder), json.dumps(codes)], folder)
    assert done.returncode == 0, done.stderr
    ended = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    printed = {}
    for name in programs:
        output, errors = ((folder / f"{name}.{number}").read_text() for number in (1, 2))
        assert (ended[name], errors) == ("0", ""), f"{name}:\n{output}{errors}"
        printed[name] = output.splitlines()
    return printed


FORK_S = 120
"""No work in a fork takes a tenth of it; a fork that hangs is ended by a signal."""


def status_of(work: Callable[[], object]) -> int:
    """How a forked process ends, which has all that was imported: 0 if ``work`` returns; a negative
    number is a signal.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: they are idle
        pid = os.fork()
    if pid == 0:
        signal.alarm(FORK_S)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Scripts, in a process of their own or in this one; a name alone is that of an example


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def environment() -> dict[str, str]:
    """With this checkout's package, and no launcher's variables."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))}


def run_command(command: list[str]) -> Run:
    """A process, whose ranks end with it."""
    with TemporaryDirectory() as folder:
        return run(command, Path(folder), environment())


def run_example(script: str | Path, *flags: object, launcher: tuple[str, ...] = ()) -> Run:
    """A run of a script that ends well."""
    done = run_command([sys.executable, *launcher, str(EXAMPLES / script), *map(str, flags)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(out: Path, *flags: str, launcher: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The figures and the output of a short training of a GPT."""
    small = "--steps 4 --microbatches 4 --layers 4 --width 32 --context 32 --min-numel 1".split()
    done = run_example("train_gpt.py", *small, *flags, "--json", out, launcher=launcher)
    return json.loads(out.read_text()), done.stdout


def run_here(script: str | Path, *flags: str) -> Any:
    """The status of a script that runs in this process, but for ranks that it starts itself."""
    path = EXAMPLES / script
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setattr(os, "environ", environment())
        patch.setattr(sys, "argv", [str(path), *flags])
        return importlib.import_module(path.stem).main()
