"""F12: what is recomputed is what was computed: calls are counted apart, routes do not flip,
and buffers change once.

PyTorch alone is the control: where it computes a route again, gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from conftest import BACKENDS, make_backend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy import same_bits

from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.checkpointing import SelectiveOpACParams

pytestmark = pytest.mark.field("F12")

MM, TOPK = "ops.aten.mm.default", "ops.aten.topk.default"


def recompute_for(backend, **options) -> Recompute:
    """Keeps what it is told to, in the stash if it is to be offloaded."""
    policy = SelectiveOpACParams(**options).policy()
    stash = ActivationStash("ops", min_offload_size=1, backend=backend)
    return Recompute(stash, policy=policy, offload_inputs=False)


class Odd(nn.Module):
    """Three products without bias: every second one is another in each second run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


@pytest.mark.parametrize("where", ["save_ops_keys", "offload_ops_keys"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_calls_are_counted_apart(kind: str, where: str) -> None:
    backend = make_backend(kind)
    with backend.activate():
        torch.manual_seed(1)
        model = Odd().to(backend.device)
        recompute = recompute_for(backend, **{where: [MM]})
        found = []
        for run in (recompute, lambda function, x: function(x)):
            leaves = [torch.full((4, 8), n / 3).to(backend.device) for n in range(3)]
            losses = [run(model, x.requires_grad_()).sum() for x in leaves]
            while losses:
                losses.pop(0).backward()
            found.append([*(x.grad for x in leaves), *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert same_bits(*found)
        counts = recompute.counts
        assert counts.saved_outputs + counts.offloaded_outputs == 3 * 2, "the first and the third"


class Routed(nn.Module):
    """Two experts, one for each token; where both score the same, whoever is asked decides."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.whims: Iterator[float] = cycle([1e-6, -1e-6])

    def forward(self, x: Tensor) -> Tensor:
        whim = next(self.whims)
        scores = torch.stack([x.mean(-1), x.mean(-1) + whim], dim=-1)
        weight, chosen = scores.topk(1, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = torch.where(chosen == number, expert(x), y)
        return (y * weight.sigmoid()).square()


@pytest.mark.parametrize("where", ["save_ops_keys", "offload_ops_keys"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_routes_do_not_flip(kind: str, where: str) -> None:
    backend = make_backend(kind)
    with backend.activate():
        found = []
        for run in (
            recompute_for(backend, **{where: [TOPK]}),
            lambda function, x: function(x),
            lambda function, x: checkpoint(function, x, use_reentrant=False),
        ):
            torch.manual_seed(1)
            model = Routed().to(backend.device)
            x = torch.randn(6, 8).to(backend.device).requires_grad_()
            y = run(model, x)
            y.sum().backward()
            found.append(
                [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
            )
        kept, plain, flipped = found
        assert same_bits(kept, plain)
        assert torch.equal(flipped[0], plain[0]) and not torch.equal(flipped[1], plain[1])


class Counts(nn.Module):
    """Buffers of every sort that a forward changes, and that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("large", torch.zeros(2**15, 1))
        self.many = nn.BatchNorm1d(2**14 + 1, affine=False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.large += 1
        scale = self.replaced + self.large[:6]
        self.many(x[:, :1].expand(-1, 2**14 + 1) * 1)
        y = nn.functional.batch_norm(x, self.mean, self.var, training=True)
        return self.spectral(self.norm(x * scale)).sigmoid() * y.tanh()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", BACKENDS)
def test_buffers_change_once(kind: str, use_reentrant: bool) -> None:
    backend = make_backend(kind)
    with backend.activate():
        found = []
        for run in (
            Recompute(use_reentrant=use_reentrant),
            lambda function, x: function(x),
            lambda function, x: checkpoint(function, x, use_reentrant=use_reentrant),
        ):
            torch.manual_seed(1)
            model = Counts().to(backend.device)
            leaves = [torch.randn(6, 8).to(backend.device).requires_grad_() for _ in range(3)]
            losses = [run(model, x).square().sum() for x in leaves]
            while losses:
                losses.pop(0).backward()
            gradients = [x.grad for x in leaves] + [p.grad for p in model.parameters()]
            found.append(gradients + [buffer.clone() for buffer in model.buffers()])
        once, plain, twice = found
        assert same_bits(once, plain)
        assert not same_bits(twice, plain)
