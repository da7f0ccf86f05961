"""Prediction of a step of all ranks of a schedule, in numbers.

step = predict(order, tapes, DEVICES["H100"], config=OffloadConfig())
"""

from __future__ import annotations

from collections.abc import Sequence

from pp_offload._common.checks import check_count, check_kind
from pp_offload._common.garbage import collector_off
from pp_offload.config import OffloadConfig, check_config
from pp_offload.plan.rank import number_rank
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import Messages, PeerLink
from pp_offload.simulate.rank import PipelineStep, run_step
from pp_offload.simulate.schedules import PipelineOrder


def predict(
    order: PipelineOrder,
    tapes: Sequence[RankTapes],
    hardware: Hardware,
    *,
    config: OffloadConfig | None = None,
    peers: PeerLink | None = None,
    num_steps: int = 2,
) -> PipelineStep:
    """Predict the result of :func:`pp_offload.simulate.run_pipeline`, to the byte and far sooner.

    Args:
        order: Actions of each rank.
        tapes: Work of each rank; see :func:`record`.
        hardware: Device of each rank. Times of operators are in the tapes.
        config: Options of each rank's engine; None for no offload. Only ``max_in_flight_bytes``,
            ``prefetch_bytes``, ``host_budget_bytes``,
            ``activation_offload_fraction``, ``delta_offload_bytes_across_pp_ranks`` and
            ``split_backward`` are used, and ``tiers`` of host and disk; the tapes name the tensors
            that may leave. A limit of ``"auto"`` counts as none. Each rank may take
            ``host_budget_bytes`` of host memory, without a limit if that is None.
        peers: How messages pass from rank to rank; the default is a network.
        num_steps: Number of steps; the engine derives its plan and bounds from the first ones.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A rank or stage has no tape, or the config has an integer
            ``device_limit_bytes`` or a tier other than host and disk.
    """
    return predict_each(order, tapes, hardware, config, peers, num_steps)[-1]


def predict_each(
    order: PipelineOrder,
    tapes: Sequence[RankTapes],
    hardware: Hardware,
    config: OffloadConfig | None,
    peers: PeerLink | None,
    num_steps: int,
    *,
    has_state: bool = False,
) -> list[PipelineStep]:
    """Predict each of the steps; see :func:`predict`. With ``has_state`` optimizers have their
    state at the begin.
    """
    check_count("num_steps", num_steps, least=1)
    check_kind("order", order, PipelineOrder, "a PipelineOrder")
    check_kind("hardware", hardware, Hardware, "a Hardware", 'write DEVICES["H100"]')
    if config is not None:
        check_config(config)
        _check_options(config)
    _check_tapes(order, tapes)
    messages = Messages(order, peers or PeerLink())
    with collector_off():  # the collector would search all ranks' objects again and again
        ranks = [
            number_rank(order, number, rank_tapes, hardware, config, messages, has_state=has_state)
            for number, rank_tapes in enumerate(tapes)
        ]
        steps = []
        for _ in range(num_steps):
            for _ in run_step(ranks):
                continue
            steps.append(PipelineStep([rank.ended() for rank in ranks]))
        del ranks  # or the collector would search them now
    return steps


def _check_options(config: OffloadConfig) -> None:
    if isinstance(config.limit, int):
        raise ValueError(
            "device_limit_bytes is given, which an engine meets by measuring its device; expected "
            "a plan of choose(), or no limit; measure the cost of a limit with run_pipeline"
        )
    if not {"host", "disk"}.issuperset(config.tiers):
        raise ValueError(
            f"tiers is {config.tiers}, expected host, disk, or both; measure the cost of other "
            "tiers with run_pipeline"
        )


def _check_tapes(order: PipelineOrder, tapes: Sequence[RankTapes]) -> None:
    stages = [sorted(rank.stages) for rank in tapes]
    expected = [order.stages_of(rank) for rank in range(order.num_ranks)]
    if stages != expected:
        raise ValueError(
            f"the tapes are of stages {stages}, rank by rank, expected {expected}; record() them "
            "with the same order"
        )


def check_smallest(tapes: Sequence[RankTapes], config: OffloadConfig) -> None:
    """Check that tapes were recorded with the smallest tensor of the config."""
    name = "min_offloaded_tensor_size"
    expected = config.min_offloaded_tensor_size
    for rank_tapes in tapes:
        recorded = rank_tapes.min_offloaded_tensor_size
        if recorded not in (None, expected):
            raise ValueError(
                f"the tapes were recorded with {name} {recorded}, and the config beside them has "
                f"{expected}, expected the same; give record() and choose() one config"
            )
