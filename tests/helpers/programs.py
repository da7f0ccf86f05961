"""Random programs: models of groups, microbatches and backwards, all drawn from one seed.

run(7, is_on=False)    # lists of tensors, one for each step
run(7, is_on=True)     # the same program with groups, on the current manager
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.kept import GivesSaved, ReadsTwice
from helpers.sessions import begin_microbatch, drawn, gradients
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    PipelineOffloadManager,
    fine_grained_offloading_group_flush_delayed_groups,
)

WIDTH = 4

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]

COMPUTES: list[Compute] = [
    lambda a, b, w: a.tanh(),
    lambda a, b, w: a * b.sum(),
    lambda a, b, w: torch.where(a > 0, a, a * 0.5),
    lambda a, b, w: a @ w,
    lambda a, b, w: F.linear(a, w).sigmoid(),
    lambda a, b, w: a.exp().clamp(max=3),
    lambda a, b, w: a.softmax(-1) * 2,
    lambda a, b, w: F.layer_norm(a, (WIDTH,)),
    lambda a, b, w: a.sort(0).values,
    lambda a, b, w: (a.t() * 1.5).t().sin(),
    lambda a, b, w: torch.cat([a[1:].sin(), a[:1].cos()]),
    lambda a, b, w: a[:, ::2].exp().repeat_interleave(2, 1).clamp(max=3),
    lambda a, b, w: a[:1].expand_as(a).sin() + a,
    lambda a, b, w: a.bfloat16().sin().float(),
    lambda a, b, w: a.double().cos().float(),
    lambda a, b, w: ReadsTwice.apply(a),
    lambda a, b, w: GivesSaved.apply(a.tanh()),
    lambda a, b, w: (a * 2).add_(1).relu_(),
    lambda a, b, w: a + b.mean(),
    lambda a, b, w: a.view(-1).view_as(a).square() * 0.1,
]


class Model:
    """A stage: groups of drawn operators, with weights of their own."""

    def __init__(self, draw: random.Random, seed: int) -> None:
        names = ["a", "b", "c"][: draw.randint(1, 3)]
        self.groups = [
            (draw.choice(names), draw.choice(KINDS), self._operators(draw))
            for _ in range(draw.randint(1, 4))
        ]
        self.weight = torch.nn.Parameter(drawn(WIDTH, WIDTH, seed=seed) / 2)

    @staticmethod
    def _operators(draw: random.Random) -> list[tuple[Compute, int]]:
        return [(draw.choice(COMPUTES), draw.randint(0, 3)) for _ in range(draw.randint(1, 4))]

    def __call__(self, x: Tensor, is_on: bool) -> Tensor:
        tensors = [x]
        for name, kind, operators in self.groups:
            is_group = is_on and kind != "none"
            with off_interface(is_group, tensors[-1], name):
                for number, (operator, pick) in enumerate(operators):
                    a, b = tensors[-1], tensors[-1 - pick % len(tensors)]
                    if kind == "nested" and number == 1:
                        with off_interface(is_on, a, "inner"):
                            tensors.append(operator(a, b, self.weight))
                    else:
                        tensors.append(operator(a, b, self.weight))
            if is_group:
                off_interface.group_commit(tensors[-1], name, None, kind == "delayed")
            if is_group and kind == "nested" and len(operators) > 1:
                off_interface.group_commit(tensors[-1], "inner")
            if kind == "forgets":
                tensors = tensors[-1:]
        if is_on:
            fine_grained_offloading_group_flush_delayed_groups()
        return tensors[-1]


KINDS = ["plain", "plain", "forgets", "forgets", "nested", "delayed", "none"]


def whole(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    y.square().sum().backward()
    return [*gradients(x)]


def retained(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    y.square().sum().backward(retain_graph=True)
    y.sum().backward()
    return gradients(x)


def in_parts(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    loss, results = y.square().sum(), []
    for leaf in (x, weight):
        results += torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
    return [t for t in results if t is not None]


def never(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    return [y.detach().clone()]


BACKWARDS = [whole, whole, whole, retained, in_parts, never]


def aside(is_on: bool, number: int) -> AbstractContextManager[Any]:
    """Another compute stream, ordered by events with the main one, where there are streams."""
    backend: Any = PipelineOffloadManager.get_instance().backend if is_on else None
    if number == 0 or not hasattr(backend, "new_stream"):
        return nullcontext()
    return Aside(backend)


class Aside:
    """A new stream as a context."""

    count = 0

    def __init__(self, backend: Any) -> None:
        Aside.count += 1
        self.main = backend.current_stream()
        self.side = backend.new_stream(f"aside {Aside.count}")
        self.scope = backend.stream(self.side)

    def __enter__(self) -> None:
        self.side.wait_stream(self.main)
        self.scope.__enter__()

    def __exit__(self, *args: Any) -> None:
        self.scope.__exit__(*args)
        self.main.wait_stream(self.side)


def run(seed: int, is_on: bool) -> list[list[Tensor]]:
    """What each step of the program computes."""
    draw = random.Random(seed)
    stages = [Model(draw, seed + n) for n in range(draw.randint(1, 3))]
    return [_step(draw, stages, is_on, step) for step in range(3)]


def _step(draw: random.Random, stages: list[Model], is_on: bool, step: int) -> list[Tensor]:
    if is_on:
        off_interface.reset()
    waiting: list[tuple[Model, Tensor, Tensor]] = []
    results: list[Tensor] = []
    for number in range(draw.randint(1, 5)):
        x = drawn(draw.randint(2, 6), WIDTH, seed=10 * step + number)
        for place, stage in enumerate(stages):
            x = x.detach().requires_grad_()
            with aside(is_on, draw.choice([0, 0, 1])):
                if is_on:
                    begin_microbatch(len(stages), place)
                waiting.append((stage, x, stage(x, is_on)))
            x = waiting[-1][-1]
        if draw.random() < 0.2:
            with torch.no_grad():
                results.append(stages[0](x.detach(), is_on))
        while waiting and draw.random() < 0.4:
            results += _backward(draw, waiting, is_on)
    del x
    while waiting:
        results += _backward(draw, waiting, is_on)
    return results + gradients(*(stage.weight for stage in stages))


def _backward(
    draw: random.Random, waiting: list[tuple[Model, Tensor, Tensor]], is_on: bool
) -> list[Tensor]:
    stage, x, y = waiting.pop(draw.choice([0, 0, -1, draw.randrange(len(waiting))]))
    with aside(is_on, draw.choice([0, 0, 1])):
        return draw.choice(BACKWARDS)(y, x, stage.weight)


def options_of(seed: int) -> dict[str, Any]:
    """Of the engine, for the program of this seed."""
    draw = random.Random(-1 - seed)
    return {
        "prefetch_bytes": draw.choice(["auto", "auto", 0, 100, 10**6]),
        "max_in_flight_bytes": draw.choice(["auto", "auto", 0, 100]),
        "host_budget_bytes": draw.choice([None, None, None, 0, 4096]),
        "activation_offload_fraction": draw.choice([1.0, 1.0, 0.5]),
        "rematerialize": draw.choice(["none", "cheap"]),
    }
