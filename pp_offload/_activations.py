"""Stash of saved tensors of forwards without marked groups: gathered, then offloaded together.

Saved tensors join the open group. :meth:`ActivationStash.send` offloads it, as does reaching
``max_tensors``. Groups are reloaded in reverse order, ahead of their backward.

    stash.begin()                # the forward of a microbatch
    packed = stash.pack(tensor)  # as a pack hook
    stash.send()                 # offloads the gathered tensors
    packed.unpack()
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from pp_offload._common.processes import HERE, logger_of, warn_once
from pp_offload._common.torch_private import (
    is_in_autocast,
    never_compiled,
    records_operators,
    sequence_number,
)
from pp_offload._core.eligibility import StorageSet
from pp_offload._core.group import Group, GroupState
from pp_offload._core.saved import Packed, Resident
from pp_offload._core.search import is_of_parameter
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._groups.auto_bounds import AutoBounds
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.manager import MANY_CHUNKS
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.room import DeviceRoom
from pp_offload._groups.step import StepRecord
from pp_offload._groups.step_line import log_gain
from pp_offload._hooks import is_in_backward
from pp_offload._memory.host_pool import pageable
from pp_offload.backends import Backend, backend_or_default
from pp_offload.config import OffloadConfig, config_or_default

logger = logger_of(__name__)

MANY_TENSORS = 64
"""More tensors than an operator saves, except a compiled model; compiled layers save fewer."""

OPTIONS = OffloadConfig()
"""Options of plans in which only a limit keeps groups on the device."""

TIMES_ALONE = OffloadConfig(max_in_flight_bytes=0, prefetch_bytes=0)
"""Options with which :class:`AutoBounds` measures, and chooses nothing."""


class _Forward(threading.local):
    """Forward that runs on a thread."""

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.open: Group | None = None
        self.number = -1  # of the autograd node that saved last
        self.gathering: list[Module] = []  # whose parameters FSDP is about to gather


class ActivationStash:
    """Stash that gathers saved tensors, and offloads them together; ``max_tensors`` leave without a
    :meth:`send`. With ``has_limit``, groups stay while ``config.device_limit_bytes`` has room.
    """

    def __init__(
        self,
        name: str,
        config: OffloadConfig | None = None,
        *,
        min_offload_size: int = 1024,
        max_tensors: int | None = None,
        use_pin_memory: bool = True,
        has_limit: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self.name, self.min_offload_size, self.max_tensors = name, min_offload_size, max_tensors
        self.backend, config = backend_or_default(backend), config_or_default(config)
        self._limit = config.device_limit_bytes if has_limit else None
        allocate = None if use_pin_memory else pageable
        self._make = partial(Offloader, self.backend, config, allocate=allocate)
        self._inherited: Offloader | None = None
        self._has_logged = False
        self._start()

    def _start(self) -> None:
        self._owner = HERE[0]
        self._forward = _Forward()
        self._step = StepRecord()
        self._offloader = self._make(self._step)
        self._room = DeviceRoom(self._offloader)
        self._times = AutoBounds(self._offloader, TIMES_ALONE, self._room.unused_bytes)
        if self._offloader.engine.recipes is not None:
            self._offloader.engine.recipes.is_planned = False

    def begin(self) -> None:
        """Begin the forward of a microbatch, and offload the tensors that the last one gathered."""
        if self._owner != HERE[0]:  # forked: see :mod:`pp_offload._megatron.manager`
            self._inherited = old = self._offloader  # kept, or its end would wait for its copies
            self._start()
            self._offloader.engine.go_on_as(old.engine)
        if not self._offloader.copies_free:
            self._warn_of_host()
        self._offloader.renew_if_torn()
        if self._forward.open is not None:
            # What recipes need may have changed since its forward, as by a fused optimizer.
            self._forward.open.drop()
        self.send()
        with self._offloader.lock:
            self._end_step()
            # Between two forwards an optimizer may have changed tensors that both save, and fused
            # optimizers count no change.
            self._offloader.engine.begin_step()
        self._offloader.settle()
        self._offloader.engine.check_freed()
        problem = self._offloader.engine.eligibility.elsewhere_advice()
        if problem and not self._offloader.engine.mover.counts.bytes_offloaded:
            warn_once(logger, self, "'%s' offloaded nothing: %s", self.name, problem)
        self._forward.chunk = Chunk(0, self._offloader)

    def _end_step(self) -> None:
        """End the step if all its backwards are over, and plan which groups stay in the next."""
        step, is_watching = self._step, self._room.is_watching
        # A forward on another thread may have begun, and saved nothing yet.
        is_complete = step.is_complete(is_ended=False) and not step.awaited_elsewhere()
        shapes = step.shapes() if is_complete and is_watching else None
        if is_complete and not self._has_logged:
            step.sum_up()
        if shapes is None:
            if not is_watching or step.num_chunks >= MANY_CHUNKS or step.has_dropped():
                step.forget_finished()
            if step.num_chunks:
                return
        self._room.end_step(shapes)
        if shapes is not None:
            plan = step.make_plan(OPTIONS, self._room.stay)
            at_places = frozenset(key for key in plan.staying if key.place in plan.stay)
            self._offloader.plan = replace(plan, staying=at_places)  # a margin does not fit
        self._times.end_step(self._offloader.plan, is_complete=is_complete)
        step.clear()
        self._times.begin_step()
        self._room.begin_step(self._limit)
        if self._room.is_settled and not self._has_logged and self._times.take_settled():
            self._has_logged = True
            log_gain(self._room.gain(self._times.last, self._times.first))

    def _warn_of_host(self) -> None:
        """Warn once in a process: the user compares, or an accelerator was not recognized."""
        warn_once(
            logger,
            ActivationStash,
            "offload of '%s' on %s, where the device is the host, takes time and frees none; use "
            'an accelerator, or OffloadConfig(tiers=("disk",))',
            *(self.name, self.backend.name),
        )

    @property
    def is_over(self) -> bool:
        """Whether no forward has begun, or a backward of it has, or its graph is freed.

        Otherwise a chunk would grow forever, and a forward would share copies of tensors that an
        optimizer has changed since. Groups whose tensors all stay take part in no backward.
        """
        chunk = self._forward.chunk
        if chunk is None or any(group.is_used for group in chunk.groups):
            return True
        for group in reversed(chunk.groups):
            if group.state is GroupState.OPEN:
                return False
            if group.counts.num_tensors > 0:
                return not group.is_alive
        return bool(chunk.groups)

    @property
    def residents(self) -> StorageSet:
        """Storages that stay on the device."""
        return self._offloader.engine.eligibility.residents

    def keep_gathered(self, module: Module) -> None:
        """Keep the parameters that FSDP is about to gather, in a hook of the module's own."""
        self._forward.gathering.append(module)

    def statistics(self) -> OffloadStatistics:
        return self._offloader.statistics()

    @never_compiled
    def pack(self, tensor: Tensor) -> Packed:
        chunk = self._forward.chunk
        if chunk is None or is_in_backward():
            return Resident(tensor)
        if type(tensor) is not Tensor and records_operators():
            return Resident(tensor)  # its sizes may be symbols; see NOTE [ Recorded operators ]
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if is_dense and tensor.nbytes < self.min_offload_size:
            return Resident(tensor)
        if is_in_autocast() and is_of_parameter(tensor.grad_fn, may_be_cast=True):
            return Resident(tensor)  # the cache of autocast holds a cast until the forward ends
        while self._forward.gathering:
            self.residents.add_gathered(self._forward.gathering.pop())
        if self.max_tensors is not None:
            # An operator runs after it has saved, and may write its saved tensor without counting a
            # change, as rrelu does with its noise. So nothing leaves before another operator saves.
            before, self._forward.number = self._forward.number, sequence_number()
            if before != self._forward.number:
                self.send_if_full()
        group = self._forward.open
        if group is None or group.is_used:  # by a backward inside the forward: it stays
            group = self._forward.open = chunk.start(self.name)
        return group.pack(tensor)

    def end(self) -> None:
        """End the forward of a microbatch."""
        self._forward.gathering.clear()
        self.send_if_full()

    def send_if_full(self) -> None:
        """Offload the gathered tensors, if ``max_tensors``; the operators must have run."""
        group = self._forward.open
        if group is not None and self.max_tensors and len(group.saved_refs) >= self.max_tensors:
            self.send()

    def send(self) -> None:
        forward = self._forward
        group, forward.open = forward.open, None
        # Another thread may have ended the step meanwhile, and a step drops open groups.
        if forward.chunk is None or group not in forward.chunk.open_groups:
            return
        num_tensors = len(group.saved_refs)
        if self.max_tensors is not None and num_tensors >= self.max_tensors + MANY_TENSORS:
            warn_once(  # see pytorch/pytorch#148222
                logger,
                self,
                "one operator saved about %d tensors at once, as a model does that is compiled as "
                "a whole: none leaves before its forward is over, and its backward needs all of "
                "them on the device; expected layers that are compiled one by one: for layer in "
                "model.layers: layer.compile()",
                num_tensors,
            )
        forward.chunk.commit(self.name)
