"""All ranks in one file: real ones, which write one each, and those of virtual pipelines."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from test_pipeline import EVEN, INSTANT, order
from test_trace_file import check_schema
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from trace_worker import NUM_MICROBATCHES

from pp_offload import OffloadConfig
from pp_offload.simulate import DEVICES, Modules, PeerLink, Times, run_pipeline
from pp_offload.trace import Timeline, Trace, merge_ranks, part_of, read, write
from pp_offload.trace.timeline import WAITS_FOR_OTHERS as OTHER_WORK

ROOT = Path(__file__).parents[2]


def run_ranks(num: int, out: Path) -> None:
    """Processes on this machine, which send to each other through its loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num),
    }
    command = [sys.executable, str(Path(__file__).with_name("trace_worker.py")), str(out)]
    files = [out.with_name(f"{rank}.out") for rank in range(num)]
    ranks = [
        processes.start(command, env | {"RANK": str(rank)}, file, file.with_suffix(".err"))
        for rank, file in enumerate(files)
    ]
    assert processes.watch(ranks, files)
    said = [file.with_suffix(".err").read_text() for file in files]
    assert not any(rank.returncode for rank in ranks), said


def test_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    before_ns = time.time_ns()
    run_ranks(2, out)
    after_ns = time.time_ns()
    parts = [part_of(out, rank) for rank in range(2)]
    assert not out.exists() and all(part.exists() for part in parts)
    whole = merge_ranks(parts, out)
    kinds = check_schema(out, 2)
    assert kinds["X"] == len(whole.spans) and kinds["f"] == len(whole.flows) > 0
    assert whole.ranks == [0, 1] and read(out).metadata == whole.metadata
    assert before_ns <= whole.base_ns, "the wall clock's time"
    assert whole.base_ns / 1e9 + max(one.end_s for one in whole.spans) <= after_ns / 1e9 + 1e-3
    for rank in range(2):
        check_rank(whole, rank)
        alone = read(parts[rank])
        assert len(alone.spans) == len([one for one in whole.spans if one.rank == rank])
    check_order(whole)


def check_rank(whole: Timeline, rank: int) -> None:
    known = whole.metadata[rank]
    assert known["steps"] == [1, 2] and known["num_ranks"] == 2 and known["clock"] == "host"
    assert [one.name for one in whole.of(rank, "steps")] == ["step 1", "step 2"]
    names = Counter(one.name for one in whole.of(rank, "compute"))
    assert names["mlp (forward)"] == names["mlp (backward)"] == 2 * 3 * NUM_MICROBATCHES
    assert whole.of(rank, "d2h") and whole.of(rank, "h2d")


def check_order(whole: Timeline) -> None:
    """A microbatch goes through the ranks in order, and back: their clocks are one."""

    def spans(rank: int, what: str, microbatch: int) -> list[Any]:
        return [
            one
            for one in whole.of(rank, "compute")
            if one.name == f"mlp ({what})" and one.args["microbatch"] == microbatch
        ]

    for microbatch in range(NUM_MICROBATCHES):
        for step in range(2):
            first = spans(0, "forward", microbatch)[3 * step : 3 * step + 3]
            then = spans(1, "forward", microbatch)[3 * step : 3 * step + 3]
            back = spans(0, "backward", microbatch)[3 * step : 3 * step + 3]
            assert first[-1].end_s <= then[0].begin_s
            assert then[-1].end_s <= back[0].begin_s


def test_of_some_ranks_there_is_no_whole(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    for rank, path in enumerate(paths):
        write(Timeline(5 + rank, metadata={rank: {"num_ranks": 3}}), path)
    assert merge_ranks(paths, tmp_path / "out.json").base_ns == 5
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] of runs of \[3\] ranks"):
        merge_ranks([paths[0], paths[2]], tmp_path / "out.json")
    with pytest.raises(ValueError, match="rank 1 is in two of the traces"):
        merge_ranks([*paths, paths[1]], tmp_path / "out.json")
    with pytest.raises(ValueError, match="no trace to merge"):
        merge_ranks([], tmp_path / "out.json")
    write(Timeline(9, metadata={1: {"num_ranks": 2}}), paths[1])
    with pytest.raises(ValueError, match=r"of runs of \[2, 3\] ranks"):
        merge_ranks(paths, tmp_path / "out.json")


