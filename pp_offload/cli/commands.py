"""Commands: each prints text or JSON, and returns the exit code."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan
from pp_offload._common.text import GB, GIB, UNITS, format_table, parse_size, size_cell
from pp_offload._groups.plan import OPTIONS
from pp_offload.cli.arguments import check_target, errors_of, report, say, wrong
from pp_offload.cli.doctor import doctor as doctor
from pp_offload.cli.pipelines import Pipeline, pipeline_of
from pp_offload.config import OffloadConfig
from pp_offload.errors import ConfigError
from pp_offload.plan import Chooser, RankTapes, front, record
from pp_offload.plan import profile as profile_of
from pp_offload.plan.table import draw_front, front_table, num_recomputed, profile_table, table
from pp_offload.simulate import PeerLink, PipelineStep
from pp_offload.simulate.compare import compare as run_both
from pp_offload.trace import Timeline, Trace, compare_with_plan, read
from pp_offload.trace.figures import Kind, RankStep, numbers_of_steps, rank_steps
from pp_offload.trace.picture import draw
from pp_offload.trace.timeline import COUNTERS

# Steps on virtual devices


def simulate(given: Namespace) -> int:
    """Run a step without and with offload on virtual devices."""
    check_target("--trace", given.trace)
    pipeline = pipeline_of(given)
    with errors_of("--plan"):
        config = _config(given, activation_offload_fraction=given.fraction, plan=given.plan)
        if config.offload_plan is not None:
            config.offload_plan.rank(pipeline.order.num_ranks - 1)
    model = pipeline.order, pipeline.work, pipeline.hardware
    peers = PeerLink(bytes_per_s=given.network_gb * GB)
    trace = None if given.trace is None else Trace(given.trace)
    with errors_of(pipeline.option):
        both = run_both(*model, config=config, peers=peers, trace=trace)
    text = f"{pipeline.title}\n\n{both.table(pipeline.hardware.memory_bytes)}"
    report(text, both.figures(), as_json=given.json)
    return int(bool(both.above_the_limit))


def profile(given: Namespace) -> int:
    """Print bytes and times of groups and stages."""
    pipeline = pipeline_of(given)
    config = OffloadConfig(min_offloaded_tensor_size=given.min_numel)
    figures = profile_of(_tapes(given, pipeline, config), pipeline.hardware)
    report(f"{pipeline.title}\n\n{profile_table(figures)}", asdict(figures), as_json=given.json)
    return 0


def plan(given: Namespace) -> int:
    """Make a plan for a limit."""
    check_target("--output", given.output)
    limit_bytes = parse_size(given.limit, is_rounded=True)
    if limit_bytes is None:
        expected = f"expected a number above 0 with a unit of {', '.join(UNITS)}: 70GiB"
        raise wrong("--limit", f"found {given.limit!r}, {expected}")
    pipeline, chooser = _planner(given)
    with errors_of("--limit"):
        chosen = chooser.plan(limit_bytes, made_for=pipeline.title)
        roomier = chooser.with_more_on_the_host(chosen)
    without = chooser.without_offload()
    say(f"{pipeline.title}\n\n{table(chosen, without, roomier)}")
    try:
        if given.output is not None:
            with errors_of("--output", OSError):
                chosen.save(given.output)
    finally:  # also if the file cannot be written: the search may have taken long
        if given.engine == "megatron":
            in_flight = [rank.num_in_flight for rank in without.ranks]
            say(f"\n{_megatron_text(chosen, in_flight, given.min_numel)}")
    if given.output is not None:
        say(_how_to_follow(chosen, given.output))
    return 0


def sweep(given: Namespace) -> int:
    """Make plans for several limits."""
    check_target("--png", given.png, is_picture=True)
    pipeline, chooser = _planner(given)
    with errors_of("--schedule"):
        plans = front(chooser, num=given.limits, made_for=pipeline.title)
    figures = {
        "plans": [plan.to_dict() for plan in plans.plans],
        "without offload": _figures(plans.without_offload),
        "all recomputed": plans.recomputed and _figures(plans.recomputed),
    }
    report(f"{pipeline.title}\n\n{front_table(plans)}", figures, as_json=given.json)
    if given.png is not None:
        with errors_of("--png", ImportError, OSError):
            draw_front(plans, given.png, title=pipeline.title)
    return 0


def _config(given: Namespace, **options: Any) -> OffloadConfig:
    """Make the options of the engine."""
    ahead: Any = "auto" if given.gib is None else int(given.gib * GIB)
    return OffloadConfig(
        max_in_flight_bytes=ahead,
        prefetch_bytes=ahead,
        host_budget_bytes=None if given.host_gib is None else int(given.host_gib * GIB),
        min_offloaded_tensor_size=given.min_numel,
        **options,
    )


def _planner(given: Namespace) -> tuple[Pipeline, Chooser]:
    """Make a pipeline and its planner."""
    pipeline, config = pipeline_of(given), _config(given)
    tapes, peers = _tapes(given, pipeline, config), PeerLink(bytes_per_s=given.network_gb * GB)
    return pipeline, Chooser(pipeline.order, tapes, pipeline.hardware, config=config, peers=peers)


def _tapes(given: Namespace, pipeline: Pipeline, config: OffloadConfig) -> list[RankTapes]:
    if not given.recompute:
        pipeline.work.layers = None
    with errors_of(f"{pipeline.option} or --schedule"):
        return record(pipeline.order, pipeline.work, pipeline.hardware, config)


def _how_to_follow(plan: OffloadPlan, path: Path) -> str:
    """List the options that the engine needs to follow the plan."""
    options = {name: value for name, value in plan.options.items() if name in OPTIONS}
    beside = "".join(f", {name}={value!r}" for name, value in options.items())
    text = f'\nwritten to {path}; follow it with OffloadConfig(plan="{path}"{beside})'
    if num_recomputed(*plan.ranks):
        text += "\nbefore that, for each stage of a rank: "
        text += "recompute_layers(module, plan.rank(rank).recomputed[number])"
    return text


def _figures(step: PipelineStep) -> dict[str, Any]:
    return {"seconds": step.seconds, "peak_bytes": [rank.peak_bytes for rank in step.ranks]}


# Flags of Megatron-LM

# Its engine offloads modules by kind, in all layers of all ranks. In each chunk it keeps a share of
# the groups, the last ones, and on rank r in addition r times some bytes of a step.

# Names that --offload-modules accepts: TransformerConfig.offload_modules of main.
MEGATRON_MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    *("fused_group_mlp", "gdp_qkv"),
)

MEGATRON_NOTE = """\
Its engine keeps other groups than planned, as many or fewer: leave it room below the limit."""


def _megatron_text(plan: OffloadPlan, in_flight: Sequence[int], min_numel: int) -> str:
    """Format the flags of Megatron-LM. Each rank holds ``in_flight`` microbatches at a time."""
    leaving = {group.name for rank in plan.ranks for group in _groups(rank) if not group.keeps}
    if strangers := sorted(leaving - set(MEGATRON_MODULES)):
        expected = f"expected names of Megatron's modules: {', '.join(MEGATRON_MODULES)}"
        problem = f"groups {', '.join(strangers)} leave, {expected}"
        raise wrong("--for", f"{problem}; name the groups of the model after these")
    if "attn_proj" in leaving:
        leaving.add("core_attn")  # whose output it saves: Megatron refuses it alone
    flags = []
    if leaving:
        share = max(_share(stage, leaving) for rank in plan.ranks for stage in rank.stages)
        flags += [
            "--fine-grained-activation-offloading",
            f"--offload-modules {' '.join(name for name in MEGATRON_MODULES if name in leaving)}",
            f"--min-offloaded-tensor-size {min_numel}",
            f"--activation-offload-fraction {share:g}",
            f"--delta-offload-bytes-across-pp-ranks {_delta(plan, in_flight, leaving, share)}",
        ]
    most_recomputed = max(len(names) for rank in plan.ranks for names in (*rank.recomputed, ()))
    if most_recomputed:  # the first layers of each stage: Megatron has a single number for all
        flags.append("--recompute-granularity full --recompute-method block")
        flags.append(f"--recompute-num-layers {most_recomputed}")
    if not flags:
        return "Megatron-LM needs no flags: nothing is offloaded or recomputed."
    note = [MEGATRON_NOTE] if leaving else []
    return "\n".join(["Flags of Megatron-LM:", *(f"  {flag}" for flag in flags), *note])


def _groups(rank: RankPlan) -> list[PlannedGroup]:
    return [group for stage in rank.stages for group in stage if group.nbytes]


def _share(stage: Sequence[PlannedGroup], names: set[str]) -> float:
    """Return the offloaded share of a stage's groups, rounded up: Megatron rounds the rest down."""
    keeps = [group.keeps for group in stage if group.name in names and group.nbytes]
    return ceil(1e4 * keeps.count(False) / len(keeps)) / 1e4 if keeps else 0.0


