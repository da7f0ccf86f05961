"""Every product in models that are replicated (DDP) or sharded (FSDP2), on two ranks: same bits.

In each wrapper: an ``OffloadActivations`` around the forward,
groups by name, markers, and checkpoints, of all layers, of every second, by operator, reentrant. In
DDP alone: parameters on the host, with checkpoints and without. Of sharded ones they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.products import PRODUCTS
from helpers.ranks import WORKERS, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from pp_offload import OffloadError, OffloadModel

WRAPPERS = (
    *("ddp", "ddp, accumulated", "ddp, static graph", "ddp, unused"),
    *("fsdp2", "fsdp2, accumulated", "fsdp2, bf16", "fsdp2, kept"),
)
COMPILED = [
    f"{wrapper}, compiled:{product}"
    for wrapper in ("ddp", "fsdp2")
    for product in ("groups", "context", "full, offload")
]
"""Parts of each layer are compiled, and what is offloaded is around them."""

WORKER = WORKERS / "data_parallel_worker.py"
OF_PYTORCH = {"ddp, unused:reentrant, offload"}
"""Errors without offload as well: DDP looks for what is unused before the layers run again."""

ALL = [
    f"{wrapper}:{product}"
    for wrapper in WRAPPERS
    for product in PRODUCTS
    if not (wrapper.startswith("fsdp2") and product.startswith("parameters"))
]
SOME = [
    "ddp:groups",
    "ddp:parameters",
    "ddp, accumulated:context",
    "ddp, accumulated:parameters, checkpoint",
    "ddp, static graph:reentrant, offload",
    "ddp, unused:all, offload",
    "fsdp2:context",
    "fsdp2, accumulated:groups",
    "fsdp2, bf16:markers",
    "fsdp2, kept:full, offload",
]
"""Each wrapper once at least, and most products."""


@pytest.mark.quick("some")
@pytest.mark.parametrize("which", ["some", "rest"])
def test_every_product_is_equal_bit_for_bit(which: str, tmp_path: Path) -> None:
    rest = sorted(set(ALL) - set(SOME) - OF_PYTORCH) + COMPILED[1:]
    cases = [*SOME, COMPILED[0]] if which == "some" else rest
    for rank, results in enumerate(run_ranks(2, cases, tmp_path, WORKER)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank}: {facts}"
            assert facts["equal"] == [True, True], where
            assert all(nbytes > 0 for nbytes in facts["offloaded"]), where
            if "parameters" not in case:
                assert all(num > 0 for num in facts["left"]), where
                assert facts["parameters left"] == facts["live"] == [0, 0], where


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def sharded_by_the_first(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))


ADVICE = "'0.*FSDP.*CPUOffloadPolicy"


@pytest.mark.parametrize("shard", [sharded, sharded_by_the_first])
def test_parameters_on_the_host_are_not_sharded(
    shard: Callable[[nn.Module], nn.Module], one_rank: None
) -> None:
    """Their owner would put tensors of its own in their place, after they were copied from."""
    model = nn.Sequential(*(shard(layer) for layer in layers()))
    with pytest.raises(ValueError, match=ADVICE):
        OffloadModel(model, "cpu", num_slices=2)
    model = shard(OffloadModel(layers(), "cpu", num_slices=2))
    with pytest.raises(OffloadError, match=ADVICE):
        model(torch.randn(4, 8))
