"""A profile says what a count without tapes says: bytes by hooks, memory and time by the device."""

from __future__ import annotations

import pytest
import torch
from helpers.virtual_models import KIND, Layer, Stage
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig, use_backend
from pp_offload.plan import Profile, profile, profile_table, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, VirtualBackend

WIDTH, LENGTH, NUM_LAYERS = 4096, 8192, 3
H100 = DEVICES["H100"]


def microbatch() -> Tensor:
    return torch.empty(1, LENGTH, WIDTH, **KIND, requires_grad=True)


@pytest.fixture(scope="module")
def of_gpt() -> Profile:
    """Of two stages on two ranks."""
    work = Modules(
        [Stage(WIDTH, NUM_LAYERS) for _ in range(2)],
        example=microbatch().detach(),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"attn": "layers.*.attn", "mlp": "layers.*.mlp"},
        layers="layers.*",
    )
    order = PipelineOrder(Schedule1F1B, num_ranks=2, num_stages=2, num_microbatches=2)
    return profile(record(order, work, H100, OffloadConfig(rematerialize="none")), H100)


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


def test_a_group_saves_what_hooks_see(of_gpt: Profile) -> None:
    """Bytes of a token and unit of the width: 12 of attention, 20 of an MLP of four widths."""
    layer = Layer(WIDTH)
    for number, part in enumerate((layer.attn, layer.mlp)):
        assert of_gpt.groups[2 + number].nbytes == saved_bytes(part, microbatch())
    assert [each.nbytes / (WIDTH * LENGTH) for each in of_gpt.groups] == [12, 20] * 6


def test_the_tables(of_gpt: Profile) -> None:
    rows = profile_table(of_gpt).splitlines()
    assert rows[3].split() == "mlp 0-1 6 640.0 3.95 8.28 13.46 161.9".split()
    assert "The link carries 47.7" in profile_table(of_gpt)
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.38 3.00 3.07 0.38 20.79 44.89 5.00 0.94".split()