def _delta(plan: OffloadPlan, in_flight: Sequence[int], names: set[str], share: float) -> int:
    """Return the bytes that each rank keeps more than the one before, in addition to the share."""
    deltas = []
    for number, rank in enumerate(plan.ranks[1:], 1):
        groups = [group for group in _groups(rank) if group.name in names]
        stay_bytes = sum(group.nbytes for group in groups if group.keeps)
        by_share = (1 - share) * sum(group.nbytes for group in groups)
        spare_bytes = max(0.0, stay_bytes - by_share) * in_flight[number] / len(rank.stages)
        deltas.append(int(spare_bytes / number))
    return min(deltas, default=0)


# Traces

MS = 1e-3
DISK = {Kind.WRITE: "written GiB", Kind.READ: "read GiB"}

HEAD = "rank,step ms,busy,for reload,offload,disk,others,off GB/s,back GB/s".split(",")

NOTE = """\
for reload, offload, disk, others: ms in which compute waited for that; others are other ranks above
all. GB/s: while copies ran. Peaks: GiB. - is what the trace does not say."""


def trace(given: Namespace) -> int:
    """Print or draw a step of a trace."""
    with errors_of("FILE", OSError):
        timeline = read(*given.files)
    with errors_of("--step"):
        steps = rank_steps(timeline, given.step)
    step = next(iter(steps.values())).facts["step"]
    ranks = list(dict.fromkeys(given.rank or steps))
    for rank in ranks:
        if rank not in steps:
            raise wrong("--rank", f"found {rank}, expected one that has step {step}: {[*steps]}")
    shown = [steps[rank] for rank in ranks]
    if given.png is None:
        text = _table(timeline, step, shown)
    else:
        check_target("--png", given.png)
        with errors_of("--png", ImportError, OSError):
            draw(timeline, given.png, ranks=ranks, step=step)
        text = f"step {step} of ranks {', '.join(map(str, ranks))} is in {given.png}"
    report(text, {"step": step, "ranks": [rank.as_dict() for rank in shown]}, as_json=given.json)
    return 0


