"""Commands of ``pp-offload``, their options, and what they print. Nothing here imports torch."""

from __future__ import annotations

import json
import platform
import re
import sys
import traceback
from argparse import ArgumentError, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pp_offload
from pp_offload import __version__
from pp_offload._common.pictures import check_format

# Names in the package's tables, whose import needs torch.
SCHEDULES = "gpipe, 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbv, dualpipev"
DEVICES = "A100, H100, H200, GH200, B200, GB200, GB300, MI300X"

FLAGS = "print the flags with which Megatron-LM's own engine does nearly the same"
RECOMPUTE = "layers may be recomputed where the link has too much to do"


def number(kind: type[int] | type[float], least: float, most: float = inf) -> Callable[[str], Any]:
    """Make a parser of a finite number from ``least`` to ``most``."""
    expected = "an integer" if kind is int else "a finite number"
    expected += f" of at least {least}" + (f" and at most {most}" if isfinite(most) else "")

    def parse(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            if isfinite(value) and least <= value <= most:
                return value
        raise ArgumentTypeError(f"found {text}, expected {expected}")

    return parse


COUNT, AMOUNT, RATE = number(int, 1), number(float, 0, 2**20), number(float, 1e-3)

# Options of add_argument by argument name; each is the same in all commands.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "model": {"nargs": "?", "metavar": "[MODEL]", "help": "module:function, see docs/cli.md"},
    "--hf": {"help": "config.json of Transformers, or its directory, in place of MODEL"},
    "--schedule": {"default": "1f1b", "help": f"{SCHEDULES}, or a CSV file of actions"},
    "--ranks --pp": {"type": COUNT, "default": 4, "help": "devices of the pipeline"},
    "--virtual-stages": {"type": COUNT, "help": "stages per rank; the schedule's fewest if unset"},
    "--microbatches": {"type": COUNT, "default": 16, "help": "microbatches of a step"},
    "--length": {"type": COUNT, "default": 4096, "help": "tokens of a microbatch"},
    "--hardware --device": {"default": "H100", "help": f"{DEVICES}, or a file of doctor --measure"},
    "--groups": {"help": "groups of the model that may leave, with commas; all if unset"},
    "--optimizer": {"help": "ends each step: AdamW, as in torch.optim, or module:function"},
    "--fraction": {"type": number(float, 0, 1), "default": 1.0, "help": "part that leaves"},
    "--plan": {"type": Path, "help": "file of pp-offload plan, in place of a fraction"},
    "--limit": {"required": True, "help": "most bytes that a device may hold: 70GiB"},
    "--gib": {"type": AMOUNT, "help": "GiB in flight, each way; the engine chooses if unset"},
    "--host-gib": {"type": AMOUNT, "help": "GiB of host memory of a rank; all it needs if unset"},
    "--min-numel": {"type": number(int, 0), "default": 2**20, "help": "smaller tensors stay"},
    "--network-gb": {"type": RATE, "default": 50.0, "help": "GB/s from rank to rank"},
    "--for": {"choices": ["megatron"], "dest": "engine", "help": FLAGS},
    "--recompute": {"action": BooleanOptionalAction, "default": True, "help": RECOMPUTE},
    "--limits": {"type": number(int, 2), "default": 8, "help": "number of limits to plan for"},
    "--output -o": {"type": Path, "help": "file for the plan: plan.json"},
    "--png": {"type": Path, "help": "file for a picture: PNG, SVG or PDF"},
    "--trace": {"type": Path, "help": "file for a trace of the steps with offload: out.json.gz"},
    "--json": {"action": "store_true", "help": "print JSON instead of text"},
    "planned": {"type": Path, "metavar": "PLAN", "help": "plan.json, as pp-offload plan wrote it"},
    "files": {"type": Path, "nargs": "+", "metavar": "FILE...", "help": "out.rank*.json.gz"},
    "--rank": {"type": int, "action": "append", "help": "only this rank; may be given again"},
    "--step": {"type": int, "help": "step of the trace; the last if unset"},
    "--device": {"help": "device to measure, such as cuda:1; the accelerator in use if unset"},
    "--measure": {"type": Path, "help": "measure the device into a file, for --hardware"},
    "--measure-mib": {"type": COUNT, "default": 256, "help": "MiB of each timed copy"},
}

PIPELINE = (
    *("model", "--hf", "--schedule", "--ranks --pp", "--virtual-stages", "--microbatches"),
    *("--length", "--hardware --device", "--groups", "--optimizer", "--min-numel"),
)
ENGINE = (*PIPELINE, "--gib", "--host-gib", "--network-gb")


class Command(NamedTuple):
    """Help texts of a command, and its arguments."""

    summary: str
    details: str
    arguments: tuple[str, ...]


VIRTUAL = "No GPU is needed, and no time is measured."
COUNTED = f"Parameters, gradients and activations count, and with --optimizer its state. {VIRTUAL}"

