"""Schedules: the actions of each rank in order, without a process for each rank.

    order = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=16)
    order.actions[0]      # of rank 0: [Action("FORWARD", 0, 0), ...]
    order.rank_of[3]      # the rank of stage 3
    order = order_of("zbv", num_ranks=4, stages_per_rank=2, num_microbatches=16)

A schedule of ``torch.distributed.pipelining`` makes the lists of all ranks on every rank, and reads
only the number of its stages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from pp_offload._common.checks import brief, check_all, count_problem, near
from pp_offload._common.torch_private import schedule_of_csv
from pp_offload.pipelining import Action, actions_of

ONE_STAGE: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
LOOPED: dict[str, Any] = {
    "interleaved1f1b": pipelining.ScheduleInterleaved1F1B,
    "loopedbfs": pipelining.ScheduleLoopedBFS,
    "interleavedzerobubble": pipelining.ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, Any] = {
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
SCHEDULES = ONE_STAGE | LOOPED | V_SHAPED

SCHEDULE_KINDS = PipelineScheduleSingle, PipelineScheduleMulti

# Actions that take a gradient from the next stage, and make one for the stage before.
BACKWARDS = ("FULL_BACKWARD", "BACKWARD_INPUT")
# Actions that take time. Messages are sent when made, wherever a list has them.
KINDS = ("FORWARD", *BACKWARDS, "BACKWARD_WEIGHT", "REDUCE_GRAD")


class PipelineOrder:
    """Actions of all ranks of a schedule.

    Args:
        schedule: A class of ``torch.distributed.pipelining``, or a CSV file with a line for each
            rank, as ``_PipelineScheduleRuntime._load_csv`` reads.
        num_ranks: Number of devices.
        num_stages: Number of stages of all ranks together.
        num_microbatches: Number of microbatches in a step.

    Attributes:
        actions: Actions by rank.
        rank_of: Rank by stage.
        schedule_name: Name of the schedule's class, or of its file without folders.

    Raises:
        TypeError: ``schedule`` is neither a class nor a path.
        ValueError: The schedule does not fit these numbers of ranks, stages or microbatches.
    """

    def __init__(
        self,
        schedule: type | str | os.PathLike[str],
        *,
        num_ranks: int,
        num_stages: int,
        num_microbatches: int,
    ) -> None:
        self.num_ranks, self.num_stages = num_ranks, num_stages
        self.num_microbatches = num_microbatches
        check_all(*(count_problem(name, value, 1) for name, value in vars(self).items()))
        self._schedule, self._is_single = schedule, False
        if isinstance(schedule, type) and issubclass(schedule, SCHEDULE_KINDS):
            self.schedule_name = schedule.__name__
            self._is_single = issubclass(schedule, PipelineScheduleSingle)
        elif isinstance(schedule, str | os.PathLike):
            self.schedule_name = os.path.basename(schedule)
        else:
            raise TypeError(
                f"schedule is {brief(schedule)}, expected a class of torch.distributed.pipelining "
                "such as Schedule1F1B, or the path of a CSV file"
            )
        made = self.schedule_of(self._stand_ins())
        self.actions = [_actions(made, rank) for rank in range(num_ranks)]
        self.rank_of: dict[int, int] = {}
        for rank, actions in enumerate(self.actions):
            self.rank_of |= {action.stage_index: rank for action in actions}
        missing = sorted(set(range(num_stages)) ^ set(self.rank_of))
        if missing:
            raise ValueError(
                f"num_stages is {num_stages}, but the schedule differs from that by stages "
                f"{missing}; expected as many stages as it has"
            )

    def stages_of(self, rank: int) -> list[int]:
        """Return a rank's stages, in order."""
        return sorted(stage for stage, owner in self.rank_of.items() if owner == rank)

    def shortened(self) -> PipelineOrder:
        """Shorten the schedule to twice as many microbatches as ranks. Return this order itself if
        ranks would then hold fewer microbatches at a time.
        """
        num = 2 * self.num_ranks
        if num >= self.num_microbatches or not isinstance(self._schedule, type):
            return self
        sizes = {"num_ranks": self.num_ranks, "num_stages": self.num_stages}
        try:
            shorter = PipelineOrder(self._schedule, num_microbatches=num, **sizes)
        except ValueError:  # the schedule has no such number
            return self
        return shorter if shorter.num_in_flight() == self.num_in_flight() else self

    def num_in_flight(self) -> list[int]:
        """Return for each rank the most forwards at a time whose backward is pending."""
        change = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
        changes = [[change.get(action.kind, 0) for action in actions] for actions in self.actions]
        return [max(accumulate(each, initial=0)) for each in changes]

    def schedule_of(self, stages: Sequence[Any]) -> Any:
        """Make the schedule over the stages of one rank, or over what stands in for these."""
        how, num = self._schedule, self.num_microbatches
        try:
            if not isinstance(how, type):
                return schedule_of_csv(os.fspath(how), list(stages), num, _no_loss)
            return how(stages[0] if self._is_single else list(stages), num, loss_fn=_no_loss)
        except (AssertionError, RuntimeError, ValueError) as failure:  # the second of a line
            why = str(failure).rstrip(".") or type(failure).__name__
            raise ValueError(
                f"{self.schedule_name} is no schedule of {self.num_stages} stages and {num} "
                f"microbatches on {self.num_ranks} ranks: {why}; give another number of "
                "microbatches, ranks or stages, or another schedule"
            ) from failure

    def _stand_ins(self) -> list[Any]:
        """Make stand-ins for the stages of a rank."""
        each, rest = divmod(self.num_stages, self.num_ranks)
        if rest or not each or (self._is_single and each != 1):
            expected = "as many" if self._is_single else "a multiple"
            raise ValueError(
                f"num_stages is {self.num_stages} with {self.num_ranks} ranks, expected {expected}"
            )
        sizes = {"num_stages": self.num_stages, "group_rank": 0, "group_size": self.num_ranks}
        return [SimpleNamespace(stage_index=index, submod=None, **sizes) for index in range(each)]


