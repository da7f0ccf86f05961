"""F51: scopes in scopes, a reset inside one, and scopes on two threads: right, or a clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from field_checks import Chain, hook_depth, make_inputs, part
from processes import HANG_S
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import GroupStateError, PipelineOffloadManager

pytestmark = pytest.mark.field("F51")


def begin(manager: PipelineOffloadManager) -> None:
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)


def nested(is_on: bool, h: Tensor, depth: int) -> Tensor:
    """Groups in groups; something is saved before, in and behind each."""
    name = f"level {depth}"
    with off_interface(is_on, h, name) as h:
        assert hook_depth() == (3 - depth + 1 if is_on else 0)
        h = h.sin()
        if depth > 1:
            h = nested(is_on, h, depth - 1)
        h = h.exp().tanh()
    return off_interface.group_commit(h, name=name) if is_on else h


def test_nested_groups(manager: PipelineOffloadManager) -> None:
    def run(is_on: bool, step: int) -> list[Tensor]:
        x = make_inputs(1, step=step, device=manager.backend.device)[0].requires_grad_()
        if is_on:
            begin(manager)
        h = x * 2
        for _ in range(2):
            h = nested(is_on, h, 3)
            assert hook_depth() == 0
        h.sum().backward()
        return [h.detach(), x.grad]

    for step in range(3):
        assert same_bits(run(True, step), run(False, step)), step
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0


def test_every_tensor_leaves_with_the_innermost_group(
    manager: PipelineOffloadManager,
) -> None:
    begin(manager)
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    moved = []

    def commit(h: Tensor, name: str) -> None:
        before = manager.statistics().bytes_offloaded
        off_interface.group_commit(h, name=name)
        moved.append((manager.statistics().bytes_offloaded - before) // x.nbytes)

    with off_interface(True, x, "outer"):
        a = (x * 2).sin()
        with off_interface(True, a, "inner"):
            b = (a * 2).sin() * 2
            c = (b + 1).sin() * 2
        commit(c, "inner")
        d = (c * 2).sin()
    commit(d, "outer")
    assert moved == [2, 2]
    d.sum().backward()
    del a, b, c, d
    assert_idle(manager)


@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("other", ["hooks", "save_on_cpu"])
def test_with_hooks_of_others(manager: PipelineOffloadManager, place: str, other: str) -> None:
    """The innermost hooks get what is saved; ours are not theirs."""
    device = manager.backend.device
    packed: list[Tensor] = []

    def theirs() -> saved_tensors_hooks:
        if other == "save_on_cpu":
            return save_on_cpu()
        return saved_tensors_hooks(lambda t: packed.append(t) or t.detach().neg(), torch.neg)

    def run(is_on: bool) -> list[Tensor]:
        (x,) = make_inputs(1, device=device)
        if is_on:
            begin(manager)
        h = x.requires_grad_() * 2
        if place == "around":
            with theirs():
                y = part("a", h.sin(), x.detach().t() @ x.detach(), is_on).exp()
        else:
            with off_interface(is_on, h, "a") as h:
                y = h.sin()
                with theirs():
                    y = y.exp()
                y = y.tanh()
            y = off_interface.group_commit(y, name="a") if is_on else y
        y.sum().backward()
        return [y.detach(), x.grad]

    expected = run(False)
    seen = len(packed)
    assert same_bits(run(True), expected)
    if other == "hooks" and place == "inside":
        assert len(packed) == 2 * seen  # as many as without us
    assert manager.statistics().bytes_offloaded > 0
    assert_no_hooks()


def test_reset_inside_a_scope(manager: PipelineOffloadManager) -> None:
    """The group is gone, and its commit says so; what was saved is good, and so is what follows."""
    device = manager.backend.device
    model = Chain(("a",), 2, device=device)
    begin(manager)
    x = make_inputs(1, device=device)[0].requires_grad_()
    h = x * 1
    with off_interface(True, h, "lost") as h:
        y = h.sin()
        manager.reset()
        assert hook_depth() == 1, "the scope ends with its with"
        y = y.exp()
    assert_no_hooks()
    with pytest.raises(GroupStateError, match="'lost' without a chunk.*init_chunk_handler"):
        off_interface.group_commit(y, name="lost")
    manager.init_model_chunk_offload_handler(None, None, 1)
    with pytest.raises(GroupStateError, match="'lost'.*no group of that name was started"):
        off_interface.group_commit(y, name="lost")
    y.sum().backward()
    plain = x.detach().clone().requires_grad_()
    plain.sin().exp().sum().backward()
    assert same_bits([x.grad], [plain.grad])
    assert manager.statistics().bytes_offloaded == 0
    begin(manager)
    model(x).sum().backward()
    assert manager.statistics().bytes_offloaded > 0
    assert_idle(manager)


def test_a_new_microbatch_inside_a_scope(manager: PipelineOffloadManager) -> None:
    """The scope's tensors stay those of its own chunk, which has no commit any more."""
    device = manager.backend.device
    begin(manager)
    x = make_inputs(1, device=device)[0].requires_grad_()
    with off_interface(True, x, "first") as h:
        y = (h * 1).sin()
        manager.init_model_chunk_offload_handler(None, None, 1)
        y = part("second", y, torch.eye(6, device=device), True)
    with pytest.raises(GroupStateError, match="'first'.*open groups: \\[\\]"):
        off_interface.group_commit(y, name="first")
    y.sum().backward()
    plain = x.detach().clone().requires_grad_()
    torch.tanh((plain * 1).sin() @ torch.eye(6, device=device)).sin().sum().backward()
    assert same_bits([x.grad], [plain.grad])
    del y, h
    assert_idle(manager)


