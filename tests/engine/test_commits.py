"""What a commit takes, whatever came before it and whatever goes on beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from conftest import make_backend, on_two_backends
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadConfig,
    PipelineOffloadManager,
    use_backend,
)
from pp_offload.backends import Backend


def leaf_on(backend: Backend) -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).to(backend.device).requires_grad_()


@on_two_backends
def test_a_group_that_backward_used_before_its_commit_stays(
    manager: PipelineOffloadManager,
) -> None:
    x = leaf_on(manager.backend)
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, x * 2, "core") as h:
        y = h.sin()
        (inside,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y = off_interface.group_commit(y, name="core")
    assert manager.statistics().bytes_offloaded == 0
    (behind,) = torch.autograd.grad(y.sum(), x)
    assert same_bits([inside], [behind])


@pytest.mark.parametrize(
    ("kind", "tiers", "advice"),
    [
        ("late", ("host",), 'tiers=("host", "disk")'),
        ("cpu", ("host",), 'tiers=("host", "disk")'),
        ("late", ("host", "disk"), "passes through host memory"),
        ("late", ("disk",), "passes through host memory"),
    ],
)
def test_over_budget_the_advice_is_nothing_that_is_set(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    tiers: tuple[str, ...],
    advice: str,
) -> None:
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
        host_budget_bytes=0,
    )
    with use_backend(make_backend(kind), config=config), caplog.at_level(logging.WARNING):
        run_step(make_model(), batches(2))
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [text for text in messages if "over the budget" in text]
    assert "raise host_budget_bytes" in message
    assert advice in message
    assert ("tiers=" in message) == (tiers == ("host",))
