"""A forward that raised inside a group says all there is to say: no warning follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import assert_idle, begin_step, group
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, offload_modules
from pp_offload import fine_grained_offloading_group_start as group_start

Function = Callable[[Tensor], Tensor]


class Boom(Exception):
    """What goes wrong."""


def before_it_saves(x: Tensor) -> Tensor:
    raise Boom


def after_it_saved(x: Tensor) -> Tensor:
    y = x.exp()
    assert y.grad_fn is not None
    raise Boom


def in_context(x: Tensor, compute: Function) -> Tensor:
    group_start(x, "part")
    with off_interface.get_context(True):
        y = compute(x)
    return off_interface.group_commit(y, "part")


def in_module(x: Tensor, compute: Function) -> Tensor:
    """Its hook is called after a forward that raised as well."""
    layer = nn.Identity()
    layer.forward = compute  # type: ignore[method-assign]
    with offload_modules(nn.ModuleDict({"part": layer}), {"part": "part"}):
        return layer(x)  # type: ignore[no-any-return]


@on_two_backends
@pytest.mark.parametrize("compute", [before_it_saves, after_it_saved])
@pytest.mark.parametrize("product", [group, in_context, in_module])
def test_no_warning_after_a_forward_that_raised(
    manager: PipelineOffloadManager,
    product: Callable[..., Tensor],
    compute: Function,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    x = torch.ones(3, 4).to(manager.backend.device).requires_grad_()
    for _ in range(2):
        begin_step()
        with pytest.raises(Boom):
            product(x, compute)
    begin_step()
    product(x, torch.exp).sum().backward()
    manager.reset()
    assert "group '" not in caplog.text
    assert_idle(manager)
