"""What an engine has moved, and how its payloads came back."""

from __future__ import annotations

from dataclasses import dataclass

from pp_offload._transfer.listeners import Listener
from pp_offload._transfer.ticket import Ticket


@dataclass
class TransferCounters(Listener):
    """Totals since the engine was made; ``statistics.py`` says what each of them means."""

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    prefetched_reloads: int = 0
    on_demand_reloads: int = 0
    num_taken_back: int = 0
    stalled_ms: float | None = None

    def offloaded(self, label: str, nbytes: int) -> None:
        self.bytes_offloaded += nbytes

    def reload_started(self, label: str, nbytes: int) -> None:
        self.bytes_reloaded += nbytes

    def reloads_queued(self, num: int, *, is_ahead: bool) -> None:
        if is_ahead:
            self.prefetched_reloads += num
        else:
            self.on_demand_reloads += num

    def taken_back(self, ticket: Ticket) -> None:
        self.num_taken_back += 1
