"""Groups by module name, without editing the model.

    handle = offload_modules(model, {"mlp": "layers.*.mlp", "core_attn": "layers.*.attn"})
    ...
    handle.remove()

Each matching module becomes a group around its forward. Its parameters and buffers, like those of
the whole model, stay on the device. A chunk must be open when the forward runs: attach a schedule,
or call ``init_chunk_handler``. Copies of the model have its groups until the handle is removed, and
none once they were pickled.

NOTE [ Module forward ]
    PyTorch calls no hook behind a forward that a KeyboardInterrupt ends. So a group is around the
    module's forward: an object in the module's ``__dict__``, in whose ``finally`` hooks for saved
    tensors are popped. Replicas of ``DataParallel`` and ``copy.copy`` take that object over, and
    would compute with the parameters of the original. So a hook before the forward, which is given
    the module that is called, notes it for the object.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from pp_offload._checkpoint.recomputed_layers import is_inside_recomputed
from pp_offload._common.checks import check_flag, check_kind, said
from pp_offload._common.module_names import listed, matching
from pp_offload._megatron.interface import run_in_group
from pp_offload._megatron.manager import PipelineOffloadManager

Patterns = Mapping[str, str | Collection[str]]
"""Group name to pattern or patterns of module names; ``*`` stands for one part between dots. Names
are as in a state dict, or as in ``named_modules()``.
"""


class OffloadModulesHandle:
    """Undoes :func:`offload_modules`.

    Args:
        hooks: Takes off what was registered.
        lifetime: Of the groups, which ends with this handle.
        modules: Names of the modules of each group.
        running: Groups that are to come in every step.

    Attributes:
        manager: Whose groups they are.
    """

    def __init__(
        self,
        hooks: ExitStack,
        lifetime: _Lifetime,
        modules: dict[str, list[str]],
        running: Sequence[str],
    ) -> None:
        self._hooks = hooks
        self._lifetime = lifetime
        self.modules = modules
        self._running = running
        self.manager = PipelineOffloadManager.get_instance()
        self._idle_groups = self.manager.idle_groups
        self._idle_groups.expect(running)

    def remove(self) -> None:
        """Take the groups off the model; those of its copies do nothing any more. Twice is fine.

        A group that is open is committed when its module's forward ends.
        """
        if not self._lifetime.is_over:
            self._idle_groups.forget(self._running)
        self._lifetime.is_over = True
        self._hooks.close()

    def __enter__(self) -> OffloadModulesHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def offload_modules(
    model: Module, groups: Patterns, *, missing_ok: bool = False
) -> OffloadModulesHandle:
    """Make a group of every module whose name matches.

    Args:
        model: Its parameters and buffers are kept on the device.
        groups: Group name to pattern, or to several.
        missing_ok: A pattern that matches nothing is no error, as on a pipeline stage that lacks
            the layer.

    Returns:
        A handle to undo it; also a context manager.

    Raises:
        ValueError: A pattern matches no module, and the message lists names that come near; or a
            module is a group already, or matches two, or takes no hooks; or there is no group, no
            pattern, or no name. The model is as before.
        TypeError: ``model`` is no module, ``groups`` no mapping, or a name or pattern no ``str``.
    """
    check_kind("model", model, Module, "an nn.Module")
    check_patterns(groups)
    check_flag("missing_ok", missing_ok)
    missing = [
        pattern
        for patterns in groups.values()
        for pattern in listed(patterns)
        if not matching(model, pattern)
    ]
    if missing and not missing_ok:
        raise ValueError(_no_match(model, missing))
    PipelineOffloadManager.get_instance().offloader.engine.eligibility.kept.add_module(model)
    return mark_modules({"": model}, groups)


def mark_modules(models: Mapping[str, Module], groups: Patterns) -> OffloadModulesHandle:
    """As :func:`offload_modules`, of several models at once: a module that they share is marked
    once, and a pattern may match nothing. Parameters are left to the caller.

    Args:
        models: By what errors say behind the name of a module, such as ``" of stage 1"``.
        groups: Group name to patterns; empty if the models mark their groups themselves, so that
            only what FSDP gathers is kept.

    Raises:
        ValueError: A module is a group already, or would be two, or takes no hooks. The models are
            as before.
    """
    places = [
        _Place(group, name, model, where)
        for where, model in models.items()
        for group, patterns in groups.items()
        for name in matching(model, patterns)
    ]
    wanted = _once_each(places)
    found = {group: [place.name for place in places if place.group == group] for group in groups}
    running = {one.group for one in places if not is_inside_recomputed(one.model, one.name)}
    lifetime = _Lifetime()
    with ExitStack() as hooks:  # takes off what is on already, where a module takes none
        _keep_gathered(models.values(), hooks)
        for place in wanted:
            _mark(place, lifetime, hooks)
        return OffloadModulesHandle(hooks.pop_all(), lifetime, found, sorted(running))


def _mark(place: _Place, lifetime: _Lifetime, hooks: ExitStack) -> None:
    module, around = place.module, _GroupAround(place.group, lifetime)
    for other in _groups_around(module):
        other.take_off(module)  # its handle was removed: one in place was refused before
    hooks.callback(around.take_off, module)  # first, for the module may refuse
    try:
        around.put_on(module)
    except Exception as failure:
        raise ValueError(
            f"module {place} is a {type(module).__name__} that takes no hooks ({failure}), "
            "expected one whose forward is Python code; name a module around it, or leave it out "
            "of the patterns"
        ) from failure


class _Place(NamedTuple):
    """A module that a pattern is for."""

    group: str
    name: str
    model: Module
    where: str
    """Which model that is, as errors say it."""

    @property
    def module(self) -> Module:
        return self.model.get_submodule(self.name)

    def __str__(self) -> str:
        return f"'{self.name}'{self.where}"


def check_patterns(groups: object) -> None:
    """Check patterns of module names by group, whatever model they are for.

    Raises:
        ValueError: There are none, or none for a group, or a name is empty.
        TypeError: They are no mapping, or a name or pattern is no ``str``.
    """
    such = 'such as {"mlp": "layers.*.mlp"}'
    check_kind(
        "groups", groups, Mapping, f"a mapping of group names to patterns of module names, {such}"
    )
    assert isinstance(groups, Mapping)
    if not groups:
        raise ValueError(f"groups is empty, expected at least one group, {such}; else leave it out")
    for group, patterns in groups.items():
        check_kind("the name of a group", group, str, f"a str, {such}")
        if not group:
            raise ValueError(f"the name of a group is '', expected one that is not empty, {such}")
        _check_patterns_of(group, patterns)


def _check_patterns_of(group: str, patterns: object) -> None:
    expected = "a module name with * for one part of it, or a list of such"
    if not isinstance(patterns, str | Collection) or isinstance(patterns, bytes | Mapping):
        raise TypeError(
            f"the pattern of group '{group}' is {said(patterns)}, expected {expected}; leave the "
            "group out if it shall have no modules"
        )
    wanted = listed(patterns)
    for pattern in wanted:
        check_kind(f"a pattern of group '{group}'", pattern, str, expected)
    if not wanted or not all(wanted):
        raise ValueError(
            f"the patterns of group '{group}' are {wanted}, expected at least one, none of them "
            "empty; leave the group out if it shall have no modules"
        )


def _keep_gathered(models: Iterable[Module], hooks: ExitStack) -> None:
    """Have parameters that FSDP gathered for a forward stay on the device, too.

    ``fully_shard`` puts them in place of the shards; its own hook has run when this one does.
    """
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        if _is_fully_sharded(module):
            hooks.enter_context(module.register_forward_pre_hook(_keep_parameters))


def _is_fully_sharded(module: Module) -> bool:
    # By name: importing FSDP takes long, and few models use it.
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _keep_parameters(module: Module, args: object) -> None:
    kept = PipelineOffloadManager.get_instance().offloader.engine.eligibility.kept
    for parameter in module.parameters():
        kept.add(parameter)


class _Lifetime:
    """Whether the handle of some hooks was removed.

    Hooks of a copied model share it with those of the original, whose handle is also theirs. What
    was pickled has no handle that could be removed, so its hooks are over from the start.
    """

    def __init__(self, is_over: bool = False) -> None:
        self.is_over = is_over

    def __deepcopy__(self, memo: object) -> _Lifetime:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lifetime, (True,)


class _GroupAround:
    """The group of one module and of its copies. See NOTE [ Module forward ]."""

    def __init__(self, name: str, lifetime: _Lifetime) -> None:
        self.name = name
        self.lifetime = lifetime

    def __deepcopy__(self, memo: object) -> _GroupAround:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _GroupAround, (self.name, self.lifetime)

    def put_on(self, module: Module) -> None:
        module.register_forward_pre_hook(self.meet)
        module.forward = _Forward(self, module, vars(module).get("forward"))

    def take_off(self, module: Module) -> None:
        """A forward that runs goes on as it began."""
        hooks = module._forward_pre_hooks
        for number, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is self:
                del hooks[number]
        forward = vars(module).get("forward")
        if isinstance(forward, _Forward) and forward.around is self:
            if forward.own is None:
                del module.__dict__["forward"]
            else:
                module.forward = forward.own

    def meet(self, module: Module, args: object) -> None:
        """Before the forward: note which module it is of."""
        if not torch.compiler.is_compiling():
            _here.met[self] = module


class _Forward:
    """The forward of a module that is a group.

    Args:
        around: Its group.
        module: Whose forward it is, unless a replica or a copy was noted.
        own: What was the module's forward, if not that of its class.
    """

    def __init__(
        self, around: _GroupAround, module: Module, own: Callable[..., Any] | None
    ) -> None:
        self.around = around
        self.own = own
        self._module = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward; :func:`inspect.signature` asks for it."""
        return self._own_of(self._module)

    def _own_of(self, module: Module) -> Callable[..., Any]:
        return self.own if self.own is not None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._own_of(self._module)(*args, **kwargs)
        module = _here.met.pop(self.around, self._module)
        compute = partial(self._own_of(module), *args, **kwargs)
        if self.around.lifetime.is_over:
            return compute()
        return run_in_group(self.around.name, compute, partial(_keep_buffers, module))


