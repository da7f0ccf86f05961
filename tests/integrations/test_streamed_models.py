"""Models of Hugging Face train with their layers on the host as they do on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import assert_no_hooks, same_bits

pytest.importorskip("transformers")
pytest.importorskip("peft")

from conftest import BACKENDS, TWO_BACKENDS, make_backend
from streamed import MODELS, batch, layers_of, loss_of, make, make_lora, pair, state, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

from pp_offload import offload_layers, recompute_layers

LAYERS = {
    "llama": [f"model.layers.{i}" for i in range(3)],
    "qwen2-moe": [f"model.layers.{i}" for i in range(3)],
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "t5": [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)],
}

Checkpoints = Callable[[Any], None]


def none(model: Any) -> None:
    """No checkpoints."""


def theirs(model: Any, use_reentrant: bool) -> None:
    """Those that the layers of Hugging Face have inside, by either name of them."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    model.enable_input_require_grads()
    enable({"use_reentrant": use_reentrant})


def wrapped(model: Any) -> None:
    """Those of PyTorch around each layer."""
    kinds = {type(layer) for layer in model.modules() if hasattr(layer, "gradient_checkpointing")}
    layers = {kind for kind in kinds if "Layer" in kind.__name__ or "Block" in kind.__name__}
    apply_activation_checkpointing(model, check_fn=lambda one: type(one) in layers)


CHECKPOINTS: dict[str, Checkpoints] = {
    "none": none,
    "non-reentrant": partial(theirs, use_reentrant=False),
    "reentrant": partial(theirs, use_reentrant=True),
    "wrapped": wrapped,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_resident", [1, 2, 3])
@pytest.mark.parametrize("weights", ["all", "frozen base"])
@pytest.mark.parametrize("checkpoints", list(CHECKPOINTS))
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", BACKENDS)
def test_equal_bit_for_bit(
    kind: str, name: str, checkpoints: str, weights: str, num_resident: int, when: str
) -> None:
    """Checkpoints may be there before the layers are offloaded, or come after."""
    prepare, is_lora = CHECKPOINTS[checkpoints], weights == "frozen base"

    def build(name: str) -> Any:
        model = make_lora(name) if is_lora else make(name)
        if when == "before":
            prepare(model)
        return model

    options = {"frozen_only": is_lora, "num_resident": num_resident}
    with pair(name, kind, build, **options) as (plain, model, offloaded):
        for one in (plain, model) if when == "after" else ():
            prepare(one)
        assert same_bits(train(model), train(plain))
        assert offloaded.parameter_bytes_on_device == 0
        moved = offloaded.statistics()
        assert moved.bytes_reloaded > 0
        assert (moved.bytes_offloaded == 0) == is_lora, "gradients of a frozen base do not exist"
        assert moved.bytes_in_flight == 0
    assert_no_hooks()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_runs_again_is_brought_again(use_reentrant: bool) -> None:
    """All layers in forward; in backward all but the last, which is still there."""
    with pair("llama", "late") as (_, model, offloaded):
        theirs(model, use_reentrant)
        train(model, steps=1, microbatches=1)
        one = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
        assert offloaded.statistics().bytes_reloaded == (3 + 2) * one


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("kind", TWO_BACKENDS)
def test_adapters_and_all_about_them_stay_on_the_device(kind: str, name: str) -> None:
    with pair(name, kind, make_lora, frozen_only=True) as (_, model, offloaded):
        device = make_backend(kind).device
        train(model, steps=1)
        inside = [
            (parameter, "lora_" in path)
            for path, parameter in model.named_parameters()
            if any(path.startswith(f"{layer}.") for layer in offloaded.names)
        ]
        for parameter, is_adapter in inside:
            assert parameter.device == (device if is_adapter else torch.device("cpu"))
            assert (parameter.grad is not None) == is_adapter
        assert len({is_adapter for _, is_adapter in inside}) == 2


def generated(model: Any) -> Tensor:
    model.eval()
    found: Tensor = model.generate(
        batch(model)["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    return found.cpu()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", TWO_BACKENDS)
def test_generate(kind: str, name: str) -> None:
    """Each token is a forward; an encoder runs once, before the first."""
    with pair(name, kind) as (plain, model, offloaded):
        assert torch.equal(generated(model), generated(plain))
        assert offloaded.parameter_bytes_on_device == 0
        assert same_bits(train(model, steps=1), train(plain, steps=1)), "and then it trains"


@pytest.mark.parametrize("name", list(MODELS))
def test_two_forwards_before_their_backwards(name: str) -> None:
    with pair(name, "random") as (plain, model, _):
        for one in (plain, model):
            losses = [loss_of(one, step) for step in range(2)]
            with torch.no_grad():
                loss_of(one, 3)
            for loss in losses:
                loss.backward(retain_graph=True)
            losses[0].backward()
        assert same_bits(state(model), state(plain))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", list(MODELS))
def test_our_checkpoints_around_the_layers(name: str, when: str) -> None:
    def recomputed(name: str) -> Any:
        model = make(name)
        recompute_layers(model, LAYERS[name])
        return model

    with pair(name, "late", recomputed if when == "before" else make) as (plain, model, offloaded):
        if when == "after":
            recompute_layers(model, LAYERS[name])
            recompute_layers(plain, LAYERS[name])
        assert same_bits(train(model), train(plain))
        assert offloaded.parameter_bytes_on_device == 0


def outputs_of(stack: Any, inputs: Tensor) -> Tensor:
    output: Tensor = stack(inputs_embeds=inputs, use_cache=False)[0]
    return output


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_all_layers(use_reentrant: bool) -> None:
    """The whole forward runs again in backward, with the order that it had."""
    with pair("llama", "late") as (plain, model, _):
        for one in (plain, model):
            inputs = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
            whole = partial(outputs_of, one.model)
            y = checkpoint(whole, inputs.requires_grad_(), use_reentrant=use_reentrant)
            y.square().sum().backward()
        assert same_bits(state(model), state(plain))


@pytest.mark.parametrize("name", list(MODELS))
def test_saved_and_resumed(name: str, tmp_path: Path) -> None:
    """Names are those of the plain model; what was saved of one can be loaded by the other."""
    with pair(name, "late") as (plain, model, _):
        names = list(plain.state_dict())
        assert list(model.state_dict()) == names
        train(model, steps=1)
        train(plain, steps=1)
        model.save_pretrained(tmp_path / "whole")
        torch.save(model.state_dict(), tmp_path / "state")
        again = type(model).from_pretrained(tmp_path / "whole")
        assert same_bits(state(again), [p.detach() for p in plain.parameters()])
        offload_layers(again, layers_of(name, again))
        assert same_bits(train(again), train(plain))
        model.load_state_dict(torch.load(tmp_path / "state"))
        assert same_bits(train(model), state_of_resumed(name, tmp_path / "state"))


def state_of_resumed(name: str, path: Path) -> list[Tensor]:
    """A plain model that goes on from a file."""
    model = make(name)
    model.load_state_dict(torch.load(path))
    return train(model)


def test_a_copy_trains_on_its_own() -> None:
    with pair("t5", "late") as (plain, model, offloaded):
        copied = copy.deepcopy(model)
        expected = train(plain)
        assert same_bits(train(copied), expected)
        assert same_bits(train(model), expected), "the copy has changed nothing"
        before = offloaded.statistics().bytes_reloaded
        loss_of(copied)
        assert offloaded.statistics().bytes_reloaded > before, "it is streamed, too"
