"""Scopes belong to their thread, and take off what they put on, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.processes import HANG_S
from helpers.toy import assert_idle, assert_no_hooks, same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pp_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadError,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    offload_modules,
)
from pp_offload._core.saved import Resident
from pp_offload._hooks.hook_scopes import HookScope
from pp_offload._hooks.regions import all_packs, top_pack

WIDTH = 6


class Block(nn.Module):
    """Saves something before, in and behind its part; ``run`` may be a checkpoint."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        return self.around(x.sin()).exp().tanh()

    def around(self, x: Tensor) -> Tensor:
        return self.part(x)


def plainly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


class InContext(Block):
    def around(self, x: Tensor) -> Tensor:
        x = fine_grained_offloading_group_start(x, "g")
        with off_interface.get_context(True):
            y = self.part(x)
        return off_interface.group_commit(y, name="g")


def build(kind: type[Block], run: Any, device: torch.device, num: int = 2) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(kind(run) for _ in range(num))).to(device)


def one_step(
    model: nn.Module,
    device: torch.device,
    inside: AbstractContextManager[object] | None = None,
    is_on: bool = True,
) -> list[Tensor]:
    if is_on:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).to(device).requires_grad_()
    with inside or nullcontext():
        loss = model(x * 1).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def without(manager: PipelineOffloadManager, model: nn.Module) -> list[Tensor]:
    """What a step of it gives where no group is opened."""
    manager.num_attached += 1
    try:
        return one_step(model, manager.backend.device, is_on=False)
    finally:
        manager.num_attached -= 1


@pytest.fixture(autouse=True)
def no_hook_is_left_to_others() -> Iterator[None]:
    yield
    left = len(all_packs())
    for _ in range(left):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert not left


# Threads


def once_inside(module: nn.Module, function: Callable[[], object]) -> None:
    """Have it called once, inside the group around ``module``."""
    waiting = [function]

    def hook(*_: object) -> None:
        if waiting:
            waiting.pop()()

    module.register_forward_pre_hook(hook)


@on_two_backends
@pytest.mark.parametrize("kind", [Block, InContext])
def test_two_threads_in_one_module_may_end_in_any_order(
    manager: PipelineOffloadManager, kind: type[Block]
) -> None:
    """The evaluation begins inside the trainer's groups, and is still in its own when they end."""
    device = manager.backend.device
    model = build(kind, plainly, device)
    expected = without(manager, model)
    if kind is Block:
        offload_modules(model, {"a": "*", "b": "*.part"})
    is_inside, may_end = threading.Event(), threading.Event()

    def wait_there(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_inside.set()
            assert may_end.wait(HANG_S)

    for block in model:
        block.part[0].register_forward_hook(wait_there)

    @torch.no_grad()
    def evaluate() -> None:
        model(torch.ones(2, WIDTH, device=device))
        assert not len(all_packs())

    with ThreadPoolExecutor(1) as thread:

        def begin() -> None:
            done.append(thread.submit(evaluate))
            assert is_inside.wait(HANG_S)

        done: list[Any] = []
        once_inside(model[0].part[0], begin)
        try:
            found = one_step(model, device)
        finally:
            may_end.set()
        done[0].result(HANG_S)
    assert same_bits(found, expected)
    assert_idle(manager)


# One scope by hand


def test_a_scope_that_was_passed_by_ends_with_the_one_around_it() -> None:
    outer, inner = HookScope(), HookScope()
    outer.enter(partial(Resident), outer)
    inner.enter(partial(Resident), inner)
    outer.leave()
    assert_no_hooks()
    inner.leave()
    outer.leave()


def test_hooks_of_others_stay() -> None:
    scope = HookScope()
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        top = top_pack()
        scope.enter(partial(Resident), scope)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        scope.leave()
        assert top_pack() is top
    assert_no_hooks()


@on_two_backends
def test_a_with_that_ends_on_another_thread(manager: PipelineOffloadManager) -> None:
    """As that of a generator that is collected there. No hook of that thread is popped."""

    def in_a_generator() -> Iterator[None]:
        with off_interface(True, torch.ones(1), "g"):
            yield

    manager.init_model_chunk_offload_handler(None, None, 1)
    generator = in_a_generator()
    next(generator)

    def elsewhere() -> int:
        with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            generator.close()
            return len(all_packs())

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(elsewhere).result() == 1
    assert len(all_packs()) == 1
    torch._C._autograd._pop_saved_tensors_default_hooks()


@on_two_backends
def test_one_object_is_entered_once_at_a_time(manager: PipelineOffloadManager) -> None:
    x = torch.ones(3, device=manager.backend.device, requires_grad=True)
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    scope = off_interface(True, x, "twice")
    with scope as y:
        with pytest.raises(GroupStateError, match="'twice' is entered again.*one object"):
            scope.__enter__()
        y = y.exp()
    off_interface.group_commit(y, name="twice")
    assert_no_hooks()
    y.sum().backward()
    assert_idle(manager)


@on_two_backends
def test_what_was_not_entered_is_not_left(
    manager: PipelineOffloadManager, activations: OffloadActivations
) -> None:
    with pytest.raises(GroupStateError, match="did not enter.*with statement"):
        manager.__exit__(None, None, None)
    with pytest.raises(OffloadError, match="did not enter.*with statement"):
        activations.__exit__(None, None, None)
    with manager, activations:
        pass
    assert_no_hooks()
