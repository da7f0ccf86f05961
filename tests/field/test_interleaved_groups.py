"""F19: groups may interleave; a marker without its counterpart is a clear error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from field_checks import make_inputs
from torch import Tensor
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    GroupStateError,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
)

pytestmark = pytest.mark.field("F19")

ROW_BYTES = 6 * 4
"""Of one row of an input; groups save different numbers of rows, so bytes tell them apart."""

Program = Callable[[Tensor, bool], Tensor]


def commit(y: Tensor, name: str, is_on: bool) -> Tensor:
    return off_interface.group_commit(y, name=name) if is_on else y


def both_committed(y: Tensor, z: Tensor, is_on: bool) -> Tensor:
    y = commit(y, "a", is_on)
    return y.sum() + commit(z, "b", is_on).sum()


def nested(h: Tensor, is_on: bool) -> Tensor:
    """Start a, start b, commit a, commit b; contexts can only end last in, first out."""
    with off_interface(is_on, h, "a"):
        y = h[:1].sin()
        with off_interface(is_on, h, "b"):
            z = h[:3].cos()
    return both_committed(y, z, is_on)


def one_after_the_other(h: Tensor, is_on: bool) -> Tensor:
    """Both contexts end before the first commit."""
    with off_interface(is_on, h, "a"):
        y = h[:1].sin()
    with off_interface(is_on, h, "b"):
        z = h[:3].cos()
    return both_committed(y, z, is_on)


def functions_in_a_scope(h: Tensor, is_on: bool) -> Tensor:
    """Bare functions; what is saved belongs to the group started last of those still open."""
    with off_interface.get_context(is_on):
        if is_on:
            h = fine_grained_offloading_group_start(h, "a")
        y = h[:1].sin()
        if is_on:
            h = fine_grained_offloading_group_start(h, "b")
        z = h[:2].cos()
        y = commit(y, "a", is_on)
        z = z.sum() + h[2:3].cos().sum()
        z = commit(z, "b", is_on)
    return y.sum() + z


def b_in_the_midst_of_a(h: Tensor, is_on: bool) -> Tensor:
    """Group b begins and ends while a is open; a goes on afterwards."""
    with off_interface(is_on, h, "a"):
        with off_interface(is_on, h, "b"):
            z = h[:3].cos()
        z = commit(z, "b", is_on)
        y = h[:1].sin()
    return commit(y, "a", is_on).sum() + z.sum()


@pytest.mark.parametrize(
    "program", [nested, one_after_the_other, functions_in_a_scope, b_in_the_midst_of_a]
)
def test_each_group_keeps_its_own(manager: PipelineOffloadManager, program: Program) -> None:
    device = manager.backend.device

    def step(is_on: bool, number: int) -> list[Tensor]:
        if is_on:
            manager.reset()
        leaves = [x.requires_grad_() for x in make_inputs(3, step=number, device=device)]
        outputs = []
        for leaf in leaves:
            if is_on:
                off_interface.init_chunk_handler(None, None, 1)
            # Another storage for each view, so that nothing is shared between the groups.
            outputs.append(sum(program(h.clone(), is_on) for h in (leaf * 2, leaf * 3)))
        while outputs:
            outputs.pop(0).backward()
        return [leaf.grad for leaf in leaves]

    assert same_bits(step(True, 0), step(False, 0))
    manager.reset()
    assert manager.offload_summary_bytes == {"a": 6 * ROW_BYTES, "b": 18 * ROW_BYTES}
    for number in range(1, 4):
        assert same_bits(step(True, number), step(False, number)), number
        assert_no_hooks()
        assert_idle(manager)


@pytest.mark.parametrize("is_first_first", [True, False])
def test_one_name_open_for_two_microbatches(
    manager: PipelineOffloadManager, is_first_first: bool
) -> None:
    """Each commit is of its own chunk, whichever is current."""
    device = manager.backend.device
    manager.reset()
    leaves = [x.requires_grad_() for x in make_inputs(2, device=device)]
    opened = []
    for leaf in leaves:
        off_interface.init_chunk_handler(None, None, 1)
        chunk = manager.cur_forward_chunk()
        h = FineGrainedOffloadingGroupStartFunction.apply(leaf * 2, chunk, "a")
        with manager:
            y = h.sin()
        opened.append((chunk, y))
        del h, y
    for chunk, y in opened if is_first_first else opened[::-1]:
        before = manager.statistics().bytes_offloaded
        FineGrainedOffloadingGroupCommitFunction.apply(y, chunk, "a", None, False)
        assert manager.statistics().bytes_offloaded == before + leaves[0].nbytes
    for _, y in opened:
        y.sum().backward()
    expected = [torch.autograd.grad((x * 2).sin().sum(), x)[0] for x in leaves]
    assert same_bits([x.grad for x in leaves], expected)


def commit_without_start(h: Tensor) -> Tensor:
    return commit(h.sin(), "a", True)


def commit_of_another_name(h: Tensor) -> Tensor:
    with off_interface(True, h, "b"):
        y = h.sin()
    return commit(y, "a", True)


def commit_twice(h: Tensor) -> Tensor:
    with off_interface(True, h, "a"):
        y = h.sin()
    return commit(commit(y, "a", True), "a", True)


def commit_in_the_next_microbatch(h: Tensor) -> Tensor:
    with off_interface(True, h, "a"):
        y = h.sin()
    off_interface.init_chunk_handler(None, None, 1)
    return commit(y, "a", True)


def start_without_commit(h: Tensor) -> Tensor:
    with off_interface(True, h, "a"):
        y = h.sin()
    return y


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (commit_without_start, r"commit of group 'a'.*no group of that name was started"),
        (commit_of_another_name, r"commit of group 'a'.*open groups: \['b'\]"),
        (commit_twice, r"commit of group 'a'.*committed already"),
        (commit_in_the_next_microbatch, r"commit of group 'a'.*no group of that name was started"),
        (start_without_commit, r"\['a'\].*never committed.*group_commit"),
    ],
)
def test_a_marker_without_its_counterpart(
    manager: PipelineOffloadManager, wrong: Callable[[Tensor], Tensor], says: str
) -> None:
    """The error says what was found and what to do; the next step is right."""
    (x,) = make_inputs(1, device=manager.backend.device)

    def right() -> Tensor:
        manager.reset()
        off_interface.init_chunk_handler(None, None, 1)
        return torch.autograd.grad(nested(x.requires_grad_() * 2, True), x)[0]

    expected = torch.autograd.grad(nested(x.requires_grad_() * 2, False), x)[0]
    for _ in range(2):
        manager.reset()
        off_interface.init_chunk_handler(None, None, 1)
        with pytest.raises(GroupStateError, match=says):
            wrong(x.requires_grad_() * 2).sum().backward()
            manager.reset()
        x.grad = None
        assert_no_hooks()
        assert same_bits([right(), right()], [expected, expected])
        assert_idle(manager)
