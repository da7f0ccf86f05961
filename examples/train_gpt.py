"""Train a byte-level GPT on a pipeline, without and with activation offload, and compare.

python examples/train_gpt.py                                  # two processes, 1F1B
python examples/train_gpt.py --schedule interleaved1f1b --virtual-stages 3
python examples/train_gpt.py --schedule zbv                   # backward in two parts
python examples/train_gpt.py --schedule order.csv             # actions of your own
python examples/train_gpt.py --tier disk --disk-dir /scratch  # to disk instead of host memory
python examples/train_gpt.py --stages 1 --device emulated     # one process, no GPU, real streams
python examples/train_gpt.py --plan auto --device-budget-mib 60   # what must leave, and no more
python examples/train_gpt.py --trace out.json.gz  # what happened when
torchrun --nproc-per-node 2 examples/train_gpt.py             # the same under torchrun
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pydoc_data.topics
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from auto_plan import shared_plan
from gpt import GPTConfig, Stage, loss_fn
from live_bytes import LiveBytes
from schedules import SCHEDULES, check_schedule, make_schedule, stage_indices
from tables import format_table
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table
from pp_offload.pipelining import attach
from pp_offload.plan import OffloadPlan
from pp_offload.trace import Trace, merge_ranks, part_of

MIB = 2**20
M_MMAP_THRESHOLD = -3  # of mallopt

BYTES = (
    "device_bytes_peak",
    "parameter_bytes",
    "offloaded_bytes",
    "host_peak_bytes",
    "disk_peak_bytes",
    "resident_peak_bytes",
)
"""Figures of a :class:`Run` that the comparison has for each rank."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stages", type=int, default=2, help="pipeline ranks, one process each")
    add("--virtual-stages", type=int, help="model chunks per rank; default 1, or 2 if it must be")
    names = ", ".join(SCHEDULES)
    add("--schedule", default="1f1b", help=f"{names}, or a CSV file of actions, a line per rank")
    add("--microbatches", type=int, default=8)
    add("--steps", type=int, default=30)
    add("--groups", default="attn,mlp", help="parts of a layer to offload, comma separated")
    add("--mark", choices=["modules", "markers"], default="modules", help="who marks the groups")
    add("--device", choices=["cpu", "cuda", "emulated"], default="cpu", help="see docs/testing.md")
    add("--min-numel", type=int, default=1024, help="smaller tensors stay on the device")
    add("--tier", choices=["host", "disk", "host+disk"], default="host", help="where they go")
    add("--host-budget-mib", type=int, help="host memory a rank may take for them")
    add("--plan", choices=["auto"], help="plan before training, for --device-budget-mib")
    limit = "limit of that plan: parameters, gradients and activations of a rank"
    add("--device-budget-mib", type=int, help=limit)
    add("--disk-dir", type=Path, help="for the disk's file; default: that of temporary files")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=128)
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--batch", type=int, default=2, help="sequences per microbatch")
    add("--text", type=Path, help="train on this file instead of Python's documentation")
    add("--json", type=Path, help="write the figures here")
    add("--trace", type=Path, help="write two steps of all ranks here, for Perfetto: out.json.gz")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="also train without")
    options = parser.parse_args()
    options.groups = [name for name in options.groups.split(",") if name]
    unknown = set(options.groups) - {"attn", "mlp", "attn_norm", "mlp_norm"}
    if unknown:
        parser.error(f"unknown groups {sorted(unknown)}; expected attn, mlp, attn_norm, mlp_norm")
    if options.mark == "markers" and set(options.groups) - {"attn", "mlp"}:
        parser.error("with --mark markers the layers mark only attn and mlp")
    check_schedule(parser, options)
    if options.device == "emulated" and options.stages != 1:
        parser.error("--device emulated needs --stages 1: nothing sends its tensors to a process")
    if (options.plan is None) is not (options.device_budget_mib is None):
        parser.error("--plan auto and --device-budget-mib go together")
    if options.plan and options.device_budget_mib < 1:
        parser.error(f"--device-budget-mib is {options.device_budget_mib}, expected at least 1")
    if options.plan and (options.tier != "host" or options.mark == "markers"):
        parser.error("--plan auto needs --tier host and --mark modules")
    if options.disk_dir and "disk" not in options.tier:
        parser.error(f"--disk-dir needs --tier disk or host+disk, not {options.tier}")
    if options.text and not options.text.is_file():
        parser.error(f"--text {options.text} is not a file")
    if options.trace and not options.trace.parent.is_dir():
        parser.error(f"--trace is {options.trace}, expected a file in a directory that is there")
    if min(options.stages, options.virtual_stages, options.microbatches, options.steps) < 1:
        parser.error("--stages, --virtual-stages, --microbatches and --steps must be at least 1")
    return options


