"""Groups by module name, without editing the model.

    handle = offload_modules(model, {"mlp": "layers.*.mlp", "core_attn": "layers.*.attn"})

Each matching module becomes a group around its forward. Copies of the model have the same groups
until the handle is removed; a pickled model has none. Checkpoints, compilers and parallel wrappers
add a part to the names of modules, which a pattern may omit.

NOTE [ Module forward ]
    PyTorch calls no hook after a forward that a KeyboardInterrupt ends. So a group is around the
    module's forward: an object in the module's ``__dict__`` pops hooks for saved tensors in its
    ``finally``. Shallow copies share that object and compute as the original, as do the replicas of
    ``DataParallel``, which groups do not support.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from pp_offload._common.checks import check_flag, check_kind
from pp_offload._common.text import size_text
from pp_offload._common.torch_private import never_compiled
from pp_offload._core.eligibility import is_sharded
from pp_offload._groups.plan import groups_sum
from pp_offload._hooks import PackHook, saving
from pp_offload._megatron.interface import fine_grained_offloading_group_commit
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.checkpointing import is_inside_recomputed

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module"})
"""Names under which PyTorch's wrappers hold the wrapped module."""

Patterns = Mapping[str, str | Collection[str]]
"""Group name to pattern or patterns of module names; ``*`` stands for one part between dots. Names
are as in a state dict, or as in ``named_modules()``.
"""


class OffloadModulesHandle(AbstractContextManager["OffloadModulesHandle"]):
    """Handle of :func:`offload_modules`, which removes its groups; ``manager`` is their manager."""

    def __init__(self, hooks: ExitStack, modules: dict[str, list[str]], running: list[str]) -> None:
        self._hooks, self._is_removed = hooks, False
        self.modules = modules
        self.manager = PipelineOffloadManager.get_instance()
        self.manager.idle_groups.expect(running)
        hooks.callback(self.manager.idle_groups.forget, running)

    def remove(self) -> None:
        """Take the groups off the model and its copies. A second call does nothing.

        An open group is committed when its module's forward ends.
        """
        self._is_removed = True
        self._hooks.close()
        self.manager.release_idle_memory()

    def described(self) -> str:
        """Return groups with numbers of modules, and GiB at the peak of the last step."""
        named = ", ".join(f"{name} ({len(each)} modules)" for name, each in self.modules.items())
        step = self.manager.group_bytes
        total = groups_sum(step[name] for name in self.modules if name in step)
        return (
            f"groups {named}; at the peak of the last step {size_text(total.staying)} stay on the "
            f"device, {size_text(total.copied)} copied, {size_text(total.again)} computed again"
        )

    def __repr__(self) -> str:
        state = "removed; " if self._is_removed else ""
        return f"<OffloadModulesHandle: {state}{self.described()}>"

    def __exit__(self, *error: object) -> None:
        self.remove()


def offload_modules(
    model: Module, groups: Patterns, *, missing_ok: bool = False
) -> OffloadModulesHandle:
    """Make a group of every module whose name matches.

    Groups work inside a microbatch: attach a schedule, or in a loop of your own call ``reset()``
    before each step and ``init_chunk_handler(...)`` before each forward, both of
    :class:`pp_offload.FineGrainedActivationOffloadingInterface`. They last until ``remove()``;
    the handle need not be kept.

    Args:
        model: Model, whose parameters and buffers stay on the device.
        groups: Pattern or patterns of module names by group name.
        missing_ok: Whether a pattern may match nothing, as on a stage that lacks the layer.

    Returns:
        A handle that removes the groups; also a context manager.

    Raises:
        ValueError: A pattern matches no module (the message lists near names), a module is a group
            already, matches two groups or is scripted, or there is no group. The model is as
            before.
        TypeError: ``model`` is no module, or ``groups`` no mapping.
    """
    check_kind("model", model, Module, "an nn.Module")
    check_patterns(groups)
    check_flag("missing_ok", missing_ok)
    patterns = chain.from_iterable(map(listed, groups.values()))
    missing = [pattern for pattern in patterns if not matching(model, pattern)]
    if missing and not missing_ok:
        raise ValueError(no_match(model, missing))
    PipelineOffloadManager.get_instance().offloader.engine.eligibility.residents.add_module(model)
    return mark_modules({"": model}, groups)


def mark_modules(models: Mapping[str, Module], groups: Patterns) -> OffloadModulesHandle:
    """Make groups of the modules of several models, as :func:`offload_modules` does for one.

    ``models`` are by the text that errors append to a module's name, as ``" of stage 1"``. A module
    that models share is marked once, and a pattern may match nothing. The caller must keep
    parameters on the device.
    """
    places = [
        _Place(group, name, model, where)
        for where, model in models.items()
        for group, patterns in groups.items()
        for name in matching(model, patterns)
    ]
    distinct = _once_each(places)
    names = {group: [place.name for place in places if place.group == group] for group in groups}
    running = {each.group for each in places if not is_inside_recomputed(each.model, each.name)}
    modules = dict.fromkeys(chain.from_iterable(model.modules() for model in models.values()))
    with ExitStack() as hooks:
        for module in filter(is_sharded, modules):
            hooks.enter_context(module.register_forward_pre_hook(_keep_gathered))
        for place in distinct:
            module, group = place.module, _Group(place.group)
            for previous in _groups_around(module):
                _take_off(module, previous)  # its handle was removed: a living one is refused
            attribute = "forward" if getattr(module, _COMPILED) is None else _COMPILED
            setattr(module, attribute, _Forward(group, module, vars(module).get(attribute)))
            hooks.callback(_take_off, module, group)
        return OffloadModulesHandle(hooks.pop_all(), names, sorted(running))


