"""A forward that raised inside a group says all there is to say: no warning follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.toy import assert_idle
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    PipelineOffloadManager,
    offload_modules,
)
from pp_offload import fine_grained_offloading_group_start as group_start


class Boom(Exception):
    """What goes wrong."""


class Layer(nn.Module):
    """Computes what it is told to."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def before_it_saves(x: Tensor) -> Tensor:
    raise Boom


def after_it_saved(x: Tensor) -> Tensor:
    y = x.exp()
    assert y.grad_fn is not None
    raise Boom


# Each runs a layer in a group, and leaves out the commit if it is told to.


def interface(x: Tensor, layer: nn.Module, commits: bool) -> Tensor:
    with off_interface(True, x, "mlp") as x:
        y = layer(x)
    return off_interface.group_commit(y, "mlp") if commits else y


def context(x: Tensor, layer: nn.Module, commits: bool) -> Tensor:
    group_start(x, "mlp")
    with off_interface.get_context(True):
        y = layer(x)
    return off_interface.group_commit(y, "mlp") if commits else y


def module(x: Tensor, layer: nn.Module, commits: bool) -> Tensor:
    """Its hook is called after a forward that raised as well."""
    with offload_modules(nn.ModuleDict({"mlp": layer}), {"mlp": "mlp"}):
        y: Tensor = layer(x)
    return y


GROUPS = [interface, context]
"""Ways to make a group whose commit may be forgotten."""


PRODUCTS = [*GROUPS, module]
Product = Callable[[Tensor, nn.Module, bool], Tensor]


def forward(
    manager: PipelineOffloadManager, product: Product, compute: Any, *, commits: bool = True
) -> Any:
    x = torch.ones(3, 4).to(manager.backend.device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    return product(x, Layer(compute), commits)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "group '" in record.getMessage()]


@on_two_backends
@pytest.mark.parametrize("compute", [before_it_saves, after_it_saved])
@pytest.mark.parametrize("product", PRODUCTS)
def test_no_warning_after_a_forward_that_raised(
    manager: PipelineOffloadManager,
    product: Product,
    compute: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with pytest.raises(Boom):
            forward(manager, product, compute)
        manager.reset()
    assert not warned(caplog)
    forward(manager, product, torch.exp).sum().backward()
    manager.reset()
    assert not warned(caplog)
    assert_idle(manager)


@on_two_backends
@pytest.mark.parametrize("product", GROUPS)
def test_a_group_that_was_never_committed(
    manager: PipelineOffloadManager,
    product: Product,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward(manager, product, torch.exp, commits=False).sum().backward()
    with pytest.raises(GroupStateError, match="never committed"):
        manager.reset()
    assert [text for text in warned(caplog) if "'mlp'" in text and "never committed" in text]


@on_two_backends
def test_a_group_that_saved_nothing_and_was_never_committed(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    forward(manager, interface, lambda x: x + 1, commits=False).sum().backward()
    manager.reset()
    assert "'mlp' offloaded nothing: it was started 1 times and never committed" in caplog.text