class Bytes:
    """Random pieces of a text, the same for the same step on every rank."""

    def __init__(self, text: bytes, options: argparse.Namespace) -> None:
        if len(text) <= options.context + 1:
            needed = options.context + 2
            raise SystemExit(f"the text has {len(text)} bytes; give at least {needed}")
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.num_sequences = options.microbatches * options.batch
        self.context = options.context

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow each, (sequences, context) both."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(
            len(self.data) - self.context - 1, (self.num_sequences,), generator=generator
        )
        rows = starts[:, None] + torch.arange(self.context + 1)
        return self.data[rows[:, :-1]], self.data[rows[:, 1:]]


@dataclass
class Run:
    """What one training run on this rank came to."""

    losses: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    step_ms: float = 0.0
    device_bytes_peak: int = 0
    parameter_bytes: int = 0
    offloaded_bytes: int = 0
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    resident_peak_bytes: int = 0


def build(options: argparse.Namespace, is_marked: bool) -> tuple[Any, list[Stage]]:
    """A schedule and this rank's stages, with the same weights every time."""
    rank, num_stages = dist.get_rank(), options.stages * options.virtual_stages
    config = GPTConfig(
        num_layers=options.layers,
        width=options.width,
        context=options.context,
        groups=tuple(options.groups) if is_marked else (),
    )
    device = torch.device(options.device)
    modules, stages = [], []
    for index in stage_indices(options, rank):
        torch.manual_seed(index)
        modules.append(Stage(config, index, num_stages).to(device))
        stages.append(PipelineStage(modules[-1], index, num_stages, device))
    return make_schedule(options, stages, loss_fn), modules