def compare(given: Namespace) -> int:
    """Print a plan beside a run by it."""
    with errors_of("PLAN", ConfigError, OSError):
        plan = OffloadPlan.load(given.planned)
    with errors_of("FILE", OSError):
        timeline = read(*given.files)
    with errors_of("PLAN or --step"):
        both = compare_with_plan(plan, timeline, step=given.step)
    report(f"{plan.made_for}\n\n{both.table()}", both.figures(), as_json=given.json)
    return int(not both.is_as_planned)


def _table(timeline: Timeline, step: int, ranks: Sequence[RankStep]) -> str:
    counters = [name for name in COUNTERS if any(name in rank.peak_bytes for rank in ranks)]
    disk = DISK if any(rank.times[kind] for rank in ranks for kind in DISK) else {}
    rows = [[*HEAD, *disk.values(), *(f"peak {name}" for name in counters)]]
    for rank in ranks:
        times = [rank.end_s - rank.begin_s, rank.seconds_of(Kind.OPERATORS) or None]
        times += rank.waited_s.values()
        rates = [rank.copied(kind)[1] for kind in (Kind.OFFLOAD, Kind.RELOAD)]
        sizes: list[Any] = [rank.copied(kind)[0] for kind in disk]
        sizes += [rank.peak_bytes.get(name) for name in counters]
        values = [x and x / MS for x in times] + [x and x / GB for x in rates]
        cells = ["-" if x is None else f"{x:.1f}" for x in values]
        cells += ["-" if nbytes is None else size_cell(nbytes, digits=3) for nbytes in sizes]
        rows.append([str(rank.rank), *cells])
    first, *later_steps = numbers_of_steps(timeline)
    numbers = f"steps {first} to {later_steps[-1]}" if later_steps else f"step {first}"
    lines = [f"step {step}; the trace has {numbers}", "", format_table(rows), NOTE]
    cut = [str(r.rank) for r in ranks if timeline.metadata[r.rank].get("has_captures")]
    if cut:
        lines.append(f"ranks {', '.join(cut)}: work of captured CUDA graphs is missing")
    return "\n".join(lines)
