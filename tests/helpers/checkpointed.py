"""A model with all that makes recomputation hard, plain or checkpointed in some way."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from helpers.sliced import Call, Order, first_in_first_out, last_in_first_out, one_by_one, twice
from pp_offload import OffloadConfig
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.backends import Backend
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    FullACParams,
    SelectiveLayerACParams,
)

FULL, EVERY_FEW, BY_OP = ActivationCheckpointingVariants
MM, ADDMM, MAX = "ops.aten.mm.default", "ops.aten.addmm.default", "ops.aten.max.dim"

OFFLOADED = {"offload_inputs": True, "min_offload_size": 1}
WAYS: dict[str, tuple[ActivationCheckpointingVariants, Any]] = {
    "full": (FULL, FullACParams()),
    "full, offload": (FULL, FullACParams(**OFFLOADED)),
    "reentrant": (FULL, FullACParams(use_reentrant=True)),
    "reentrant, offload": (FULL, FullACParams(use_reentrant=True, **OFFLOADED)),
    "full, disk, unchecked": (
        FULL,
        FullACParams(
            config=OffloadConfig(tiers=("disk",)),
            determinism_check="none",
            early_stop=False,
            **OFFLOADED,
        ),
    ),
    "every second layer, offload": (EVERY_FEW, SelectiveLayerACParams(ac_freq=2, **OFFLOADED)),
    "products saved": (BY_OP, {"save_ops_keys": [MM, ADDMM]}),
    "products offloaded": (BY_OP, {"offload_ops_keys": [MM, ADDMM], "min_offload_size": 1}),
    "all, offload": (
        BY_OP,
        {
            "save_ops_keys": [MAX],
            "offload_ops_keys": [MM, ADDMM],
            "recompute_every": {ADDMM: 2},
            **OFFLOADED,
        },
    ),
}
"""How a model is checkpointed, by name. Where torch is too old, options by operator raise."""


class Block(nn.Module):
    """Products with and without bias, dropout, batch norm, a maximum; inputs everywhere.

    Its last operator draws noise into what autograd has saved already.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.mix = nn.Linear(width, width)
        self.norm, self.noise = nn.BatchNorm1d(width), nn.RReLU()
        self.register_buffer("calls", torch.zeros(()))

    def forward(
        self, x: Tensor, context: dict[str, Any], *, scales: tuple[Tensor, float]
    ) -> Tensor:
        self.calls += 1
        y = self.down(torch.sigmoid(self.up(x * context["mask"])))
        y = nn.functional.dropout(self.norm(y), 0.25) * scales[0] * scales[1]
        top, _ = y.max(dim=-1, keepdim=True)
        return self.noise(self.mix(x) + y * torch.tanh(self.calls + top))


class Model(nn.Module):
    """A few blocks."""

    def __init__(self, num: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num))

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, {"mask": mask, "name": "a"}, scales=(scale, 0.5))
        return x


def make(device: torch.device, way: str | None, backend: Backend) -> tuple[Model, Any]:
    """The model, the same each time, and what the checkpoints count."""
    torch.manual_seed(3)
    model = Model().to(device)
    return model, None if way is None else apply(model, "blocks", way, backend)


def apply(model: nn.Module, layers: str, way: str, backend: Backend) -> Recompute:
    """Checkpoint ``layers`` that way."""
    variant, params = WAYS[way]
    return ActivationCheckpointing.apply_activation_checkpointing_(
        variant, layers, model, params, backend=backend
    )


def dropped(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = [call(x).square().mean() for x in leaves]
    del losses[1]
    for loss in losses:
        loss.backward()
    return losses


ORDERS: list[Order] = [one_by_one, first_in_first_out, last_in_first_out, dropped, twice]


def results(
    model: nn.Module,
    order: Order,
    step: int,
    device: torch.device,
    *,
    context: Any = None,
    num: int = 3,
    rows: int = 6,
) -> list[Tensor]:
    """Losses, gradients and buffers of a step, whose number draws the inputs of its microbatches.
    The ``context`` is around each forward.
    """
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(rows, 8, generator=generator).to(device) for _ in range(3 * num)]
    leaves = [x.requires_grad_() for x in drawn[::3]]
    others = dict(zip(leaves, zip(drawn[1::3], drawn[2::3], strict=True), strict=True))
    torch.manual_seed(50 + step)

    def call(x: Tensor) -> Tensor:
        with context or nullcontext():
            return model(x, *others[x])  # type: ignore[no-any-return]

    losses = order(call, leaves)
    tensors = [*(loss.detach() for loss in losses), *(x.grad for x in leaves if x.grad is not None)]
    tensors += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    tensors += [buffer.clone() for buffer in model.buffers()]
    model.zero_grad()
    return tensors
