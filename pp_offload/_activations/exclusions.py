"""Modules whose saved tensors stay on the device, such as a model's output head.

Their forward sets a mark, which the pack hook of a context reads. Saved-tensor hooks of their own
would take tensors away from a checkpoint around the module.
"""

from __future__ import annotations

import threading

import torch
from torch.nn import Module

from pp_offload._common.checks import check_kind


class _Running(threading.local):
    """Ids of excluded modules whose forward runs on this thread, innermost last."""

    def __init__(self) -> None:
        self.modules: list[int] = []


_running = _Running()


def exclude(module: Module) -> None:
    """Keep tensors that ``module`` saves in its forward on the device, from now on.

    Checkpoints and groups ignore the mark. In a compiled region it has no effect.
    """
    check_kind("module", module, Module, "an nn.Module")
    if _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def is_excluded() -> bool:
    """Whether the forward of an excluded module runs on this thread."""
    return bool(_running.modules)


def forget_excluded() -> None:
    """Remove marks of interrupted forwards, because a new forward begins."""
    _running.modules.clear()


def _enter(module: Module, _: object) -> None:
    if not torch.compiler.is_compiling():
        _running.modules.append(id(module))


def _leave(module: Module, *_: object) -> None:
    """Remove the mark, and marks of modules inside that never ended. There is no mark if another
    hook raised before :func:`_enter` ran.
    """
    running = _running.modules
    while not torch.compiler.is_compiling() and id(module) in running:
        if running.pop() == id(module):
            return
