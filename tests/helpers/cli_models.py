"""Models as users write them, well and badly; ``pp-offload simulate helpers.cli_models:good``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from helpers.virtual_training import KIND, chain
from pp_offload.simulate import Modules


def modules(
    num_stages: int,
    length: int,
    make: Callable[[], Sequence[nn.Module]] = lambda: [nn.Linear(64, 64, **KIND), nn.GELU()],
    width: int = 64,
    **options: Any,
) -> Modules:
    return chain(num_stages, make, torch.empty(length, width, **KIND), **options)


good = partial(modules, groups={"linear": "0", "gelu": "1"})


def deep(num_stages: int, length: int, **options: Any) -> Modules:
    """Groups hold more than may be on its way at once, and nothing is computed again."""

    def layers() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(1024, 1024, **KIND), nn.ELU()) for _ in range(6)]

    return modules(num_stages, length, layers, 1024, **options)


def as_megatron(num_stages: int, length: int) -> Modules:
    """Groups named as Megatron's modules, in layers that may be recomputed."""
    groups = {"core_attn": "*.0", "attn_proj": "*.1"}
    return deep(num_stages, length, groups=groups, layers="*")


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# Refused

with_lbfgs = partial(modules, optimizer=torch.optim.LBFGS)
unmarked = partial(modules, groups=None)
on_the_cpu = partial(modules, make=lambda: [nn.Linear(64, 64)])


def broken(num_stages: int, length: int) -> Modules:
    raise ValueError("what went wrong in my model")


def broken_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise ValueError("what went wrong in my optimizer")


def twice(num_stages: int, length: int) -> Modules:
    """Stages that save what they return, which the next one saves as well."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(256, 256, **KIND), nn.Sigmoid()]

    return modules(num_stages, length, layers, 256)


def without_length(num_stages: int) -> Modules:
    return modules(num_stages, 8)


def a_list(num_stages: int, length: int) -> list[nn.Module]:
    return modules(num_stages, length).stages


def too_few(num_stages: int, length: int) -> Modules:
    return modules(num_stages - 1, length)


def head_on_the_last(num_stages: int, length: int) -> Modules:
    work = modules(num_stages, length, groups={"linear": "0", "head": "head"})
    work.stages[-1].add_module("head", nn.Linear(64, 64, **KIND))
    return work
