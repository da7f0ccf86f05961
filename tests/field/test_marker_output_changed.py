"""F25: what a group marker gives back may be changed in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from field_checks import make_inputs
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    PipelineOffloadManager,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_start,
)

pytestmark = pytest.mark.field("F25")

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda t: t.add_(1),
    "mul": lambda t: t.mul_(3),
    "relu": lambda t: t.relu_(),
    "a view": lambda t: t[1:].add_(2),
    "by one of its own": lambda t: t.copy_(t.detach().flip(0)),
    "with a gradient": lambda t: t.add_(t.sum()),
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def nothing(tensor: Tensor) -> None:
    """Change nothing."""


def compute(x: Tensor) -> tuple[Tensor, Tensor]:
    """Saves what nobody changes: two products of its input."""
    return (x * 1.5).sin() * 2, (x * 0.5).tanh() + 1


def as_context(is_on: bool, h: Tensor, inside: Callable[[Tensor], object]) -> tuple[Tensor, Tensor]:
    with off_interface(is_on, h, "core") as h:
        inside(h)
        y, z = compute(h)
    if is_on:
        y, z = off_interface.group_commit((y, z), name="core")
    return y, z


def as_functions(
    is_on: bool, h: Tensor, inside: Callable[[Tensor], object]
) -> tuple[Tensor, Tensor]:
    """Tensors are saved through the manager's own context, which may be around all groups."""
    with off_interface.get_context(is_on):
        if is_on:
            h = fine_grained_offloading_group_start(h, name="core")
        inside(h)
        y, z = compute(h)
        if is_on:
            y = fine_grained_offloading_group_commit(y, name="core")
    return y, z


def run(
    manager: PipelineOffloadManager,
    is_on: bool,
    group: Callable[..., tuple[Tensor, Tensor]],
    inside: Callable[[Tensor], object] = nothing,
    after: Callable[[Tensor], object] = nothing,
) -> list[Tensor]:
    """Two groups in a row, the outputs of whose markers are changed; output and gradient."""
    (x,) = make_inputs(1, device=manager.backend.device)
    x.requires_grad_()
    if is_on:
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 2
    for _ in range(2):
        y, z = group(is_on, h, inside)
        after(y)
        after(z)
        h = y + z
    h.square().sum().backward()
    return [h.detach(), x.grad]


@changes
@pytest.mark.parametrize("group", [as_context, as_functions])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_marker_output_changed_in_place(
    manager: PipelineOffloadManager,
    change: Callable[[Tensor], object],
    group: Callable[..., tuple[Tensor, Tensor]],
    when: str,
) -> None:
    for _ in range(2):
        got = run(manager, True, group, **{when: change})
        assert same_bits(got, run(manager, False, group, **{when: change}))
        assert_idle(manager)
    assert not same_bits(got, run(manager, False, group))
    assert manager.statistics().bytes_offloaded > 0


def test_input_changed_after_the_commit(manager: PipelineOffloadManager) -> None:
    """The residual stream is added to in place, where nothing saved it."""
    device = manager.backend.device

    def residual(is_on: bool) -> list[Tensor]:
        (x,) = make_inputs(1, device=device)
        x.requires_grad_()
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 2
        for _ in range(3):
            y, z = as_context(is_on, h, nothing)
            h += y * z
        h.sum().backward()
        return [h.detach(), x.grad]

    assert same_bits(residual(True), residual(False))
    assert_idle(manager)


def test_markers_are_not_views(manager: PipelineOffloadManager) -> None:
    h = torch.ones(3, device=manager.backend.device, requires_grad=True) * 2
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, h, "core") as inside:
        assert not inside._is_view()
        y = inside + 1
    out = off_interface.group_commit(y, name="core")
    assert not out._is_view()
    assert out.grad_fn is not None and out.grad_fn.name() == "AddBackward0"
