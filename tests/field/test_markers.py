"""Scopes and markers, and groups that do nothing: F19, F26, F44 and F51."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import assert_idle, assert_no_hooks, begin_microbatch, gradients, group
from helpers.toy import batches, check_steps, make_inputs, make_model, run_step, same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadConfig,
    PipelineOffloadManager,
    configure,
    fine_grained_offloading_group_start,
    offload_modules,
)
from pp_offload._common.torch_private import top_hooks


def commit(y: Tensor, name: str, is_on: bool = True) -> Tensor:
    return off_interface.group_commit(y, name=name) if is_on else y


# F19: groups that interleave, and markers without their counterpart

ROW_BYTES = 6 * 4
"""Of one row of an input; groups save different numbers of rows, so bytes tell them apart."""


def nested(h: Tensor, is_on: bool, is_inside: bool = True) -> Tensor:
    """Start a, start b, commit a, commit b."""
    with ExitStack() as outer:
        outer.enter_context(off_interface(is_on, h, "a"))
        y = h[:1].sin()
        if not is_inside:
            outer.close()
        with off_interface(is_on, h, "b"):
            z = h[:3].cos()
    y = commit(y, "a", is_on)
    return y.sum() + commit(z, "b", is_on).sum()


def one_after_the_other(h: Tensor, is_on: bool) -> Tensor:
    """Both contexts end before the first commit, and the first before the second begins."""
    return nested(h, is_on, is_inside=False)


def functions_in_a_scope(h: Tensor, is_on: bool) -> Tensor:
    """Bare functions; what is saved belongs to the group started last of those still open."""
    with off_interface.get_context(is_on):
        h = fine_grained_offloading_group_start(h, "a") if is_on else h
        y = h[:1].sin()
        h = fine_grained_offloading_group_start(h, "b") if is_on else h
        z = h[:2].cos()
        y = commit(y, "a", is_on)
        z = commit(z.sum() + h[2:3].cos().sum(), "b", is_on)
    return y.sum() + z


@pytest.mark.field("F19")
@pytest.mark.field("F51")
@on_two_backends
@pytest.mark.parametrize("program", [nested, one_after_the_other, functions_in_a_scope])
def test_each_group_keeps_its_own(
    manager: PipelineOffloadManager, program: Callable[[Tensor, bool], Tensor]
) -> None:
    """The innermost group takes what is saved."""

    def step(is_on: bool, number: int) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in make_inputs(3, step=number, device=device)]
        outputs = []
        for leaf in leaves:
            begin_microbatch(is_on)
            # Another storage for each view, so that nothing is shared between the groups.
            outputs.append(sum(program(h.clone(), is_on) for h in (leaf * 2, leaf * 3)))
        while outputs:
            outputs.pop(0).backward()
        return gradients(*leaves)

    device = manager.backend.device
    check_steps(manager, step, steps=1)
    manager.reset()
    assert manager.offload_summary_bytes == {"a": 6 * ROW_BYTES, "b": 18 * ROW_BYTES}
    check_steps(manager, step)


def started(h: Tensor, name: str) -> Tensor:
    with off_interface(True, h, name):
        return h.sin()


def commit_in_the_next_microbatch(h: Tensor) -> Tensor:
    y = started(h, "a")
    begin_microbatch()
    return commit(y, "a")


NOT_STARTED = r"commit of group 'a'.*no group of that name was started"
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "no start": (lambda h: commit(h.sin(), "a"), NOT_STARTED),
    "another name": (lambda h: commit(started(h, "b"), "a"), r"group 'a'.*open groups: \['b'\]"),
    "twice": (lambda h: commit(group(h, torch.sin, name="a"), "a"), "'a'.*committed already"),
    "next microbatch": (commit_in_the_next_microbatch, NOT_STARTED),
    "no commit": (lambda h: started(h, "a"), r"\['a'\].*never committed.*group_commit"),
}


@pytest.mark.field("F19")
@on_two_backends
@pytest.mark.parametrize(("wrong", "says"), WRONG.values(), ids=WRONG)
def test_a_marker_without_its_counterpart(
    manager: PipelineOffloadManager, wrong: Callable[[Tensor], Tensor], says: str
) -> None:
    """The error tells what was found and what to do; the next step is right."""
    (x,) = make_inputs(1, device=manager.backend.device)

    def right(is_on: bool, number: int) -> list[Tensor]:
        begin_microbatch(is_on)
        return list(torch.autograd.grad(nested(x.requires_grad_() * 2, is_on), x))

    for _ in range(2):
        manager.reset()
        begin_microbatch()
        with pytest.raises(GroupStateError, match=says):
            wrong(x.requires_grad_() * 2).sum().backward()
            manager.reset()
        x.grad = None
        assert_no_hooks()
        check_steps(manager, right, steps=2)


# F26: disabled and enabled


@pytest.mark.field("F26")
@on_two_backends
@pytest.mark.parametrize("is_on", [True, False], ids=["on, then off", "off, then on"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_switched_before_a_checkpoint_runs_again(
    manager: PipelineOffloadManager, is_on: bool, early_stop: bool
) -> None:
    """A group right inside a checkpoint, and one with hooks between that pass tensors on to it."""
    begin_microbatch()
    x = torch.linspace(-1, 1, 12).to(manager.backend.device).requires_grad_()
    num_runs = 0

    def function(h: Tensor) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        h = group(h.sin(), lambda h: h.exp().tanh(), name="a")
        pack, unpack = top_hooks(True) or (torch.detach, torch.detach)
        with saved_tensors_hooks(lambda t: pack(t), lambda t: unpack(t)):
            h = group(h, lambda h: h.cos().sigmoid(), name="b")
        with off_interface.get_context(True):  # takes nothing: the checkpoint is to drop it
            return h.sin()

    with set_checkpoint_early_stop(early_stop):
        switch = {True: manager.enable_offload, False: manager.disable_offload}
        for before, after in ((is_on, not is_on), (False, False)):
            switch[before]()
            num_runs = 0
            y = checkpoint(function, x * 1, use_reentrant=False).sum()
            switch[after]()
            y.backward()
            assert num_runs == 2
            assert same_bits(gradients(x), torch.autograd.grad(function(x * 1).sum(), x))
    del y
    assert_idle(manager)


# F44: a group that does nothing is told of


class Two(nn.Module):
    """Calls one of its layers as a module, and of the other only what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.bypassed = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.small = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        for layer in self.bypassed:
            x = layer(x)
        return self.small(x[:, :1])