def _actions(schedule: Any, rank: int) -> list[Action]:
    """List the actions of a rank that take time."""
    actions = [action for action in actions_of(schedule, rank) if action.kind in KINDS]
    if not isinstance(schedule, PipelineScheduleSingle):
        return actions
    # The list of 1F1B counts the last rank's forwards from 1; its run counts them from 0.
    numbers = iter(range(len(actions)))
    return [
        action._replace(microbatch=next(numbers)) if action.kind == "FORWARD" else action
        for action in actions
    ]


def _no_loss(*args: Any) -> None:
    """Return a loss, for a schedule that includes backwards."""


def checked_stages(schedule: str, stages_per_rank: int | None) -> int:
    """Check and return the number of stages of a rank; for None, the fewest that the schedule, a
    name of :data:`SCHEDULES` or the path of a CSV file, accepts.

    Raises:
        ValueError: The schedule does not exist, or does not accept this number.
    """
    if schedule not in SCHEDULES and not Path(schedule).is_file():
        raise ValueError(
            f"{schedule} is none of {', '.join(SCHEDULES)}, and not a file"
            f"{near(schedule, list(SCHEDULES))}"
        )
    if stages_per_rank is None:
        return 2 if schedule in LOOPED | V_SHAPED else 1
    if schedule in ONE_STAGE and stages_per_rank != 1:
        raise ValueError(f"{schedule} takes --virtual-stages 1; try interleaved1f1b")
    if schedule in V_SHAPED and stages_per_rank != 2:
        raise ValueError(f"{schedule} takes --virtual-stages 2")
    return stages_per_rank


def order_of(
    schedule: str, *, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> PipelineOrder:
    """Make the order of a schedule by name; see :class:`PipelineOrder`."""
    sizes = {"num_ranks": num_ranks, "num_stages": num_ranks * stages_per_rank}
    return PipelineOrder(
        SCHEDULES.get(schedule, schedule), num_microbatches=num_microbatches, **sizes
    )
