"""F34: an activation that several operations save is copied once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

pytestmark = pytest.mark.field("F34")


@pytest.mark.parametrize("split", [3, 1, "each"])
def test_one_copy(manager: PipelineOffloadManager, split: int | str) -> None:
    """Three operations, in one group or over several, that save the same tensor."""
    device = manager.backend.device
    groups: list[Any] = [[0], [1], [2]] if split == "each" else [range(split), range(split, 3)]

    def run(is_on: bool) -> tuple[list[Tensor], int]:
        x, *values = make_inputs(4, device=device)
        weights = [nn.Parameter(value) for value in values]
        x.requires_grad_()
        h = x * 2
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        y = 0
        for number, members in enumerate(groups):
            name = f"group {number}"
            with off_interface(is_on, h, name) as marked:
                part = sum((marked * weights[i] for i in members), start=h * 0)
            y = y + (off_interface.group_commit(part, name=name) if is_on else part)
            del marked, part
        nbytes = h.nbytes
        del h
        if is_on:
            assert manager.statistics().live_tensors == 1
            assert manager.statistics().host_bytes_in_use == nbytes
        y.sum().backward()
        return [x.grad, *(w.grad for w in weights)], nbytes

    got, nbytes = run(True)
    assert same_bits(got, run(False)[0])
    statistics = manager.statistics()
    assert statistics.bytes_offloaded == nbytes
    assert statistics.host_bytes_peak == nbytes
    assert_idle(manager)


def test_input_used_inside_and_outside(manager: PipelineOffloadManager) -> None:
    """As x in x + attention(q(x), k(x), v(x)): the bits do not depend on the markers."""
    device = manager.backend.device

    def run(is_on: bool) -> list[Tensor]:
        x, *values = make_inputs(4, device=device)
        weights = [nn.Parameter(value) for value in values]
        x.requires_grad_()
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 2
        with off_interface(is_on, h, "a") as marked:
            y = sum((marked * weight for weight in weights[1:]), start=marked * weights[0])
        if is_on:
            y = off_interface.group_commit(y, name="a")
        (y + torch.sin(h)).sum().backward()
        return [x.grad, *(w.grad for w in weights)]

    assert same_bits(run(True), run(False))


@pytest.mark.parametrize("tiers", [("host",), ("disk",)])
@pytest.mark.parametrize("kind", BACKENDS)
def test_halves_that_change_apart_are_not_taken_for_each_other(
    kind: str, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    """The halves have version counters of their own, so equal versions say nothing."""

    def gradient(is_on: bool, device: str) -> Tensor:
        p = torch.linspace(-1, 1, 64).to(device).requires_grad_()
        total = torch.zeros((), device=device)
        for name, half in zip("ab", torch.unsafe_chunk(p * 1.5, 2), strict=True):
            with off_interface(is_on, half, name) as half:
                half = half.sigmoid_()
            if is_on:
                half = off_interface.group_commit(half, name=name)
            total = total + (half * torch.arange(32.0).to(device)).sum()
        return torch.autograd.grad(total, p)[0]

    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
    )
    with use_backend(make_backend(kind), config=config) as manager:
        device = str(manager.backend.device)
        expected = gradient(False, device)
        for _ in range(3):
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
            assert gradient(True, device).equal(expected)
        assert manager.statistics().bytes_offloaded > 0
