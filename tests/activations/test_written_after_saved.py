"""An operator that writes what it saved: autograd saves before the kernel runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import gradients
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload import OffloadActivations, checkpoint
from pp_offload.backends import Backend


def step(device: torch.device, context: OffloadActivations | None) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.RReLU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(4, 8).to(device)
    with context or nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(*model.parameters())]


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
def test_noise_that_is_drawn_after_it_was_saved(backend: Backend, num: int) -> None:
    """Whichever of the tensors of an operator is the last for which there is room."""
    with backend.activate():
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=num, backend=backend)
        for _ in range(2):
            assert same_bits(step(backend.device, context), step(backend.device, None))
        assert context.statistics().bytes_offloaded > 0


@on_two_backends
@pytest.mark.parametrize("offload", [True, False])
def test_a_checkpoint_computes_until_the_noise_is_drawn(offload: bool, backend: Backend) -> None:
    results = []
    for is_on in (False, True):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 8), nn.RReLU()).to(backend.device)
        x = torch.randn(64, 8).to(backend.device).requires_grad_()
        options = {"offload_inputs": offload, "min_offload_size": 1, "backend": backend}
        with backend.activate():
            y = checkpoint(layer.forward, x, **options) if is_on else layer(x)
            y.square().sum().backward()
        results.append(gradients(x, *layer.parameters()))
    assert same_bits(*results)


@pytest.mark.parametrize("num", [1, 5])
def test_a_leaf_that_a_fused_optimizer_changes_between_two_forwards(
    backend: Backend, num: int
) -> None:
    """Its version does not change, and the graph of an earlier forward holds what that saved."""
    results = []
    for is_on in (False, True):
        torch.manual_seed(0)
        with backend.activate():
            w = torch.randn(16, 16).to(backend.device).requires_grad_()
            optimizer = torch.optim.AdamW([w], lr=0.1, fused=True)
            context = OffloadActivations(
                min_offload_size=1, max_fwd_stash_size=num, backend=backend
            )
            alive, grads = [], []
            for _ in range(3):
                for _ in range(2):
                    x = torch.ones(4, 16).to(backend.device).requires_grad_()
                    with context if is_on else nullcontext():
                        alive.append((x.sin() @ w).cos().sum())
                optimizer.zero_grad()
                alive[-1].backward()
                backend.synchronize()  # or it writes into what is copied, as autograd lets it
                optimizer.step()
                grads.append(x.grad)
            results.append(grads)
    assert same_bits(*results)