WIDTH = 1024


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(x)


def modules(num_stages: int) -> Modules:
    with torch.device("meta"):
        stages = [nn.Sequential(Layer(), Layer(), Layer()) for _ in range(num_stages)]
        example = torch.empty(2048, WIDTH)
    return Modules(
        stages, example=example, loss_fn=lambda y: y.square().mean(), groups={"mlp": "*.mlp"}
    )


def test_four_virtual_ranks(tmp_path: Path) -> None:
    """On one time, and what a run says of its last step is what the spans of it add up to."""
    out = tmp_path / "out.json.gz"
    made = order(Schedule1F1B, 4, 4, 6)
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=2**23)
    slow = replace(DEVICES["H100"], link_bytes_per_s=2e10)
    trace = Trace(out, steps=range(1, 2))
    step = run_pipeline(
        made, modules(4), slow, config=config, peers=PeerLink(latency_s=2e-4), trace=trace
    )
    timeline = trace.timeline
    assert timeline is not None and timeline.ranks == [0, 1, 2, 3] and timeline.base_ns == 0
    kinds = check_schema(out, 4)
    assert kinds["X"] == len(timeline.spans) and kinds["f"] > 0
    begins = {timeline.of(rank, "steps")[0].begin_s for rank in timeline.ranks}
    assert len(begins) == 1, "all ranks begin a step at the same time"
    ends = [timeline.of(rank, "steps")[0].end_s for rank in timeline.ranks]
    assert max(ends) - begins.pop() == pytest.approx(step.seconds, rel=1e-9)
    for rank, told in enumerate(step.ranks):
        compute = timeline.of(rank, "compute")
        waits = Counter[str]()
        for one in compute:
            if one.name.startswith("waits for"):
                waits[one.name] += one.end_s - one.begin_s  # type: ignore[assignment]
        others_s = waits.pop(OTHER_WORK, 0.0)
        assert told.stalled_s == pytest.approx(sum(waits.values()), rel=1e-9, abs=1e-12)
        assert sum(told.waited_s.values()) == pytest.approx(others_s, rel=1e-9, abs=1e-12)
        busy_s = sum(one.end_s - one.begin_s for one in timeline.of(rank, "operators"))
        assert told.busy_s == pytest.approx(busy_s, rel=1e-9)
        sent = sum(one.args["bytes"] for one in timeline.of(rank, "d2h"))
        assert told.bytes_offloaded == sent > 0
        device = timeline.counter(rank, "device")
        assert max(one.nbytes for one in device) <= told.peak_bytes
    assert sum(told.stalled_s for told in step.ranks) > 0
    assert sum(sum(told.waited_s.values()) for told in step.ranks) > 0


def test_a_trace_changes_no_virtual_step(tmp_path: Path) -> None:
    made, config = order(Schedule1F1B, 2, 2, 4), OffloadConfig(min_offloaded_tensor_size=1)
    with_trace, without = (
        run_pipeline(made, modules(2), DEVICES["H100"], config=config, num_steps=3, trace=trace)
        for trace in (Trace(tmp_path / "out.json", steps=range(1, 2)), None)
    )
    assert with_trace == without


def test_stages_without_modules_have_operators_alone(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "out.json")
    times = Times(forward_s=1.0, input_s=1.0, weight_s=1.0)
    made = order(Schedule1F1B, 2, 2, 2)
    step = run_pipeline(made, times, EVEN, peers=INSTANT, num_steps=1, trace=trace)
    assert trace.timeline is not None
    for rank, told in enumerate(step.ranks):
        spans = trace.timeline.of(rank, "operators")
        assert sum(one.end_s - one.begin_s for one in spans) == pytest.approx(told.busy_s)
