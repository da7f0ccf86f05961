"""Layers of a list are recomputed whole; groups beside them leave as ever."""

from __future__ import annotations

import pytest
from helpers.sessions import assert_idle, assert_no_hooks
from helpers.toy import batches, make_model, run_step, same_bits
from torch import nn

from pp_offload import PipelineOffloadManager, offload_modules
from pp_offload.checkpointing import is_recomputed, recompute_layers

NUM_LAYERS = 4


def groups_of(manager: PipelineOffloadManager) -> list[str]:
    """Names of the groups of the forward that was run last."""
    chunk = manager.cur_forward_chunk()
    assert chunk is not None and not chunk.open_groups
    return [group.name for group in chunk.groups]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("names", [["0"], ["1", "2"], ["0", "1", "2", "3"], ["1.up", "3"]])
def test_same_bits_and_no_groups_inside(
    manager: PipelineOffloadManager, names: list[str], in_flight: int
) -> None:
    device = manager.backend.device
    inputs = [x.to(device) for x in batches(4)]
    model, plain = (make_model(NUM_LAYERS, groups=g).to(device) for g in (("mix", "mlp"), ()))
    expected = run_step(plain, inputs, in_flight=in_flight, offload=False)
    before = list(model.state_dict())
    recompute_layers(model, names).remove()
    with recompute_layers(model, names) as handle:
        assert handle.names == tuple(names) and list(model.state_dict()) == before
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
    assert str(model) == str(plain) and not any(is_recomputed(model, name) for name in names)
    manager.reset()
    assert_idle(manager)


@pytest.mark.parametrize("names", [["0", "2"], ["0", "0.up", "2"], ["0.up", "0", "2"]])
def test_a_group_around_a_layer(manager: PipelineOffloadManager, names: list[str]) -> None:
    """Patterns see through the wrapper, and so does a state dict."""
    device = manager.backend.device
    inputs, model = [x.to(device) for x in batches(2)], make_model(groups=()).to(device)
    expected, plain = run_step(model, inputs, offload=False), str(model)
    with recompute_layers(model, names), offload_modules(model, {"up": "*.up", "around": "2"}):
        model.load_state_dict(model.state_dict())
        assert same_bits(run_step(model, inputs), expected)
        assert groups_of(manager) == ["up", "around"]
    assert str(model) == plain
    manager.reset()
    assert_no_hooks()


@pytest.mark.parametrize("name", ["layers.1", "layers.1.up", ""])
def test_a_layer_inside_a_checkpoint_is_refused(name: str) -> None:
    """And the model is as before."""
    model = nn.Module()
    model.layers = make_model(2)
    recompute_layers(model, ["layers.1"])
    before = str(model)
    with pytest.raises(ValueError, match="has a checkpoint already"):
        recompute_layers(model, ["layers.0", name])
    assert str(model) == before