GROUPS = {"called": "called", "bypassed": "bypassed", "small": "small"}


def train(model: nn.Module, *, numel: int = 6, is_grad: bool = True) -> None:
    """Two steps of two microbatches, and the end of the second."""
    manager = PipelineOffloadManager.get_instance()
    for number in range(2):
        manager.reset()
        for x in batches(2, step=number):
            x = x.to(next(model.parameters()).device).requires_grad_()
            manager.init_model_chunk_offload_handler(None, None, numel)
            with torch.set_grad_enabled(is_grad):
                loss = model(x).square().mean()
            if is_grad:
                loss.backward()
    manager.reset()


@pytest.mark.field("F44")
@on_two_backends
def test_each_idle_name_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two().to(manager.backend.device)
    with offload_modules(model, GROUPS):
        train(model)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("pp_offload: group 'bypassed' never ran")
    assert second.startswith("pp_offload: group 'small' offloaded nothing: none of its 2 groups")
    assert "min_offloaded_tensor_size=6" in second
    assert "the largest was (5, 1), 5 elements: give min_offloaded_tensor_size=5 to" in second


@on_two_backends
def test_another_model_with_the_same_names_is_warned_of_anew(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    for numel in (6, 7):
        caplog.clear()
        model = Two().to(manager.backend.device)
        with offload_modules(model, GROUPS):
            train(model, numel=numel)
            manager.init_model_chunk_offload_handler(None, None, numel)
            x = batches(1)[0].to(manager.backend.device).requires_grad_()
            model(x).sum().backward()  # this step ends when the next model has its groups
        assert [text.count(f"={numel} ") for text in caplog.messages] == [0, 1]


@pytest.mark.field("F44")
def test_the_rest_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """No grad, offload disabled, a pattern taken back or new in this step, markers that work."""
    configure(OffloadConfig(min_offloaded_tensor_size=1))
    model, manager = Two(), PipelineOffloadManager.get_instance()
    with offload_modules(model, GROUPS):
        manager.reset()
        train(model, is_grad=False)
        manager.disable_offload()
        train(model)
        manager.enable_offload()
        manager.reset()
    with offload_modules(model, {"called": "called"}):
        train(model)
        with offload_modules(model, {"bypassed": "bypassed"}):
            begin_microbatch()
            model(batches(1)[0].requires_grad_()).sum().backward()
            manager.reset()
            assert not caplog.records
    run_step(make_model(), batches(2))
    manager.reset()
    assert not caplog.records