def on_threads(*work: Callable[[], object]) -> list[object]:
    """What each returns; the first error of any."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(one) for one in work]]


def test_hooks_of_one_thread(manager: PipelineOffloadManager) -> None:
    """A scope open here does not take what another thread saves meanwhile."""
    device = manager.backend.device
    begin(manager)
    x, other = make_inputs(2, device=device)

    def elsewhere() -> Tensor:
        assert hook_depth() == 0
        leaf = other.clone().requires_grad_()
        leaf.sin().sum().backward()
        return leaf.grad

    h = x.requires_grad_() * 1
    with off_interface(True, h, "here") as h:
        y = h.sin()
        (gradient,) = on_threads(elsewhere)
    off_interface.group_commit(y, name="here")
    assert manager.statistics().bytes_offloaded == h.nbytes
    y.sum().backward()
    assert same_bits([gradient, x.grad], [other.cos(), x.detach().cos()])


def test_microbatches_take_turns_on_threads(manager: PipelineOffloadManager) -> None:
    """One thread after the other, each with whole microbatches."""
    device = manager.backend.device
    on, off = (Chain(("a", "b"), 2, is_on=is_on, device=device) for is_on in (True, False))

    def one(model: Chain, x: Tensor) -> list[Tensor]:
        with manager.backend.activate():
            if model.is_on:
                begin(manager)
            leaf = x.clone().requires_grad_()
            loss = model(leaf).sum()
            loss.backward()
        return [loss.detach(), leaf.grad]

    for step, x in enumerate(make_inputs(4, device=device)):
        (got,) = on_threads(lambda x=x: one(on, x))
        assert same_bits(got, one(off, x)), step
    del got
    assert_idle(manager)


def test_two_scopes_at_once_on_two_threads(manager: PipelineOffloadManager) -> None:
    """A chunk is current on its thread: who has none is told, and nothing stays behind."""
    device = manager.backend.device
    inputs = make_inputs(2, device=device)
    barrier = threading.Barrier(2, timeout=HANG_S)
    errors: list[GroupStateError] = []
    begin(manager)

    def run(number: int) -> None:
        barrier.wait()
        if number == 0:
            manager.init_model_chunk_offload_handler(None, None, 1)
        barrier.wait()
        try:
            part("a", inputs[number].requires_grad_() * 1, torch.eye(6, device=device), True)
        except GroupStateError as error:
            errors.append(error)
        assert_no_hooks()
        barrier.wait()

    on_threads(lambda: run(0), lambda: run(1))
    (error,) = errors
    assert "without a chunk on thread" in str(error)
    begin(manager)
    Chain(("a",), 2, device=device)(inputs[0]).sum().backward()
    assert_idle(manager)
