"""Messages between the ranks of a pipeline: when each arrives.

messages = Messages(order, PeerLink(bytes_per_s=400e9))
messages.sends(message, backend, nbytes)        # when the work that makes it has been launched
messages.is_there(message)                      # True once it has a time
waited_s = messages.receive(message, backend)   # compute waits for it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pp_offload._common.text import GB
from pp_offload.simulate.clocks import VirtualStream
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import check_number
from pp_offload.simulate.schedules import BACKWARDS, PipelineOrder


@dataclass(frozen=True, kw_only=True)
class PeerLink:
    """Rates of messages between ranks, the same for each pair and direction.

    Raises:
        ValueError: The rate is not above 0, or the latency is below.
    """

    bytes_per_s: float = 50 * GB
    """Rate from a data sheet: 400 Gbit/s of network for each device."""

    latency_s: float = 10e-6
    """Time of a message, in addition to its bytes."""

    def __post_init__(self) -> None:
        check_number("bytes_per_s", self.bytes_per_s)
        check_number("latency_s", self.latency_s, may_be_zero=True)


class Message(NamedTuple):
    """Output or gradient that a stage makes for its neighbour."""

    is_gradient: bool
    stage: int
    """The stage that receives it."""

    microbatch: int
    sender: int
    receiver: int


class Messages:
    """All messages of a step, on a link for each pair of ranks."""

    def __init__(self, order: PipelineOrder, link: PeerLink) -> None:
        self._rank_of = order.rank_of
        self._link = link
        self._arrives_s: dict[Message, float] = {}
        self._streams: dict[tuple[int, int], VirtualStream] = {}

    def made_by(self, kind: str, stage: int, microbatch: int) -> Message | None:
        """Return the message that an action makes for a neighbour; None without a neighbour."""
        return self._between(kind, stage, stage + _step(kind), microbatch)

    def needed_by(self, kind: str, stage: int, microbatch: int) -> Message | None:
        """Return the message that an action needs from a neighbour; None without a neighbour."""
        return self._between(kind, stage - _step(kind), stage, microbatch)

    def _between(self, kind: str, maker: int, taker: int, microbatch: int) -> Message | None:
        rank_of = self._rank_of
        if maker == taker or maker not in rank_of or taker not in rank_of:
            return None
        return Message(kind in BACKWARDS, taker, microbatch, rank_of[maker], rank_of[taker])

    def is_there(self, message: Message) -> bool:
        """Whether a message was made, and so has a time."""
        return message in self._arrives_s

    def sends(self, message: Message, backend: VirtualBackend, nbytes: int) -> None:
        """Send a message, after all current work of compute and earlier messages that way."""
        if message.sender == message.receiver:
            self._arrives_s[message] = 0.0
            return
        way = message.sender, message.receiver
        if way not in self._streams:
            self._streams[way] = backend.new_stream()
        stream = self._streams[way]
        stream.wait_stream(backend.compute)
        seconds = self._link.latency_s + nbytes / self._link.bytes_per_s
        self._arrives_s[message] = stream.launch(seconds)

    def receive(self, message: Message, backend: VirtualBackend) -> float:
        """Have compute wait for a message.

        Returns:
            Time in which compute waits for the message and for nothing else.
        """
        arrives_s = self._arrives_s.pop(message)
        if message.sender == message.receiver:
            return 0.0
        compute, others_s = backend.compute, backend.compute.ready_at_s
        compute.wait_until(arrives_s)
        compute.launch(0.0)  # otherwise the work after it would count as stalled
        return max(0.0, arrives_s - max(others_s, backend.host.now_s))


def _step(kind: str) -> int:
    """Return the step from an action's stage to the stage that its message goes to."""
    return 1 if kind == "FORWARD" else -(kind in BACKWARDS)
