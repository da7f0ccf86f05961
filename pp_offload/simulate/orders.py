"""Actions of each rank of a schedule, in order, without a process for each rank.

    order = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=16)
    order.actions[0]      # of rank 0: [Action("FORWARD", 0, 0), ...]
    order.rank_of[3]      # the rank of stage 3

A schedule makes the lists of all ranks whichever rank asks, and of its stages it only reads how
many there are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from pp_offload._common.checks import check_count, said
from pp_offload._common.torch_private import schedule_of_csv
from pp_offload.pipelining import Action, actions_of

BACKWARDS = ("FULL_BACKWARD", "BACKWARD_INPUT")
"""Actions that take a gradient from the next stage, and give one to the stage before."""

KINDS = ("FORWARD", *BACKWARDS, "BACKWARD_WEIGHT", "REDUCE_GRAD")
"""Actions that take time. Messages are sent when they are made, wherever a list has them."""


class PipelineOrder:
    """Actions of all ranks of a schedule.

    Args:
        schedule: A class of ``torch.distributed.pipelining``, or a CSV file with a line for each
            rank, as ``_PipelineScheduleRuntime._load_csv`` reads.
        num_ranks: Devices.
        num_stages: Of all ranks together.
        num_microbatches: In a step.

    Attributes:
        actions: By rank.
        rank_of: By stage.

    Raises:
        TypeError: ``schedule`` is neither.
        ValueError: The schedule is not for so many ranks, stages or microbatches.
    """

    def __init__(
        self,
        schedule: type | str | os.PathLike[str],
        *,
        num_ranks: int,
        num_stages: int,
        num_microbatches: int,
    ) -> None:
        check_count("num_ranks", num_ranks, least=1)
        check_count("num_stages", num_stages, least=1)
        check_count("num_microbatches", num_microbatches, least=1)
        self.num_ranks, self.num_stages = num_ranks, num_stages
        self.num_microbatches = num_microbatches
        self._schedule = schedule
        made = self.schedule_of(self._stand_ins())
        self.actions = [_actions(made, rank) for rank in range(num_ranks)]
        self.rank_of: dict[int, int] = {}
        for rank, actions in enumerate(self.actions):
            for (kind, stage, microbatch), number in Counter(actions).items():
                self.rank_of[stage] = rank
                if number > 1:
                    raise ValueError(
                        f"rank {rank} of {schedule} has {kind} of stage {stage} and microbatch "
                        f"{microbatch} {number} times, expected each action once"
                    )
        missing = sorted(set(range(num_stages)) ^ set(self.rank_of))
        if missing:
            raise ValueError(
                f"num_stages is {num_stages}, but the schedule differs from that by stages "
                f"{missing}; expected as many stages as it has"
            )

    def stages_of(self, rank: int) -> list[int]:
        """A rank's stages, in order."""
        return sorted(stage for stage, owner in self.rank_of.items() if owner == rank)

    def shortened(self) -> PipelineOrder:
        """Shorten the schedule to twice as many microbatches as ranks. Returns this order itself if
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
        return shorter if shorter._most_held() == self._most_held() else self

    def _most_held(self) -> list[int]:
        """Count for each rank the most forwards that were without their backward."""
        most = []
        for actions in self.actions:
            steps = [
                (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
                for kind, _, _ in actions
            ]
            most.append(max(accumulate(steps)))
        return most

    @property
    def schedule_name(self) -> str:
        """Name of the schedule's class, or of its file without folders."""
        how = self._schedule
        return how.__name__ if isinstance(how, type) else os.path.basename(how)

    @property
    def _is_single(self) -> bool:
        how = self._schedule
        return isinstance(how, type) and issubclass(how, PipelineScheduleSingle)

    def schedule_of(self, stages: Sequence[Any]) -> Any:
        """Make the schedule over the stages of one rank.

        Args:
            stages: Of ``torch.distributed.pipelining``, or with the same numbers.
        """
        how, num = self._schedule, self.num_microbatches
        try:
            if isinstance(how, type) and self._is_single:
                return how(stages[0], num, loss_fn=_no_loss)
            if isinstance(how, type) and issubclass(how, PipelineScheduleMulti):
                return how(list(stages), num, loss_fn=_no_loss)
            if isinstance(how, str | os.PathLike):
                return schedule_of_csv(os.fspath(how), list(stages), num, _no_loss)
        except (AssertionError, RuntimeError, ValueError) as failure:  # the second of a line
            name = how.__name__ if isinstance(how, type) else how
            why = str(failure).rstrip(".") or type(failure).__name__
            raise ValueError(
                f"{name} is no schedule of {self.num_stages} stages and {num} microbatches on "
                f"{self.num_ranks} ranks: {why}; give another number of microbatches, ranks or "
                "stages, or another schedule"
            ) from failure
        raise TypeError(
            f"schedule is {said(how)}, expected a class of torch.distributed.pipelining such as "
            "Schedule1F1B, or the path of a CSV file"
        )

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
    # The list of 1F1B has the last rank count forwards from 1; when it runs, it counts from 0.
    numbers = iter(range(len(actions)))
    return [
        action._replace(microbatch=next(numbers)) if action.kind == "FORWARD" else action
        for action in actions
    ]


def _no_loss(*args: Any) -> None:
    """Return a loss, for a schedule that includes backwards."""
