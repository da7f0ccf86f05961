"""Scopes belong to their thread; an interrupt at any line leaves no hook behind."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import make_backend
from processes import HANG_S
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    OffloadError,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    offload_modules,
    use_backend,
)
from pp_offload._activations.exclusions import exclude, is_excluded
from pp_offload._hooks.hook_scopes import HookScope, leave_all
from pp_offload._hooks.regions import top_pack
from pp_offload._transfer.saved_tensor import Resident

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


def anew(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


class Marked(Block):
    def around(self, x: Tensor) -> Tensor:
        with off_interface(True, x, "outer"):
            with off_interface(True, x, "inner"):
                y = self.part(x)
            y = off_interface.group_commit(y, name="inner").sin()
        return off_interface.group_commit(y, name="outer")


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
    left = hook_depth()
    for _ in range(left):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert not left


# Threads


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a function on another thread, and waits; afterwards no hook is left there."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda function: thread.submit(function).result()
        thread.submit(assert_no_hooks).result()
    assert_no_hooks()


PLACES = ["pre", "post"]


def at(module: nn.Module, place: str, function: Callable[[], object]) -> None:
    """Have it called once, inside the group around ``module`` or where that has just ended."""
    left = [function]

    def once(*_: object) -> None:
        if left:
            left.pop()()

    if place == "pre":
        module.register_forward_pre_hook(once)
    else:
        module.register_forward_hook(once)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Block, InContext])
def test_two_threads_in_one_module_may_end_in_any_order(
    manager: PipelineOffloadManager, kind: type[Block], place: str
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
        assert not hook_depth()

    with ThreadPoolExecutor(1) as thread:

        def begin() -> None:
            done.append(thread.submit(evaluate))
            assert is_inside.wait(HANG_S)

        done: list[Any] = []
        at(model[0].part[0], place, begin)
        try:
            found = one_step(model, device)
        finally:
            may_end.set()
        done[0].result(HANG_S)
    assert same_bits(found, expected)
    assert_idle(manager)


def test_another_thread_has_no_chunk(manager: PipelineOffloadManager, elsewhere: Any) -> None:
    device = manager.backend.device
    model = build(Marked, plainly, device)
    expected = one_step(model, device)

    def train() -> None:
        with pytest.raises(GroupStateError, match="start of group 'outer' without a chunk"):
            model(torch.ones(2, WIDTH, device=device))
        assert manager.cur_forward_chunk() is None

    at(model[0].part[0], "pre", lambda: elsewhere(train))
    assert same_bits(one_step(model, device), expected)


def test_another_thread_of_an_attached_schedule_does_nothing(
    manager: PipelineOffloadManager, elsewhere: Any
) -> None:
    device = manager.backend.device
    model = build(Marked, plainly, device)
    expected = one_step(model, device)
    manager.num_attached = 1
    num_groups: list[int] = []

    def train() -> list[Tensor]:
        chunk = manager.cur_forward_chunk()
        assert chunk is None
        x = torch.ones(2, WIDTH, device=device, requires_grad=True)
        return [*torch.autograd.grad(model(x).sum(), x)]

    def train_and_count() -> None:
        chunk = manager.cur_forward_chunk()
        assert chunk is not None
        num_groups.append(len(chunk.groups))
        elsewhere(train)
        num_groups.append(len(chunk.groups))

    at(model[0].part[0], "pre", train_and_count)
    assert same_bits(one_step(model, device), expected)
    assert num_groups == [2, 2]


def test_an_evaluation_elsewhere_does_not_silence_idle_groups(
    manager: PipelineOffloadManager, elsewhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    device = manager.backend.device
    model = build(Block, plainly, device)
    offload_modules(model, {"never": "0.part"})

    @torch.no_grad()
    def evaluate() -> None:
        model(torch.ones(2, WIDTH, device=device))

    at(model[1].part, "pre", lambda: elsewhere(evaluate))
    one_step(model[1], device)
    manager.reset()
    assert "group 'never' never ran" in caplog.text


# Interrupts


FILES = {
    sys.modules[f"pp_offload.{name}"].__file__
    for name in (
        *(f"_hooks.{name}" for name in ("regions", "hook_scopes", "running")),
        "_steps.manager",
        *(f"_megatron.{name}" for name in ("interface", "manager")),
        "_activations.context",
        "_activations.exclusions",
        "modules",
    )
}


class Interrupt(BaseException):
    """As KeyboardInterrupt: hooks at the end of a module's forward are not called."""


@contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """An exception at the line of that number; gives the place, once it was reached."""
    left, reached = [number], []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0 and not reached:
                reached.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
                raise Interrupt(*reached)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield reached
    except Interrupt:
        pass
    finally:
        sys.settrace(before)


def everything_is_off(manager: PipelineOffloadManager) -> None:
    assert_no_hooks()
    assert_idle(manager)
    assert not is_excluded()
    assert not torch_module._global_forward_pre_hooks


