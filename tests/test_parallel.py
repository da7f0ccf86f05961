"""Every schedule, and every product in models that are replicated, sharded or cut into stages, on
ranks: same bits.

In DDP, FSDP1 and FSDP2: a context around the forward, groups by name, markers and checkpoints; of
sharded models no byte of a gathered parameter leaves. In DDP alone: parameters on the host. Stages
of a pipeline: replicated, sharded, or given a product as a whole. Layers that exchange
activations (context and expert parallel), and DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import BEFORE_2_13
from helpers.products import PRODUCTS
from helpers.ranks import run_ranks
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from pp_offload import OffloadActivations, OffloadError, OffloadModel, offload_layers
from pp_offload.testing import SimulatedBackend

LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
SCHEDULES = [
    *(("gpipe", 1), ("1f1b", 1)),
    *((name, virtual) for name in LOOPED for virtual in (1, 2, 3)),
    *([] if BEFORE_2_13 else [("zbv", 2), ("dualpipev", 2)]),  # which is torch's, over gloo
    ("csv", 2),
]
"""Each with how many stages a rank has."""


@pytest.mark.field("F22")
@pytest.mark.smoke
@pytest.mark.quick(2)
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    """Groups come ahead of their use from the first step on, and nothing is left."""
    cases = [
        f"stage/plain/{name}/{virtual}/{('reload', 'keep')[(number + world // 2) % 2]}"
        for number, (name, virtual) in enumerate(SCHEDULES)
    ]
    for rank, results in enumerate(run_ranks(world, cases, tmp_path)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank} of {world}"
            assert facts["equal"] == [True, True] and min(facts["offloaded"]) > 0, where
            assert all("mlp" in table for table in facts["table"]), where
            for steps in facts["steps"]:
                assert not any(step.host_bytes_in_use or step.live_tensors for step in steps), where
                assert steps[2].on_demand_reloads == steps[1].on_demand_reloads, where


SOME = [
    # Each wrapper once at least, and most products
    "replica/ddp/groups",
    "replica/ddp/parameters",
    "replica/ddp, accumulated/context",
    "replica/ddp, accumulated/parameters, checkpoint",
    "replica/ddp, static graph/reentrant, offload",
    "replica/ddp, unused/all, offload",
    "replica/fsdp1/in place, full, offload",
    "replica/fsdp2/context",
    "replica/fsdp2, accumulated/groups",
    "replica/fsdp2, bf16/markers",
    "replica/fsdp2, kept/full, offload",
    *("replica/ring/context", "replica/experts/groups"),
    # With DDP, other schedules fail in its reducer without offload, too
    *("stage/ddp/1f1b", "stage/fsdp2/interleaved1f1b"),
    *("stage/all, offload/interleaved1f1b", "stage/context/1f1b"),
    "collective",
]
WRAPPERS = (
    *("ddp", "ddp, accumulated", "ddp, static graph", "ddp, unused"),
    *("fsdp2", "fsdp2, accumulated", "fsdp2, bf16", "fsdp2, kept"),
)
ALL = [
    *(
        f"replica/{wrapper}/{product}"
        for wrapper in WRAPPERS
        for product in PRODUCTS
        if not (wrapper.startswith("fsdp2") and product.startswith("parameters"))
        # DDP looks for what is unused before the layers run again: an error without offload as well
        and (wrapper, product) != ("ddp, unused", "reentrant, offload")
    ),
    "replica/fsdp1/in place, all, offload",
    *("replica/ring/groups", "replica/experts/context"),
    *(f"stage/full, offload/{name}" for name in ("1f1b", "interleavedzerobubble")),
    *(f"stage/context/{name}" for name in ("gpipe", "interleavedzerobubble")),
]
ON_FOUR_RANKS = [
    *("stage/ddp/1f1b", "stage/fsdp2, kept/gpipe", "stage/fsdp2, bf16/1f1b"),
    *("stage/fsdp2/interleaved1f1b", "stage/fsdp2, kept/interleavedzerobubble"),
    "stage/fsdp2, kept/zbv",
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, SOME, id="some"),
        pytest.param(2, sorted({*ALL} - {*SOME}), id="rest", marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR_RANKS, id="four ranks", marks=pytest.mark.slow),
    ],
)
def test_equal_bit_for_bit(world: int, cases: list[str], tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(world, cases, tmp_path)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank} of {world}: {facts}"
            assert facts["equal"] == [True, True], where
            assert min(facts["offloaded"]) > 0, where
            assert facts["whole seen"] == [0, 0], where
            if "parameters" not in case:
                assert facts["live"] == [0, 0], where
            if "fsdp2" in case or "replica" in case and "parameters" not in case:
                assert min(facts["whole"]) > 0 < min(facts["seen"]), where


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


class Experts(nn.Module):
    """Whose weights are on ranks of a mesh, and used there as plain tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weight = distribute_tensor(torch.randn(16, 16) / 4, mesh, [Shard(0)])
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local()
        return x + torch.tanh(x @ weight) @ weight.t()


@pytest.mark.parametrize("told", ["before", "behind", "never"])
def test_gathered_parameters_that_are_used_as_plain_tensors_stay(told: str, one_rank: None) -> None:
    """From the first step on; FSDP empties and refills their memory."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(Experts(mesh["tp"]) for _ in range(3)))
    backends = [SimulatedBackend(kind) for kind in ("late", "random")]
    options = {"min_offload_size": 1, "max_fwd_stash_size": 2}
    contexts = [OffloadActivations(**options, backend=backend) for backend in backends]
    for when in ("before", "behind"):
        for context in contexts if told == when else ():
            context.keep_module(model)
        for layer in model if when == "before" else ():
            fully_shard(layer, mesh=mesh["dp"])
    seen: list[list[Tensor]] = []
    for context in (nullcontext(), *contexts):
        with context.stash.backend.activate() if context in contexts else nullcontext():
            for step in range(2):
                model.zero_grad()
                with context:
                    loss = model(torch.full((4, 16), 0.1 + step)).square().sum()
                loss.backward()
                seen.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(context.statistics().bytes_offloaded > 0 for context in contexts)
    for got, expected in zip(seen[2:], seen[:2] * 2, strict=True):
        assert same_bits(got, expected)


def sharded_by_the_first(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("shard", [sharded, sharded_by_the_first])
def test_parameters_on_the_host_are_not_sharded(
    shard: Callable[[nn.Module], nn.Module], one_rank: None
) -> None:
    """Their owner would put tensors of its own in their place, after they were copied from."""

    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))

    advice = "'0.*FSDP.*CPUOffloadPolicy"
    with pytest.raises(ValueError, match=advice):
        OffloadModel(nn.Sequential(*map(shard, layers())), "cpu", num_slices=2)
    model = shard(OffloadModel(layers(), "cpu", num_slices=2))
    with pytest.raises(OffloadError, match=advice):
        model(torch.randn(4, 8))
    if shard is sharded:
        model = nn.Sequential(layers())
        with offload_layers(model, "0", device="cpu"):
            for layer in model[0]:
                sharded(layer)
            with pytest.raises(OffloadError, match="is a DTensor on cpu, expected a plain one"):
                model(torch.randn(4, 8))