COMMANDS = {
    "simulate": Command(
        "Simulate a step on devices that are not here.",
        "A step of a pipeline, without and with offload: a row for each rank. The engine runs as "
        "it is, on tensors without data and streams with clocks. The exit code is 1 where a rank "
        f"is above the limit of its plan. {VIRTUAL}",
        (*ENGINE, "--fraction", "--plan", "--trace", "--json"),
    ),
    "profile": Command(
        "List the bytes that groups save, and the times of stages.",
        "Bytes, compute and copies of each kind of group, and memory and times of each stage, of "
        "one microbatch: what is worth sending away, and what recomputation would take instead. "
        f"{VIRTUAL}",
        (*PIPELINE, "--recompute", "--json"),
    ),
    "plan": Command(
        "Choose what each rank keeps, offloads and recomputes.",
        "The shortest step found in which no device holds more than the limit. The file is for "
        f'OffloadConfig(plan="plan.json"). {COUNTED}',
        (*ENGINE, "--limit", "--recompute", "--for", "--output -o"),
    ),
    "sweep": Command(
        "Compare the time of a step over limits of memory.",
        "A plan for each of some limits, from the least that can be met to what a step needs "
        f"without offload. {COUNTED}",
        (*ENGINE, "--recompute", "--limits", "--png", "--json"),
    ),
    "trace": Command(
        "Show a traced step as a table or as a picture.",
        "The files are of one run.",
        ("files", "--png", "--rank", "--step", "--json"),
    ),
    "compare": Command(
        "Compare a plan with a traced run.",
        "A row for each rank, and below it what is worse than planned by more than 2 %, with the "
        "input of the plan that was wrong. The exit code is 0 where nothing is worse; 1 where "
        "something is, or the plan is of another model, schedule or number of microbatches.",
        ("planned", "files", "--step", "--json"),
    ),
    "doctor": Command(
        "Describe this machine and its libraries, for a bug report.",
        "Devices, versions, memory and its limits, the disk, environment variables. "
        "--measure adds rates of the device and its link, and the cost of launches and pinning: "
        "of the accelerator, or of the CPU without one, in less than a minute. The report names "
        "no user, host or path. A fact that cannot be read says why.",
        ("--json", "--measure", "--measure-mib", "--device"),
    ),
}


class Parser(ArgumentParser):
    """Parser that prints errors in the words of this command."""

    def error(self, message: str) -> NoReturn:
        text = re.sub("^argument ", "Invalid value for ", message)
        self.exit(2, f"{self.format_usage()}Try '{self.prog} -h' for help.\n\nError: {text}\n")


def parser() -> Parser:
    """Make the command line's parser. Without a command, ``command`` is None."""
    top = Parser(
        prog="pp-offload",
        usage="pp-offload [OPTIONS] COMMAND ...",
        description="Activation offload for PyTorch: what a step costs, what leaves, and what "
        "happened in a step.",
        allow_abbrev=False,
    )
    versions = f"torch {version('torch')}, Python {platform.python_version()}"
    top.add_argument("--version", action="version", version=f"pp_offload {__version__}, {versions}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        positional = [ARGUMENTS[each]["metavar"] for each in command.arguments if each[0] != "-"]
        below = commands.add_parser(
            name,
            prog=f"pp-offload {name}",
            usage=" ".join(["%(prog)s [OPTIONS]", *positional]),
            help=command.summary,
            description=f"{command.summary} {command.details}",
            allow_abbrev=False,
        )
        below.set_defaults(error=below.error)
        for names in command.arguments:
            options = ARGUMENTS[names]
            if "default" in options and "action" not in options:
                options = options | {"help": f"{options['help']} (default: %(default)s)"}
            below.add_argument(*names.split(), **options)
    return top


def wrong(option: str, problem: str) -> ArgumentError:
    """Make the error of an option as typed; ``main`` prints it without a traceback."""
    return ArgumentError(None, f"Invalid value for {option}: {problem}")


@contextmanager
def errors_of(option: str, *more_kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that this package raises inside into errors of the option. Errors of a user's
    code keep their traceback, except the kinds in ``more_kinds``.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, TypeError, *more_kinds)
    try:
        yield
    except kinds as failure:
        raised_in = Path(traceback.extract_tb(failure.__traceback__)[-1].filename)
        if isinstance(failure, more_kinds) or Path(pp_offload.__file__).parent in raised_in.parents:
            raise wrong(option, str(failure)) from failure
        raise


@contextmanager
def any_error_of(option: str, problem: str, how: str) -> Iterator[None]:
    """Turn any error inside, where no user code runs, into an error of the option."""
    try:
        yield
    except Exception as failure:
        kind = type(failure).__name__
        line = (str(failure).splitlines() or [kind])[0]
        raise wrong(option, f"{problem} ({kind}: {line}); {how}") from failure


def check_target(option: str, path: Path | None, *, is_picture: bool = False) -> None:
    """Check that a file can be written, before a long run."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise wrong(option, f"found {path}, expected a file in a directory that is there")
    if is_picture:
        with errors_of(option):
            check_format(path)


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def report(text: str, figures: object, *, as_json: bool) -> None:
    """Print text, or with ``--json`` the figures."""
    say(json.dumps(figures, indent=2) if as_json else text)
