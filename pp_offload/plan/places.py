"""What a rank has off its device, over all its steps: the engine's own allocator, over memory
without bytes.

    places = Places(config, hardware)
    places.compact()
    tiers = places.tiers(copies, begin_s=0.0)   # of a step, which begins then
    places.peak_bytes
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import Tensor

from pp_offload._memory.budget import UNLIMITED, HostBudget, as_another_process
from pp_offload._memory.host import HostMemory
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.tiers import STAGING_SHARE
from pp_offload.config import OffloadConfig
from pp_offload.plan.copies import Copies
from pp_offload.plan.disk import NumberFile, disk_tier
from pp_offload.plan.host import HostTier, NumberTier
from pp_offload.simulate.hardware import Hardware


class Places:
    """Host memory and disk of one rank.

    Args:
        config: Says which, and how much; without a limit it has as much as it needs.
        hardware: Has the disk's rates.
    """

    def __init__(self, config: OffloadConfig, hardware: Hardware) -> None:
        self._config = config
        self._budgets = budgets_of(config)
        at_rest, whole = self._budgets
        self._memories = {
            name: HostMemory(_no_bytes, whole, may_split=False)
            if name == "disk"
            else HostMemory(_no_bytes, at_rest)
            for name in config.tiers
        }
        """By tier; that of a disk is what bytes pass through."""

        self._file = NumberFile(hardware)

    def tiers(self, copies: Copies, begin_s: float) -> list[NumberTier]:
        """Those of a step.

        Args:
            copies: Of the step.
            begin_s: When it begins, by the clock of the one before.
        """
        self._file.begin_step(copies.device.host, begin_s)
        return [
            disk_tier(copies, self._file, memory) if name == "disk" else HostTier(copies, memory)
            for name, memory in self._memories.items()
        ]

    def compact(self) -> None:
        """Between steps; see :meth:`HostMemory.compact`. All that nobody has is free then."""
        for memory in self._memories.values():
            when_finished(nullcontext(), memory.compact)
            memory.bytes_in_use()  # as for a rank whose statistics are asked for

    def copied(self) -> Places:
        """Others in the same state. To be called between steps, when nobody has anything."""
        other = copy.copy(self)
        other._budgets = budgets_of(self._config)
        memo = {id(one): new for one, new in zip(self._budgets, other._budgets, strict=True)}
        what = self._memories, self._file  # together, for buffers know work that is queued
        other._memories, other._file = copy.deepcopy(what, memo)
        for memory in other._memories.values():
            memory.count_in(memory.source.budget)
        return other

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at a time, at rest and on the way to the disk."""
        return sum(memory.statistics().peak for memory in self._memories.values())


def budgets_of(config: OffloadConfig) -> tuple[HostBudget, HostBudget]:
    """For bytes at rest, and for all of them, as ``make_engine`` has it."""
    limit_bytes = config.host_budget_bytes
    with as_another_process():  # whose budget is not this one's
        whole = HostBudget(UNLIMITED if limit_bytes is None else limit_bytes)
    return whole.but_for(STAGING_SHARE) if "disk" in config.tiers else whole, whole


def _no_bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")