class _Place(NamedTuple):
    """A module that matches a pattern."""

    group: str
    name: str
    model: Module
    where: str  # text for errors that names the model

    @property
    def module(self) -> Module:
        return self.model.get_submodule(self.name)

    def __str__(self) -> str:
        return f"'{self.name}'{self.where}"


def check_patterns(groups: Patterns) -> None:
    """Check that ``groups`` is a mapping that is not empty, before there is a model."""
    expected = 'group names and patterns of module names, such as {"mlp": "layers.*.mlp"}'
    check_kind("groups", groups, Mapping, f"a mapping of {expected}")
    if not groups:
        raise ValueError(f"groups is empty, expected {expected}; else leave it out")
    for group, patterns in groups.items():
        if not all(listed(patterns)) or not listed(patterns):
            raise ValueError(
                f"the patterns of group '{group}' are {patterns!r}, expected at least one, none of "
                "them empty; leave the group out if it shall have no modules"
            )


@never_compiled
def _keep_gathered(module: Module, args: object) -> None:
    """Keep the parameters of a forward, by which FSDP's own hook has just replaced the shards."""
    manager = PipelineOffloadManager.get_instance()
    manager.offloader.engine.eligibility.residents.add_gathered(module)


class _Group:
    """Group of a module and its copies until their handle is removed: NOTE [ Module forward ]."""

    def __init__(self, name: str, is_over: bool = False) -> None:
        self.name, self.is_over = name, is_over

    def __deepcopy__(self, memo: object) -> _Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Group, (self.name, True)  # over: a pickled model has no handle


class _Forward:
    """Forward of a module that is a group. ``own`` is the module's; None for that of its class."""

    def __init__(self, group: _Group, module: Module, own: Callable[..., Any] | None) -> None:
        self.group, self.own = group, own
        self._module = module  # in a copy or an unpickled module, that module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Own forward of the module, also for :func:`inspect.signature`."""
        return type(self._module).forward.__get__(self._module) if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.group.is_over:
            return self.__wrapped__(*args, **kwargs)
        name, manager = self.group.name, PipelineOffloadManager.get_instance()
        chunk = manager.open_chunk("start", name)
        if chunk is None or chunk.is_idle(name):
            return self.__wrapped__(*args, **kwargs)
        group = chunk.start(name)
        try:
            for buffer in self._module.buffers():  # each time: a copied or moved model has new ones
                manager.offloader.engine.eligibility.residents.add(buffer)
            output = saving(PackHook(group.pack), partial(self.__wrapped__, *args, **kwargs))
        except BaseException as error:
            group.has_failed = True
            if isinstance(error, Exception):  # the program may handle it, and go on
                fine_grained_offloading_group_commit(None, name)
            raise
        return fine_grained_offloading_group_commit(output, name)


_COMPILED = "_compiled_call_impl"
"""Attribute that ``module.compile()`` sets: a group inside that graph would do nothing."""


def _take_off(module: Module, group: _Group) -> None:
    """Restore the module, and end the group of its copies. A running forward ends as it began."""
    group.is_over = True
    for attribute in ("forward", _COMPILED):
        forward = vars(module).get(attribute)
        if isinstance(forward, _Forward) and forward.group is group:
            delattr(module, attribute)
            if forward.own is not None:
                setattr(module, attribute, forward.own)


def _groups_around(module: Module) -> list[_Group]:
    """List the groups of a module; for a copied module also groups whose handle was removed."""
    forwards = [vars(module).get(attribute) for attribute in ("forward", _COMPILED)]
    return [forward.group for forward in forwards if isinstance(forward, _Forward)]


def _once_each(places: Iterable[_Place]) -> list[_Place]:
    """Drop repeated modules; raise if one is a group already, would be two, or is scripted."""
    by_module: dict[Module, _Place] = {}
    for place in places:
        if isinstance(place.module, torch.jit.ScriptModule):
            raise ValueError(f"module {place} is scripted, and cannot be a group; leave it out")
        first = by_module.setdefault(place.module, place)
        if first.group != place.group:
            raise ValueError(
                f"module {place} is to be group '{place.group}' and is group '{first.group}' "
                f"already, as {first}; change the patterns, so that it is one group"
            )
        living = [each.name for each in _groups_around(place.module) if not each.is_over]
        if living:
            raise ValueError(
                f"module {place} is to be group '{place.group}' and is group '{living[0]}' already;"
                " remove() or detach() the handle it came from, or change the patterns"
            )
    return list(by_module.values())


def no_match(model: Module, missing: Iterable[str]) -> str:
    """Return the message on patterns that match no module of ``model``, with near names."""
    names = [name for name, _ in model.named_modules() if name]
    lines = []
    for pattern in missing:
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
        lines.append(f"pattern '{pattern}' matches no module; near names: {near}")
    return "; ".join(lines) + "; expected names as in model.named_modules(), * for one part"


def matching(model: Module, patterns: str | Collection[str]) -> list[str]:
    """Return names of modules that match; a pattern without a wrapper's name means the wrapper."""
    wanted = [pattern.split(".") for pattern in listed(patterns)]
    names = [name for name, _ in model.named_modules() if name]
    return [name for name in names if any(_fit(name.split("."), parts) for parts in wanted)]


def listed(patterns: str | Collection[str]) -> list[str]:
    """Return patterns as a list."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _fit(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not parts or not wanted:
        return not parts and not wanted
    first, *rest = parts
    # A star stands for no wrapper, but for a module named ``module``.
    is_literal = first in WRAPPERS and first != "module"
    fits = first == wanted[0] if is_literal else fnmatch.fnmatchcase(first, wanted[0])
    if fits and _fit(rest, wanted[1:]):
        return True
    return first in WRAPPERS and bool(rest) and _fit(rest, wanted)
