"""F22: the summary over ranks does not hang when a rank has no groups or ran other iterations."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from field_checks import Chain, make_inputs, run_moves, schedule
from processes import HANG_S

import pp_offload.summary as summary
from pp_offload import (
    CpuBackend,
    OffloadConfig,
    OffloadError,
    print_offload_summary_table,
    summary_table,
    use_backend,
)

pytestmark = pytest.mark.field("F22")


def run_rank(rank: int, store: str, has_groups: bool, num_steps: int, result: Connection) -> None:
    """One rank: its steps, then both tables."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(CpuBackend(), config=config) as manager:
        model = Chain(("core", "mlp"), 2, is_on=has_groups)
        for step in range(num_steps):
            run_moves([model], make_inputs(3, step=step), schedule(3, 2), True)
            manager.reset()
        print_offload_summary_table(manager.offload_summary_bytes)
        result.send((manager.offload_summary_bytes, summary_table()))
    dist.destroy_process_group()


def run_both(run: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What two processes send, each by its last argument."""
    context = multiprocessing.get_context("spawn")
    ranks, ends = [], []
    for rank, given in enumerate(arguments):
        mine, theirs = context.Pipe(duplex=False)
        ranks.append(context.Process(target=run, args=(rank, *given, theirs), daemon=True))
        ends.append(mine)
    try:
        for process in ranks:
            process.start()
        got = []
        for rank, end in enumerate(ends):
            assert end.poll(HANG_S), f"rank {rank} hangs"
            got.append(end.recv())
        for process in ranks:
            process.join(HANG_S)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return got


@pytest.mark.parametrize(
    ("has_groups", "num_steps"),
    [
        pytest.param((True, False), (2, 1), id="a rank without groups"),
        pytest.param((True, True), (3, 0), id="other iterations", marks=pytest.mark.slow),
    ],
)
def test_summary_does_not_hang(
    has_groups: tuple[bool, bool], num_steps: tuple[int, int], tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    got = run_both(run_rank, [(store, *each) for each in zip(has_groups, num_steps, strict=True)])
    for rank, (nbytes, _) in enumerate(got):
        assert bool(nbytes) == (has_groups[rank] and num_steps[rank] > 0)
    assert got[0][1] == got[1][1]
    assert "core" in got[0][1]
    assert "mlp" in got[0][1]


def run_alone(rank: int, store: str, num_steps: int, result: Connection) -> None:
    """``if rank == 0: print(summary_table())``, and then, late, the other one, too."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    summary.WARN_S, summary.PATIENCE_S = 0.2, 0.5
    with use_backend(CpuBackend()):
        texts = []
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["given up"])
        try:
            summary_table()
        except OffloadError as failure:
            texts.append(str(failure))
        if rank == 0:
            dist.distributed_c10d._get_default_store().set("given up", "")
        summary.PATIENCE_S = HANG_S
        texts.append(summary_table())  # both are here now
        result.send(texts)
    dist.destroy_process_group()


@pytest.mark.field("F68")
def test_ranks_that_are_missing_are_named(tmp_path: Path) -> None:
    first, second = run_both(run_alone, [(str(tmp_path / "store"), 1)] * 2)
    assert "asked for on rank 0, and ranks [1] did not ask for it" in first[0]
    assert "summary_table(local=True)" in first[0]
    assert "on rank 1, and another rank has given up waiting for this one" in second[0]
    assert first[1] == second[1] and "total MiB" in first[1]
