"""Offload of the training forwards of a model, in the loop of another library.

    offload = offload_of(model, groups, config, options)
    with offload.forward(step):  # each microbatch; an exception inside ends the step
        loss = model(batch)
    offload.close()

The loop marks which microbatches belong to the same step of the optimizer: groups learn from steps.
Other forwards, such as those of an evaluation, offload nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn import Module

from pp_offload._common.checks import check_kind
from pp_offload._core.statistics import STATES, OffloadStatistics
from pp_offload._groups.manager import Manager
from pp_offload.activations import get_lora_act_offloading_ctx_manager
from pp_offload.backends import Backend, default_backend
from pp_offload.config import OffloadConfig, check_config
from pp_offload.modules import Patterns, offload_modules

LOGGED = (
    *("bytes_offloaded", "bytes_reloaded", "bytes_computed_again", "host_bytes_peak"),
    *("on_demand_reloads", "step_ms", "stalled_ms"),
)
LOGGED_OF_DISK = ("disk_bytes_written", "disk_bytes_read", "disk_bytes_peak")
"""Logged fields of :class:`OffloadStatistics`; disk fields only if a disk was used."""


class Figures:
    """Figures of an engine, from its ``statistics``."""

    def __init__(self, statistics: Callable[[], OffloadStatistics]) -> None:
        self._statistics, self._last = statistics, statistics()

    def since_last(self) -> dict[str, int | float]:
        """Return figures by name, such as ``offload/bytes_offloaded``; peaks are of all steps."""
        before, self._last = self._last, self._statistics()
        values = self._last.since(before).as_dict()
        names = LOGGED + (LOGGED_OF_DISK if self._last.disk_bytes_peak else ())
        return {f"offload/{name}": values[name] for name in names if name in values}


class ForwardOffload(NamedTuple):
    """Offload of the training forwards of a model."""

    # Returns a context for the forward of a microbatch; a new step begins a step.
    forward: Callable[[int], AbstractContextManager[object]]
    statistics: Callable[[], OffloadStatistics]
    close: Callable[[], None]  # removes groups; where all leave, only the context offloads


def offload_of(
    model: Module, groups: Patterns | None, config: OffloadConfig | None, options: Mapping[str, Any]
) -> ForwardOffload:
    """Make the offload of a model that is ready to train: wrapped, sharded, on its device."""
    check_kind("model", model, Module, "an nn.Module")
    check_choice(groups, config, options)
    if groups is not None:
        made = GroupForwards(model, groups, config)
        return ForwardOffload(made.forward, made.statistics, made.close)
    backend = options.get("backend") or _backend_of(model)
    options = {**options, "config": config, "backend": backend}
    context = get_lora_act_offloading_ctx_manager(model, **options)
    return ForwardOffload(lambda step: context, context.statistics, lambda: None)


def check_choice(
    groups: Patterns | None, config: OffloadConfig | None, options: Mapping[str, Any]
) -> None:
    """Check options before the model exists."""
    if config is not None:
        check_config(config)
    if groups is not None and options:
        raise ValueError(
            f"groups are given, and {', '.join(options)} too, which only all activations have; "
            "expected one or the other; say how groups are offloaded with config="
        )


class GroupForwards:
    """Offload of groups by name, inside :meth:`forward` only."""

    def __init__(self, model: Module, groups: Patterns, config: OffloadConfig | None) -> None:
        self._handle = offload_modules(model, groups)
        self._manager = self._handle.manager
        self._step: int | None = None
        try:
            if config is not None:
                self._manager.configure(config)
        except BaseException:
            self._handle.remove()
            raise
        self._begin = self._manager.statistics()  # the manager's: also of others' groups
        self._ended: OffloadStatistics | None = None
        self._manager.num_attached += 1

    def statistics(self) -> OffloadStatistics:
        now = self._manager.statistics()
        ended = self._ended or now.since(self._begin)
        return replace(ended, **{name: getattr(now, name) for name in STATES})

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Return a context for the forward of a microbatch; a new ``step`` begins a step."""
        manager = self._manager
        try:
            if step != self._step:
                # Models trained in turn share the manager's single step. The model that begins its
                # next step ends the step of all; the others join it.
                members = _MEMBERS.setdefault(manager, WeakSet())
                if not members or self in members:
                    manager.reset()
                    members.clear()
                members.add(self)
                self._step = step
            manager.begin_chunk(None, None, manager.config.min_offloaded_tensor_size)
            yield
        except BaseException:
            self._step = None  # otherwise a retried step would be part of this one
            manager.abort()
            raise
        finally:
            manager.end_chunk()

    def close(self) -> None:
        _MEMBERS.get(self._manager, WeakSet()).discard(self)
        self._handle.remove()
        if self._ended is None:
            self._ended = self.statistics()
            self._manager.num_attached -= 1
            self._manager.abort()
            self._manager.release_idle_memory()


_MEMBERS: WeakKeyDictionary[Manager, WeakSet[GroupForwards]] = WeakKeyDictionary()
"""Models that have begun a part of the current step, by manager."""


def _backend_of(model: Module) -> Backend:
    """Backend for the device of a model's parameters, which need not be the current one."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    if len(devices) > 1:
        devices.discard(torch.device("cpu"))
    return default_backend(devices.pop() if len(devices) == 1 else None)
