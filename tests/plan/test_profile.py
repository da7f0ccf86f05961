"""A profile says what a count without tapes says: bytes by hooks, memory and time by the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.virtual_models import Stage
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig, use_backend
from pp_offload.plan import Profile, profile, profile_table, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, VirtualBackend

WIDTH, LENGTH, NUM_LAYERS = 4096, 8192, 3
H100 = DEVICES["H100"]
GROUPS = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def profiled(
    stages: list[Any], example: Tensor, config: OffloadConfig | None = None, **options: Any
) -> Profile:
    """That of a rank for each stage."""
    work = Modules(stages, example=example, loss_fn=square, **options)
    sizes = {"num_ranks": len(stages), "num_stages": len(stages)}
    order = PipelineOrder(Schedule1F1B, num_microbatches=len(stages), **sizes)
    return profile(record(order, work, H100, config), H100)


@pytest.fixture(scope="module")
def llama() -> Stage:
    return Stage("llama", WIDTH, LENGTH, NUM_LAYERS)


@pytest.fixture(scope="module")
def of_llama(llama: Stage) -> Profile:
    """Of two stages."""
    stages = [llama, Stage("llama", WIDTH, LENGTH, NUM_LAYERS)]
    example = llama.microbatch().detach()
    config = OffloadConfig(rematerialize="none")
    return profiled(stages, example, config, groups=GROUPS, layers="layers.*")


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward, each storage once, without parameters and small tensors."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        is_parameter = any(whole is parameter for parameter in module.parameters())
        if not is_parameter and tensor.numel() >= OffloadConfig().min_offloaded_tensor_size:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        use_backend(VirtualBackend(H100)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        y = module(x)
        nbytes = sum(each.untyped_storage().nbytes() for each in saved.values())
        del y
    return nbytes


def test_a_group_saves_what_hooks_see(llama: Stage, of_llama: Profile) -> None:
    """41 bytes a token and unit of the width: 9 of attention, 32 of a SwiGLU of 3.5 widths."""
    layer = llama.layers[1]
    for number, part in enumerate((layer.attn, layer.mlp)):
        assert of_llama.groups[2 + number].nbytes == saved_bytes(part, llama.microbatch())
    assert [each.nbytes / (WIDTH * LENGTH) for each in of_llama.groups] == [9, 32] * 6


def test_the_tables(of_llama: Profile) -> None:
    rows = profile_table(of_llama).splitlines()
    assert rows[3].split() == "mlp 0-1 6 1024.0 5.35 11.13 21.53 191.5".split()
    assert "The link carries 47.7" in profile_table(of_llama)
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.47 3.85 3.91 0.55 22.89 48.35 5.94 1.22".split()
