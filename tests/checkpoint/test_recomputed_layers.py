"""Layers of a list are recomputed whole; groups beside them leave as ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.sessions import assert_idle, assert_no_hooks
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from pp_offload import PipelineOffloadManager, offload_modules
from pp_offload._checkpoint.recomputed_layers import is_recomputed
from pp_offload.checkpointing import recompute_layers

NUM_LAYERS = 4


@pytest.fixture
def model(manager: PipelineOffloadManager) -> nn.Sequential:
    return make_model(NUM_LAYERS).to(manager.backend.device)


def groups_of(manager: PipelineOffloadManager) -> list[str]:
    """Names of the groups of the forward that was run last."""
    chunk = manager.cur_forward_chunk()
    assert chunk is not None and not chunk.open_groups
    return [group.name for group in chunk.groups]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("names", [["0"], ["1", "2"], ["0", "1", "2", "3"], ["1.up", "3"]])
def test_same_bits_and_no_groups_inside(
    manager: PipelineOffloadManager, model: nn.Sequential, names: list[str], in_flight: int
) -> None:
    device = manager.backend.device
    inputs = [x.to(device) for x in batches(4)]
    plain = make_model(NUM_LAYERS, groups=()).to(device)
    expected = run_step(plain, inputs, in_flight=in_flight, offload=False)
    before = list(model)
    recompute_layers(model, names).remove()
    with recompute_layers(model, names) as handle:
        assert handle.names == tuple(names)
        assert all(is_recomputed(model, name) for name in names)
        assert not is_recomputed(model, "nowhere")
        for _ in range(3):  # a step without a plan, and two by one
            tensors = run_step(model, inputs, in_flight=in_flight)
            assert same_bits(tensors, expected)
        whole = [name for name in names if "." not in name]
        assert groups_of(manager) == ["mix", "mlp"] * (NUM_LAYERS - len(whole))
        counts = handle.recompute.counts
        assert counts.forward_calls == counts.recomputed_calls == 3 * 4 * len(names)
        if len(whole) == NUM_LAYERS:
            assert manager.statistics().bytes_offloaded == 0, "what is saved inside is dropped"
    handle.remove()
    assert list(model) == before and not any(is_recomputed(model, name) for name in names)
    manager.reset()
    assert_idle(manager)


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])
def test_dropout_and_a_module_group(manager: PipelineOffloadManager, early_stop: bool) -> None:
    """Patterns see through the wrapper; a group around the layer itself is one."""
    device = manager.backend.device
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
    ).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)

    def gradients() -> Sequence[Tensor]:
        torch.manual_seed(7)
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
        return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])

    expected = gradients()
    names = list(model.state_dict())
    with set_checkpoint_early_stop(early_stop), recompute_layers(model, ["0", "2"]):
        assert list(model.state_dict()) == names
        with offload_modules(model, {"in": "*.0", "around": "2"}) as handle:
            assert handle.modules["in"] == [
                "0._checkpoint_wrapped_module.0",
                "1.0",
                "2._checkpoint_wrapped_module.0",
            ]
            assert handle.modules["around"] == ["2"]
            assert same_bits(gradients(), expected)
            assert groups_of(manager) == ["in", "around"]
    assert same_bits(gradients(), expected)
    assert_no_hooks()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.0", "layers.0.up"], "'layers.0.up' is a part of 'layers.0'"),
        (["layers.1"], "has a checkpoint already"),
        (["layers.1.up"], "has a checkpoint already"),
    ],
)
def test_a_layer_inside_another_is_refused(names: list[str], message: str) -> None:
    """And the model is as before."""
    model = nn.Module()
    model.layers = make_model(2)
    recompute_layers(model, ["layers.1"])
    before = str(model)
    with pytest.raises(ValueError, match=message):
        recompute_layers(model, names)
    assert str(model) == before
