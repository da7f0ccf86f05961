"""F22: the summary over ranks does not hang when a rank has no groups or ran other iterations."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from field_checks import Chain, make_inputs, run_moves, schedule
from processes import HANG_S

from pp_offload import (
    CpuBackend,
    OffloadConfig,
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
    context = multiprocessing.get_context("spawn")
    ranks, ends = [], []
    for rank in range(2):
        mine, theirs = context.Pipe(duplex=False)
        args = (rank, str(tmp_path / "store"), has_groups[rank], num_steps[rank], theirs)
        ranks.append(context.Process(target=run_rank, args=args, daemon=True))
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
    for rank, (summary, _) in enumerate(got):
        assert bool(summary) == (has_groups[rank] and num_steps[rank] > 0)
    assert got[0][1] == got[1][1]
    assert "core" in got[0][1]
    assert "mlp" in got[0][1]
