"""The options that say which pipeline a command is about, and the pipeline they say.

@on_pipeline
def profile(made: MakePipeline, recompute: RecomputeOption = True) -> None:
    pipeline = made()  # of --schedule, --ranks and the others, which are before its own
    pipeline.order, pipeline.work, pipeline.hardware
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pp_offload._common.checks import near
from pp_offload.cli.models import from_function, from_hugging_face, optimizer_of, with_groups
from pp_offload.cli.wrong import told, wrong
from pp_offload.config import OffloadConfig
from pp_offload.plan import Chooser, record
from pp_offload.simulate import DEVICES, Hardware, Modules, PeerLink, PipelineOrder
from pp_offload.simulate.schedules import SCHEDULES, checked_stages, order_of
from pp_offload.simulate.stages import OptimizerError

GIB, GB = 2**30, 10**9

MIN_NUMEL = OffloadConfig().min_offloaded_tensor_size

GibOption = Annotated[
    float | None,
    typer.Option(min=0, help="May be on its way, each way; the engine chooses if not given."),
]
HostGibOption = Annotated[
    float | None, typer.Option(min=0, help="Host memory of a rank; what it needs if not given.")
]
TiersOption = Annotated[
    str, typer.Option(help="Where groups go: host, disk, or host,disk, the disk when it is full.")
]
MinNumelOption = Annotated[int, typer.Option(min=0, help="Tensors of fewer elements stay.")]
RecomputeOption = Annotated[
    bool, typer.Option(help="Layers may be recomputed, where the link has too much to do.")
]
NetworkOption = Annotated[float, typer.Option(help="GB/s from rank to rank.")]


@dataclass(frozen=True)
class Pipeline:
    """What a command is about."""

    order: PipelineOrder
    work: Modules
    hardware: Hardware

    title: str
    """In words."""

    option: str
    """Which has said where its stages are from."""

    option_of_optimizer: str
    """Which has said what ends a step; empty if none has."""

    @contextmanager
    def told(self, or_else: str = "") -> Iterator[None]:
        """An error about the model or its optimizer, inside, is one of what has given it.

        Args:
            or_else: Other options that it may be of.
        """
        both = f"{self.option} or {or_else}" if or_else else self.option
        with told(both):
            try:
                yield
            except OptimizerError as failure:
                raise wrong(self.option_of_optimizer or both, str(failure)) from failure


def pipeline_of(
    model: Annotated[
        str | None,
        typer.Argument(help="module:function, which returns the stages; docs/cli.md has one."),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(help="In its place a config.json of Transformers, or its directory."),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help=f"{', '.join(SCHEDULES)}, or a CSV file of actions.")
    ] = "1f1b",
    ranks: Annotated[
        int, typer.Option("--pp", "--ranks", min=1, help="Devices of the pipeline.")
    ] = 4,
    virtual_stages: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stages per rank; the least that the schedule takes if not given."
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a microbatch.")] = 4096,
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware",
            "--device",
            help=f"{', '.join(DEVICES)}, or a file of pp-offload doctor --measure.",
        ),
    ] = "H100",
    groups: Annotated[
        str | None, typer.Option(help="Which of the model's groups leave, with commas; all if not.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="It ends each step: AdamW, as in torch.optim, or module:function."),
    ] = None,
) -> Pipeline:
    """The pipeline of these options, which are those of each command about one.

    Raises:
        typer.BadParameter: There is none.
    """
    if (model is None) == (hf is None):
        given = "neither" if model is None else "both"
        raise wrong("MODEL", f"found {given} of module:function and --hf, expected one of the two")
    device = hardware_of(hardware)
    with told("--schedule"):
        num_stages = checked_stages(schedule, virtual_stages)
        order = order_of(
            schedule,
            num_ranks=ranks,
            stages_per_rank=num_stages,
            num_microbatches=microbatches,
        )
    option = "MODEL" if hf is None else "--hf"
    sizes = {"num_stages": ranks * num_stages, "length": length}
    if hf is not None:
        work = from_hugging_face(hf, **sizes)
    else:
        assert model is not None
        work = from_function(model, **sizes)
    work = with_groups(work, groups)
    if optimizer is not None:
        work.optimizer = optimizer_of(optimizer)
    names = "groups that the model marks" if work.groups is None else " and ".join(work.groups)
    title = (
        f"{model or hf} on {ranks} virtual {device.name}, {schedule}, {num_stages} "
        f"stage{'s' * (num_stages > 1)} each, {microbatches} microbatches of {length} tokens; "
        f"{names} may leave"
    )
    if optimizer is not None:
        title += f"; {optimizer} ends a step"
    return Pipeline(order, work, device, title, option, "--optimizer" * bool(optimizer))


def hardware_of(given: str) -> Hardware:
    """A device of the table, or of a file.

    Raises:
        typer.BadParameter: There is none.
    """
    by_name = {name.lower(): hardware for name, hardware in DEVICES.items()}
    if given.lower() in by_name:
        return by_name[given.lower()]
    if Path(given).is_file():
        with told("--hardware", OSError):
            return Hardware.from_file(given)
    raise wrong(
        "--hardware",
        f"found {given!r}{near(given, list(DEVICES))}, expected one of {', '.join(DEVICES)}, or a "
        "file that pp-offload doctor --measure has written",
    )


MakePipeline = Callable[[], Pipeline]
"""Makes it, which may take a while, so other options are checked before."""


def on_pipeline(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of :func:`pipeline_of` in place of its first parameter, which is a
    :data:`MakePipeline` of them.
    """
    shared = signature(pipeline_of, eval_str=True).parameters
    _, *own = signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def called(**given: Any) -> None:
        made = partial(pipeline_of, **{name: given.pop(name) for name in shared})
        command(made, **given)

    # By name alone, for those without a default may come behind others.
    named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*shared.values(), *own)]
    called.__signature__ = Signature(named)  # type: ignore[attr-defined]
    return called