def _keep_buffers(module: Module) -> None:
    """A copied or moved model has buffers nobody has seen."""
    kept = PipelineOffloadManager.get_instance().offloader.engine.eligibility.kept
    for buffer in module.buffers():
        kept.add(buffer)


class _OfThread(threading.local):
    """Modules whose forward is about to run on a thread, by their groups."""

    def __init__(self) -> None:
        self.met: dict[_GroupAround, Module] = {}


_here = _OfThread()


def _once_each(places: Iterable[_Place]) -> list[_Place]:
    """These places, but for those whose module came before.

    Raises:
        ValueError: A module is a group already, or would be two.
    """
    wanted: dict[Module, _Place] = {}
    for place in places:
        first = wanted.setdefault(place.module, place)
        if first.group != place.group:
            raise ValueError(
                f"module {place} is to be group '{place.group}' and is group '{first.group}' "
                f"already, as {first}; change the patterns, so that it is one group"
            )
        there = [one.name for one in _groups_around(place.module) if not one.lifetime.is_over]
        if there:
            raise ValueError(
                f"module {place} is to be group '{place.group}' and is group '{there[0]}' already; "
                "remove() or detach() the handle it came from, or change the patterns"
            )
    return list(wanted.values())


def _groups_around(module: Module) -> list[_GroupAround]:
    """Those in place, and in a copied module those whose handle was removed."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, _GroupAround)]


def _no_match(model: Module, missing: Sequence[str]) -> str:
    names = [name for name, _ in model.named_modules() if name]
    lines = []
    for pattern in missing:
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
        lines.append(f"pattern '{pattern}' matches no module; near names: {near}")
    return "; ".join(lines) + "; expected names as in model.named_modules(), * for one part"
