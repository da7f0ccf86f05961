"""Groups by module name, without editing the model.

    handle = offload_modules(model, {"mlp": "layers.*.mlp", "core_attn": "layers.*.attn"})
    ...
    handle.remove()

Each matching module becomes a group around its forward. Its parameters and buffers, like those of
the whole model, stay on the device. A chunk must be open when the forward runs: attach a schedule,
or call ``init_chunk_handler``.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from pp_offload.interface import FineGrainedActivationOffloadingInterface
from pp_offload.manager import PipelineOffloadManager
from pp_offload.tensors import map_tensors, tensors_in

Patterns = Mapping[str, str | Sequence[str]]
"""Group name to pattern or patterns of module names; ``*`` stands for one part between dots."""


class OffloadModulesHandle:
    """Undoes :func:`offload_modules`.

    Args:
        hooks: What was registered.
        modules: Names of the modules of each group.
    """

    def __init__(self, hooks: list[RemovableHandle], modules: dict[str, list[str]]) -> None:
        self._hooks = hooks
        self.modules = modules

    def remove(self) -> None:
        """Take the groups off the model. Twice is fine."""
        while self._hooks:
            self._hooks.pop().remove()

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
        ValueError: A pattern matches no module; the message lists names that come near.
    """
    found = {group: _matching(model, patterns) for group, patterns in groups.items()}
    missing = [groups[group] for group, names in found.items() if not names]
    if missing and not missing_ok:
        raise ValueError(_no_match(model, missing))
    PipelineOffloadManager.get_instance().services.eligibility.kept.add_module(model)
    hooks: list[RemovableHandle] = []
    for group, names in found.items():
        for name in names:
            scope = _GroupAround(group)
            module = model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(scope.start, with_kwargs=True))
            hooks.append(module.register_forward_hook(scope.commit, always_call=True))
    return OffloadModulesHandle(hooks, found)


class _GroupAround:
    """The two hooks of one module. Calls may nest, so the scopes are a stack."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scopes: list[FineGrainedActivationOffloadingInterface] = []

    def start(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the forward: open the group on the first input that requires grad."""
        tensors = list(tensors_in((args, kwargs)))
        if not tensors:
            self._scopes.append(FineGrainedActivationOffloadingInterface(False, Tensor(), ""))
            return args, kwargs
        first = next((t for t in tensors if t.requires_grad), tensors[0])
        scope = FineGrainedActivationOffloadingInterface(True, first, self._name)
        marked = scope.__enter__()
        self._scopes.append(scope)
        changed = map_tensors((args, kwargs), lambda t: marked if t is first else t)
        return changed[0], changed[1]

    def commit(self, module: Module, args: object, output: Any) -> Any:
        """After the forward, also one that raised: close the scope, commit the group."""
        if not self._scopes:
            return output
        scope = self._scopes.pop()
        was_open = scope.is_open
        scope.__exit__()
        return scope.group_commit(output, self._name) if was_open and output is not None else output


def _matching(model: Module, patterns: str | Sequence[str]) -> list[str]:
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    return [
        name
        for name, _ in model.named_modules()
        if name and any(_fits(name, pattern) for pattern in wanted)
    ]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )


def _no_match(model: Module, missing: Sequence[str | Sequence[str]]) -> str:
    names = [name for name, _ in model.named_modules() if name]
    lines = []
    for patterns in missing:
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
            lines.append(f"pattern '{pattern}' matches no module; near names: {near}")
    return "; ".join(lines) + "; expected names as in model.named_modules(), * for one part"
