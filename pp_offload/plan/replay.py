"""Ranks that are not played again where they would do what they did before.

Steps that are tried for a plan come after the same first step, and differ on few ranks. What a rank
does follows from its own plan and from when its messages come. Where those are as they were, it
sends its own as it did, and costs the same. See NOTE [ As before ].

    before = PlayedBefore(rank)                        # after its first step
    again = before.begin_step(config, messages, 0.0)   # by the plan of the config
    while again.has_more:
        again.run_what_can()
    again.ended()

NOTE [ As before ]
    A message keeps compute waiting, or it does not. If it comes before the host and compute are
    ready for it, as it did before, nothing depends on when it came. Else it has to come at the very
    same time. All is compared as it is, without a tolerance, so that the result is the same number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from pp_offload._common.offload_plan import RankPlan
from pp_offload.config import OffloadConfig
from pp_offload.plan.rank import NumberRank, Turn
from pp_offload.simulate.messages import HasClocks, Message, Messages
from pp_offload.simulate.rank import RankStep


class Received(NamedTuple):
    """When a message came, and when the rank was ready for it."""

    arrives_s: float
    ready_s: float

    def is_as(self, arrives_s: float) -> bool:
        """Whether all would be the same with this time. See NOTE [ As before ]."""
        return max(arrives_s, self.arrives_s) <= self.ready_s or arrives_s == self.arrives_s


class Play(NamedTuple):
    """A step of a rank that was played."""

    received: list[Received]
    """In the order of its actions, as is ``sent_s``."""

    sent_s: list[float]
    """When what it sent was there."""

    step: RankStep
    """What it cost."""


class Noting:
    """Messages of a rank that is played, which are noted as well.

    Args:
        messages: To and from the others.

    Attributes:
        received, sent_s: So far; see :class:`Play`.
    """

    def __init__(self, messages: Messages) -> None:
        self.received: list[Received] = []
        self.sent_s: list[float] = []
        self._messages = messages

    def is_there(self, message: Message) -> bool:
        """As the method of :class:`Messages`, like the others."""
        return self._messages.is_there(message)

    def receive(self, message: Message, backend: HasClocks) -> float:
        ready_s = max(backend.compute.ready_at_s, backend.host.now_s)
        self.received.append(Received(self._messages.arrives_s(message), ready_s))
        return self._messages.receive(message, backend)

    def sends(self, message: Message, backend: HasClocks, nbytes: int) -> bool:
        is_sent = self._messages.sends(message, backend, nbytes)
        self.sent_s.append(self._messages.arrives_s(message))
        return is_sent


class PlayedBefore:
    """What one rank did in steps that came after the same first one.

    Args:
        rank: After that. It stays as it is.
    """

    def __init__(self, rank: NumberRank) -> None:
        self._rank = rank
        self._plays: defaultdict[RankPlan | None, list[Play]] = defaultdict(list)

    def begin_step(self, config: OffloadConfig, messages: Messages, begin_s: float) -> RankAgain:
        """The step after that.

        Args:
            config: That of the first one but for its plan.
            messages: To and from the others.
            begin_s: When all ranks had ended the first one.
        """
        plan = config.offload_plan
        plays = self._plays[None if plan is None else plan.rank(self._rank.number)]

        def play(noting: Noting) -> NumberRank:
            rank = self._rank.following(config)
            rank.begin_step(noting, begin_s, is_last=True)
            return rank

        return RankAgain(self._rank.turns, messages, plays, play)


class RankAgain:
    """A rank in one step: it does as in one before, or is played.

    Args:
        turns: Its actions.
        messages: To and from the others.
        plays: Steps by the same plan. If it is played, that is added at the end.
        play: Begins to play it from the first action on.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        messages: Messages,
        plays: list[Play],
        play: Callable[[Noting], NumberRank],
    ) -> None:
        self._turns = turns
        self._messages = messages
        self._plays = plays
        self._play = play
        self._alike = list(plays)
        self._next = self._num_received = self._num_sent = 0
        self._noting = Noting(messages)
        self._rank = None if plays else play(self._noting)

    @property
    def has_more(self) -> bool:
        """Whether the step has further actions."""
        return self._next < len(self._turns) if self._rank is None else self._rank.has_more

    def run_what_can(self) -> int:
        """As many actions as have what they need; how many."""
        if self._rank is None:
            num = self._repeat()
            if self._alike:
                return num
            self._rank = self._play(self._noting)
        return self._rank.run_what_can()

    def _repeat(self) -> int:
        """As many as have what they need, and had it at the same time in an earlier step."""
        begin = self._next
        for turn in islice(self._turns, begin, None):
            if turn.needed is not None and not self._takes(turn.needed):
                break
            self._next += 1
            if turn.made is not None:
                self._messages.arrives(turn.made, self._alike[0].sent_s[self._num_sent])
                self._num_sent += 1
        return self._next - begin

    def _takes(self, message: Message) -> bool:
        """Whether a message is there, and came as in an earlier step; others are not alike."""
        if not self._messages.is_there(message):
            return False
        arrives_s, number = self._messages.arrives_s(message), self._num_received
        self._alike = [one for one in self._alike if one.received[number].is_as(arrives_s)]
        self._num_received += 1
        return bool(self._alike)

    def ended(self) -> RankStep:
        """What the step cost."""
        if self._rank is None:
            return self._alike[0].step
        step = self._rank.ended()
        self._plays.append(Play(self._noting.received, self._noting.sent_s, step))
        return step
