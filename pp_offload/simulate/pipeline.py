"""Run of all ranks of a pipeline in one process, each on a virtual device of its own.

order = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=16)
work = Modules(stages, example=tokens, loss_fn=loss_fn)
step = run_pipeline(order, work, DEVICES["H100"], config=OffloadConfig())
step.seconds, step.ranks[0].peak_bytes, step.ranks[1].waits_most_for
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from pp_offload._common.checks import check_count, check_kind
from pp_offload._common.processes import collector_off
from pp_offload._megatron.manager import PipelineOffloadManager, use_manager
from pp_offload._memory.budget import UNLIMITED, as_another_process
from pp_offload.config import OffloadConfig, check_config
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import Messages, PeerLink
from pp_offload.simulate.rank import PipelineStep, VirtualRank, run_step
from pp_offload.simulate.schedules import PipelineOrder
from pp_offload.simulate.stages import RankWork, Work


def run_pipeline(
    order: PipelineOrder,
    work: Work,
    hardware: Hardware,
    *,
    config: OffloadConfig | None = None,
    peers: PeerLink | None = None,
    num_steps: int = 2,
    trace: Any = None,
) -> PipelineStep:
    """Run some steps, and return the cost of the last one.

    All ranks begin a step at the same time, when all have ended the step before.

    Args:
        order: The actions of each rank.
        work: Runs the actions.
        hardware: Figures of each rank's device.
        config: Options of each rank's engine; None for no offload. Each rank may use
            ``host_budget_bytes`` of host memory, or unlimited host memory if that is None.
        peers: The link between ranks; the default is a network.
        num_steps: Number of steps. The engine derives its plan from the first one.
        trace: A :class:`pp_offload.trace.Trace`, which records all ranks into one file.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: The order and the work do not have the same number of stages, or there is no
            step.
    """
    check_count("num_steps", num_steps, least=1)
    check_kind("order", order, PipelineOrder, "a PipelineOrder")
    if config is not None:
        check_config(config)
    with ExitStack() as stack:
        if config is not None and config.offload_plan is not None:
            names = {
                stage: layers
                for number, rank in enumerate(config.offload_plan.ranks)
                for stage, layers in zip(order.stages_of(number), rank.recomputed, strict=False)
            }
            stack.enter_context(work.recomputing(names))
        work.prepare(order, VirtualBackend(hardware))
        messages = Messages(order, peers or PeerLink())
        ranks = []
        for number in range(order.num_ranks):
            backend = VirtualBackend(hardware)
            running = running_rank(order, work, number, backend, config or OffloadConfig())
            manager, rank_work = stack.enter_context(running)
            if config is None:
                manager.disable_offload()
            ranks.append(VirtualRank(order, number, manager, backend, rank_work, messages))
        if trace is not None:
            stack.enter_context(trace.ranks([rank.manager for rank in ranks]))
        for _ in range(num_steps):
            gc.collect()
            with collector_off():  # otherwise a peak would depend on its timing
                run_step(ranks, lambda rank: use_manager(rank.manager))
        return PipelineStep([rank.ended() for rank in ranks])


@contextmanager
def running_rank(
    order: PipelineOrder, work: Work, number: int, backend: VirtualBackend, config: OffloadConfig
) -> Iterator[tuple[PipelineOffloadManager, RankWork]]:
    """Make the manager and the work of a rank, with host memory of its own."""
    if config.host_budget_bytes is None:  # the memory of this machine does not matter
        config = replace(config, host_budget_bytes=UNLIMITED)
    with as_another_process():
        manager = PipelineOffloadManager(config=config, backend=backend)
    try:
        with use_manager(manager):
            rank_work = work.on(order, number, backend)
        try:
            yield manager, rank_work
        finally:
            rank_work.close()
    finally:
        manager.retire()
