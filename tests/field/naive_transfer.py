"""How the naive engine moves bytes; its faults of order and of host memory are here.

They are listed in :mod:`naive`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from pp_offload import OffloadStatistics
from pp_offload.backends import Backend, Event


class Stored:
    """Bytes on the host, for one or several saved tensors of a group."""

    def __init__(self, label: str, source: Tensor) -> None:
        self.label = label
        self.source: Tensor | None = source
        self.shape, self.dtype, self.nbytes = source.shape, source.dtype, source.nbytes
        self.stride = torch.empty_like(source, device="meta").stride()
        self.is_pooled = source.is_contiguous()
        self.is_used = False
        self.host: Tensor | None = None
        self.landed: Tensor | None = None
        self.offloaded: Event | None = None
        self.reloaded: Event | None = None

    @property
    def members(self) -> list[Stored]:
        """As a ticket of the engine has them."""
        return [self]


class NaiveTransfer:
    """Copies, and counts them under the names of the statistics."""

    waits_on_demand = False
    """True takes one fault away, so that others of order show."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.compute = backend.current_stream()
        self.counts: Counter[str] = Counter()
        self.in_flight: list[tuple[Tensor, Event]] = []
        self.pool: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    @property
    def copies(self) -> NaiveTransfer:
        """As the engine has them, for captures."""
        return self

    def offload(self, tickets: Sequence[Stored]) -> None:
        """Queue copies to the host; the sources are kept until they were made."""
        for one in tickets:
            source, one.source = one.source, None
            assert source is not None
            one.host = self._host_buffer(one)
            self.backend.d2h.wait_event(self.compute.record_event())
            self.backend.copy(self.backend.d2h, [one.host], [source.contiguous()], one.label)
            one.offloaded = self.backend.d2h.record_event()
            self.in_flight.append((source, one.offloaded))
            self.count(bytes_offloaded=one.nbytes, host_bytes_in_use=one.nbytes, live_tensors=1)
        self._poll()

    def _host_buffer(self, one: Stored) -> Tensor:
        free = self.pool[one.shape, one.dtype]
        if one.is_pooled and free:
            return free.pop()
        self.count(host_allocations=1, host_bytes_reserved=one.nbytes)
        return self.backend.allocate_host(one.nbytes).view(one.dtype).view(one.shape)

    def reload(self, one: Stored, *, is_ahead: bool) -> None:
        """Queue a copy to the device, and give the host buffer back."""
        assert one.host is not None and one.offloaded is not None
        device, h2d = self.backend.device, self.backend.h2d
        one.landed = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
        if is_ahead or self.waits_on_demand:
            h2d.wait_event(one.offloaded)
            h2d.wait_event(self.compute.record_event())
        self.backend.copy(h2d, [one.landed], [one.host], one.label)
        if is_ahead or self.waits_on_demand:
            one.reloaded = h2d.record_event()
        self.count(bytes_reloaded=one.nbytes, bytes_reloaded_unused=one.nbytes)
        self.count(prefetched_reloads=is_ahead, on_demand_reloads=not is_ahead)
        self._drop_host(one)

    def use(self, one: Stored) -> Tensor:
        """The tensor on the device, after a wait if it was reloaded ahead."""
        if one.landed is None:
            self.reload(one, is_ahead=False)
        assert one.landed is not None
        if one.reloaded is not None:
            self.compute.wait_event(one.reloaded)
        self.count(bytes_reloaded_unused=0 if one.is_used else -one.nbytes)
        one.is_used = True
        return one.landed

    def join(self) -> None:
        """Compute waits for all copies."""
        for side in (self.backend.d2h, self.backend.h2d):
            self.compute.wait_event(side.record_event())

    def drop(self, one: Stored) -> None:
        """Nobody will use it."""
        self._drop_host(one)
        if one.landed is not None and not one.is_used:
            one.is_used = True
            self.count(bytes_reloaded_unused=-one.nbytes)

    def _drop_host(self, one: Stored) -> None:
        host, one.host = one.host, None
        if host is None:
            return
        if one.is_pooled:
            self.pool[one.shape, one.dtype].append(host)
        self.count(host_bytes_in_use=-one.nbytes, live_tensors=-1)

    def count(self, **numbers: int) -> None:
        """Add to counters, and keep the peak."""
        self.counts.update(numbers)
        peak = max(self.counts["host_bytes_peak"], self.counts["host_bytes_in_use"])
        self.counts["host_bytes_peak"] = peak

    def _poll(self) -> None:
        """Let sources go whose copy was made."""
        self.in_flight = [(source, event) for source, event in self.in_flight if not event.query()]

    def statistics(self) -> OffloadStatistics:
        """What was counted."""
        self._poll()
        self.counts["bytes_in_flight"] = sum(source.nbytes for source, _ in self.in_flight)
        return OffloadStatistics(**{f.name: self.counts[f.name] for f in fields(OffloadStatistics)})