def train(
    options: argparse.Namespace, data: Bytes, *, offload: bool, plan: OffloadPlan | None = None
) -> Run:
    """One run from the same seed; with ``offload`` the engine is attached."""
    schedule, modules = build(options, offload and options.mark == "markers")
    patterns = {name: f"layers.*.{name}" for name in options.groups}
    handle: Any = nullcontext()
    if offload:
        handle = attach(
            schedule,
            groups=patterns if options.mark == "modules" else None,
            config=offload_config(options, plan),
        )
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)
    run = Run()
    times = []
    forget_resident_peak()
    with handle, traced(options, offload):
        for step in progress(range(options.steps), "with offload" if offload else "without"):
            start = time.perf_counter()
            run.losses.append(forward_backward(schedule, data, step, options))
            optimizer.step()
            times.append((time.perf_counter() - start) * 1e3)
            if step + 1 < options.steps:
                optimizer.zero_grad()
        table = summary_table() if offload else ""  # collective
        if table and dist.get_rank() == 0:
            print(table, flush=True)
        run.resident_peak_bytes = resident_peak_bytes()
        # Forward and backward once more, not timed, under an observer that is too slow to leave on.
        # A plan counts gradients, which are made in a step then.
        optimizer.zero_grad(set_to_none=options.plan is not None)
        manager = PipelineOffloadManager.get_instance()
        bytes_before = manager.statistics().bytes_offloaded
        with LiveBytes(options.device) as live:
            forward_backward(schedule, data, options.steps, options)
        run.device_bytes_peak = live.peak
        statistics = manager.statistics()
        run.offloaded_bytes = statistics.bytes_offloaded - bytes_before
        run.host_peak_bytes = statistics.host_bytes_peak
        run.disk_peak_bytes = statistics.disk_bytes_peak
    run.step_ms = sorted(times)[len(times) // 2]
    run.parameter_bytes = sum(p.nbytes for m in modules for p in m.parameters())
    run.parameters = [p.detach().clone() for m in modules for p in m.parameters()]
    return run


def traced(options: argparse.Namespace, offload: bool) -> Any:
    """Records two steps, with offload: the last of those that are timed."""
    if options.trace is None or not offload:
        return nullcontext()
    return Trace(options.trace, steps=range(max(0, options.steps - 2), options.steps))


def offload_config(options: argparse.Namespace, plan: OffloadPlan | None = None) -> OffloadConfig:
    """The engine's options."""
    has_disk = "disk" in options.tier
    if options.plan:
        ahead = max(1, options.device_budget_mib * MIB // 16)  # as planned, on any machine
        return OffloadConfig(
            plan=plan,
            min_offloaded_tensor_size=options.min_numel,
            max_in_flight_bytes=ahead,
            prefetch_bytes=ahead,
        )
    return OffloadConfig(
        device_limit_bytes=None,  # all leave, also where the device has room for them
        min_offloaded_tensor_size=options.min_numel,
        tiers=tuple(options.tier.split("+")),
        disk_dir=options.disk_dir,
        host_budget_bytes=None
        if options.host_budget_mib is None
        else options.host_budget_mib * MIB,
        # Where the device is the host, what waits for the disk is memory that is not saved.
        max_in_flight_bytes=(64 if has_disk and options.device == "cpu" else 512) * MIB,
    )


def return_freed_memory() -> None:
    """Have the C library give freed tensors back at once; it keeps those below 32 MiB. On Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)


def forget_resident_peak() -> None:
    """Let the peak of this process's memory begin anew; on Linux."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def resident_peak_bytes() -> int:
    """The most memory this process had since; 0 where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def forward_backward(schedule: Any, data: Bytes, step: int, options: argparse.Namespace) -> Tensor:
    """All microbatches of a step; the mean loss, on the rank with the last stage."""
    tokens, targets = (t.to(options.device) for t in data.batch(step))
    indices = stage_indices(options, dist.get_rank())
    is_first = 0 in indices
    is_last = options.stages * options.virtual_stages - 1 in indices
    losses: list[Tensor] = []
    schedule.step(
        *([tokens] if is_first else []),
        target=targets if is_last else None,
        losses=losses if is_last else None,
        return_outputs=False,
    )
    return torch.stack(losses).mean().detach().cpu() if losses else torch.zeros(())


def progress(steps: range, label: str) -> Any:
    """A bar on rank 0, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=label, disable=dist.get_rank() != 0, mininterval=0.5)


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    """On this rank. Compared as integers: 0.0 is not -0.0, and a NaN is itself."""
    bits = [[tensor.view(torch.int32) for tensor in tensors] for tensors in (first, second)]
    return len(first) == len(second) and all(map(torch.equal, *bits))


def figures(without: Run | None, with_offload: Run, loss_rank: int) -> dict[str, Any] | None:
    """The figures of all ranks, on rank 0; None on the others. Collective."""
    runs = {"on": with_offload} | ({"off": without} if without else {})
    mine: dict[str, Any] = {suffix: asdict_numbers(run) for suffix, run in runs.items()}
    mine["equal"] = without is not None and (
        same_bits(without.losses, with_offload.losses)
        and same_bits(without.parameters, with_offload.parameters)
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() != 0:
        return None
    every: dict[str, Any] = {
        "bitwise_equal": all(rank["equal"] for rank in ranks) if without is not None else None
    }
    for suffix in runs:
        for name in ("loss_first", "loss_last"):
            every[f"{name}_{suffix}"] = ranks[loss_rank][suffix][name]
        every[f"step_ms_{suffix}"] = max(rank[suffix]["step_ms"] for rank in ranks)
        for name in BYTES:
            every[f"{name}_{suffix}"] = [rank[suffix][name] for rank in ranks]
    return every


def beside_the_plan(every: dict[str, Any], plan: OffloadPlan) -> str:
    """Planned and measured bytes, rank by rank; parameters, gradients and activations count."""
    rows = [("rank", "peak MiB planned", "measured", "sent MiB planned", "measured")]
    for number, rank in enumerate(plan.ranks):
        peak = every["device_bytes_peak_on"][number] + every["parameter_bytes_on"][number]
        sent = rank.bytes_offloaded, every["offloaded_bytes_on"][number]
        cells = (f"{nbytes / MIB:.1f}" for nbytes in (rank.peak_bytes, peak, *sent))
        rows.append((str(number), *cells))
    return f"at most {plan.limit_bytes / MIB:.0f} MiB by the plan\n\n{format_table(rows)}"


def asdict_numbers(run: Run) -> dict[str, Any]:
    """The figures of a run that are plain numbers, and its first and last loss."""
    numbers = {k: v for k, v in asdict(run).items() if not isinstance(v, list)}
    ends = {"loss_first": run.losses[0].item(), "loss_last": run.losses[-1].item()}
    return numbers | ends


def format_figures(every: dict[str, Any]) -> str:
    """The comparison, side by side."""

    def cell(name: str, form: str) -> str:
        value = every.get(name)
        if isinstance(value, list) and any(value):
            return " / ".join(f"{nbytes / MIB:.1f}" for nbytes in value)
        return form.format(value) if form and value is not None else "-"

    lines = {
        "loss, first step": ("loss_first", "{:.4f}"),
        "loss, last step": ("loss_last", "{:.4f}"),
        "step, ms (median)": ("step_ms", "{:.0f}"),
        "made in a step, on the device at its peak, MiB by rank": ("device_bytes_peak", ""),
        "offloaded per step, MiB by rank": ("offloaded_bytes", ""),
        "host memory at the peak, MiB by rank": ("host_peak_bytes", ""),
    }
    if any(every["disk_peak_bytes_on"]):
        lines["disk at the peak, MiB by rank"] = ("disk_peak_bytes", "")
        lines["resident memory at the peak, MiB by rank"] = ("resident_peak_bytes", "")
    rows = [("", "without offload", "with offload")]
    for title, (name, form) in lines.items():
        rows.append((title, cell(f"{name}_off", form), cell(f"{name}_on", form)))
    verdict = {True: "equal bit for bit", False: "DIFFERENT", None: "not compared"}
    ending = f"all losses and final parameters: {verdict[every['bitwise_equal']]}"
    return "\n".join([format_table(rows), ending])


def work(options: argparse.Namespace) -> int:
    """One rank."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
        if options.device == "emulated":
            load_emulated()
        if "disk" in options.tier:
            return_freed_memory()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    try:
        if dist.get_world_size() != options.stages:
            raise SystemExit(f"{dist.get_world_size()} processes, but --stages {options.stages}")
        text = options.text.read_bytes() if options.text else documentation()
        data = Bytes(text, options)
        plan = shared_plan(options, offload_config(options)) if options.plan else None
        without = train(options, data, offload=False) if options.compare else None
        last_stage = options.stages * options.virtual_stages - 1
        loss_rank = next(
            rank for rank in range(options.stages) if last_stage in stage_indices(options, rank)
        )
        every = figures(without, train(options, data, offload=True, plan=plan), loss_rank)
        merge_traces(options)
        if every is None:
            return 0
        print("\n" + format_figures(every), flush=True)
        if without is not None and options.device == "cpu":
            print("on a CPU the cores that compute also copy, so steps are longer", flush=True)
        if plan is not None:
            print("\n" + beside_the_plan(every, plan), flush=True)
        if options.json:
            options.json.write_text(json.dumps(every, indent=1) + "\n")
        return 1 if every["bitwise_equal"] is False else 0
    finally:
        dist.destroy_process_group()


def merge_traces(options: argparse.Namespace) -> None:
    """One file of those of all ranks. Collective: the others have written theirs."""
    if options.trace is None or dist.get_world_size() == 1:
        return
    dist.barrier()
    if dist.get_rank() == 0:
        parts = [part_of(options.trace, rank) for rank in range(dist.get_world_size())]
        merge_ranks(parts, options.trace)
        for part in parts:
            part.unlink()


def load_emulated() -> None:
    """The accelerator made of threads that the tests have, in a checkout."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import emulated

    emulated.load()


def documentation() -> bytes:
    """The text of Python's own documentation that every CPython carries."""
    return "\n".join(pydoc_data.topics.topics.values()).encode()


def launch(num_ranks: int) -> int:
    """Start this script once per rank on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | shared | {"RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(r.poll() for r in ranks):
            time.sleep(0.05)
        return max(abs(rank.poll() or 0) for rank in ranks)
    finally:  # One that failed leaves the others waiting for it.
        for process in ranks:
            process.kill()


def main() -> int:
    """A rank where a launcher says which; else launch the ranks."""
    options = parse_arguments()
    return work(options) if "RANK" in os.environ else launch(options.stages)


if __name__ == "__main__":
    sys.exit(main())