KINDS = {"markers": Marked, "context": InContext, "by name": Block}


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", [plainly, anew])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("order", ["cpu", "late"])
def test_an_interrupt_at_any_line_of_a_step(order: str, kind: type[Block], run: Any) -> None:
    """When the next step begins, no hook is there, and the step is right."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(order), config=config) as manager:
        device = manager.backend.device
        model = build(kind, run, device, num=1)
        expected = without(manager, model)
        if kind is Block:
            offload_modules(model, {"a": "*", "b": "*.part"})
        for place in every_line(lambda: one_step(model, device)):
            manager.reset()
            assert_no_hooks()
            assert same_bits(one_step(model, device), expected), place
            everything_is_off(manager)


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", [plainly, anew])
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
def test_an_interrupt_at_any_line_of_a_context(is_inside: bool, run: Any) -> None:
    device = torch.device("cpu")
    offload = OffloadActivations(
        min_offload_size=1, max_fwd_stash_size=2, backend=make_backend("cpu")
    )
    model = build(Block, run, device, num=1)
    expected = one_step(model, device, is_on=False)
    for block in model:
        exclude(block.part[0])
        if is_inside:
            block.run = within(offload, run)

    def step() -> list[Tensor]:
        return one_step(model, device, None if is_inside else offload, is_on=False)

    for place in every_line(step):
        if is_inside:
            leave_all()  # as a manager's reset does; with a checkpoint around, nobody else can
        assert same_bits(step(), expected), place
        assert_no_hooks()
        assert offload.statistics().live_tensors == 0
        assert not is_excluded()
        assert not torch_module._global_forward_pre_hooks
    assert offload.statistics().bytes_offloaded > 0


def within(offload: OffloadActivations, run: Any) -> Any:
    def inside(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def in_context(x: Tensor) -> Tensor:
            with offload:
                return function(x)

        return run(in_context, x)

    return inside


def every_line(step: Callable[[], object]) -> Iterator[str]:
    """Interrupts a step at its first line, then at its second, and so on."""
    step()
    for number in itertools.count():
        with interrupted_at(number) as reached:
            step()
        if not reached:
            assert number > 30, "there are more lines"
            return
        yield f"{number}: {reached[0]}"


# One scope by hand


def test_a_scope_that_was_passed_by_ends_with_the_one_around_it() -> None:
    outer, inner = HookScope(), HookScope()
    outer.enter(partial(Resident))
    inner.enter(partial(Resident))
    outer.leave()
    assert_no_hooks()
    inner.leave()
    outer.leave()


@pytest.mark.parametrize("then", ["leave_all", "another scope", "a scope around"])
def test_a_scope_below_hooks_of_others_goes_when_these_have_gone(then: str) -> None:
    """As where a generator with hooks of its own outlives the forward that began it."""
    around, scope, pack = HookScope(), HookScope(), partial(Resident)
    around.enter(partial(Resident))
    scope.enter(pack)
    others = saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
    others.__enter__()
    scope.leave()
    if then == "a scope around":
        around.leave()
    assert hook_depth() == 3 and top_pack() not in (pack, None)
    others.__exit__(None, None, None)
    assert top_pack() is pack
    if then == "another scope":
        another = HookScope()
        another.enter(partial(Resident))
        another.leave()
        assert hook_depth() == 1
    leave_all()
    assert_no_hooks()
    around.leave()


def test_hooks_of_others_stay() -> None:
    scope = HookScope()
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        top = top_pack()
        scope.enter(partial(Resident))
        torch._C._autograd._pop_saved_tensors_default_hooks()
        scope.leave()
        leave_all()
        assert top_pack() is top
    assert_no_hooks()


def test_a_context_that_somebody_is_in_outlasts_a_step(manager: PipelineOffloadManager) -> None:
    def enter_by_hand() -> None:
        manager.__enter__()

    @contextmanager
    def in_a_generator() -> Iterator[None]:
        with manager:
            yield

    with manager, ExitStack() as stack, in_a_generator():
        stack.enter_context(manager)
        enter_by_hand()
        depths = []
        for _ in range(2):
            depths.append(hook_depth())
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        manager.__exit__()
        assert depths == [4, 4]
    assert_no_hooks()


def test_a_context_whose_function_is_over_ends_with_the_step(
    manager: PipelineOffloadManager,
) -> None:
    def passed_by(number: int) -> None:
        with interrupted_at(number) as reached, manager:
            pass
        assert reached

    for number in range(3):
        passed_by(number)
        manager.reset()
        assert_no_hooks()


def hook_depth() -> int:
    packs = []
    stack = torch._C._autograd
    while (top := stack._top_saved_tensors_default_hooks(True)) is not None:
        packs.append(top)
        stack._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(packs):
        stack._push_saved_tensors_default_hooks(pack, unpack)
    return len(packs)


def test_removing_a_handle_takes_off_what_was_passed_by(manager: PipelineOffloadManager) -> None:
    model = build(Block, plainly, manager.backend.device)

    def interrupt(*_: object) -> None:
        raise Interrupt

    model[0].part[0].register_forward_hook(interrupt)
    handle = offload_modules(model, {"a": "*", "b": "*.part"})
    for end in (handle.remove, manager.abort, manager.reset):
        with pytest.raises(Interrupt):
            one_step(model, manager.backend.device)
        assert handle.modules and (end == handle.remove) <= (hook_depth() == 2)
        end()
        assert_no_hooks()


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