def peers_of(network_gb: float) -> PeerLink:
    """What messages between ranks go over.

    Raises:
        typer.BadParameter: The number is none above 0.
    """
    check_finite("--network-gb", network_gb)
    if network_gb <= 0:
        raise wrong("--network-gb", f"found {network_gb:g}, expected a number above 0")
    return PeerLink(bytes_per_s=network_gb * GB)


def config_of(
    min_numel: int, *, gib: float | None = None, host_gib: float | None = None, tiers: str = "host"
) -> OffloadConfig:
    """The options of the engine beside a plan.

    Raises:
        typer.BadParameter: One of them cannot be.
    """
    check_finite("--gib", gib)
    check_finite("--host-gib", host_gib)
    ahead: Any = "auto" if gib is None else int(gib * GIB)
    with told("--tiers"):
        return OffloadConfig(
            max_in_flight_bytes=ahead,
            prefetch_bytes=ahead,
            host_budget_bytes=None if host_gib is None else int(host_gib * GIB),
            min_offloaded_tensor_size=min_numel,
            tiers=tuple(part.strip() for part in tiers.split(",")),
        )


def check_finite(option: str, number: float | None) -> None:
    """Check a number that may be left out.

    Raises:
        typer.BadParameter: It is infinite, or none.
    """
    if number is not None and not isfinite(number):
        raise wrong(option, f"found {number}, expected a finite number")


@contextmanager
def chooser_of(
    pipeline: Pipeline, config: OffloadConfig, peers: PeerLink, *, recompute: bool
) -> Iterator[Chooser]:
    """What makes plans for a pipeline, with a bar for as long as it is at work.

    Args:
        pipeline: What is planned.
        config: The options beside the plan.
        peers: What messages go over.
        recompute: Whether layers may be recomputed.

    Raises:
        typer.BadParameter: The model or the schedule cannot be planned for.
    """
    if not recompute:
        pipeline.work.layers = None
    order, hardware = pipeline.order, pipeline.hardware
    with progress_bar() as bar:
        say = None if bar is None else bar("steps predicted")
        with pipeline.told("--schedule"):
            chooser = Chooser(
                order,
                record(order, pipeline.work, hardware, config),
                hardware,
                config=config,
                peers=peers,
                progress=None if say is None else lambda num: say(num, None),
            )
        with told("--schedule"):
            yield chooser


Told = Callable[[int, int | None], None]
"""Told how much is done, and of how much if that is known."""


@contextmanager
def progress_bar() -> Iterator[Callable[[str], Told] | None]:
    """Gives what shows how far a part of the work is, by its name; None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def shown(name: str) -> Told:
            task = progress.add_task(name, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield shown
