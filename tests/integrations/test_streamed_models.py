"""Models of Hugging Face train with their layers on the host as they do on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from conftest import BACKENDS, TWO_BACKENDS, make_backend
from helpers.sliced import OnHost, state
from helpers.toy import assert_no_hooks, moved, same_bits
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from pp_offload import OffloadedLayers, offload_layers

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY, LENGTH = 32, 8

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
}
EXPERTS = {
    **DECODER,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
BLOCKS = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
STACKS = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}

MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", DECODER, ["model.layers"]),
    "qwen2-moe": ("Qwen2MoeForCausalLM", EXPERTS, ["model.layers"]),
    "gpt2": ("GPT2LMHeadModel", BLOCKS, ["transformer.h"]),
    "t5": ("T5ForConditionalGeneration", {**STACKS, "num_heads": 2}, ["*coder.block"]),
}
"""Class, config, and the layers."""

LORA_TARGETS = {"gpt2": ["c_attn", "c_proj"], "t5": ["q", "v", "wo"]}


def make(name: str) -> Any:
    """A model with the same weights every time; dropout is on where the model has any."""
    kind = getattr(transformers, MODELS[name][0])
    torch.manual_seed(3)
    config = kind.config_class(**MODELS[name][1])
    config.decoder_start_token_id = config.pad_token_id = 0
    return kind(config)


def make_lora(name: str) -> Any:
    """Adapters on a frozen base."""
    targets = LORA_TARGETS.get(name, ["q_proj", "v_proj", "o_proj"])
    options = peft.LoraConfig(
        r=2, lora_dropout=0.1, init_lora_weights=False, target_modules=targets, fan_in_fan_out=False
    )
    return peft.get_peft_model(make(name), options)


@contextmanager
def pair(
    name: str, kind: str, build: Callable[[str], Any] = make, **options: Any
) -> Iterator[tuple[Any, Any, OffloadedLayers]]:
    """The plain model on the device, its equal with layers on the host, and their handle."""
    backend = make_backend(kind)
    with backend.activate():
        plain = build(name)
        if backend.device.type == "emulated" and name == "qwen2-moe":
            # Else experts are counted with a kernel that only GPUs have for integers.
            plain.set_experts_implementation("eager")
            plain.config.output_router_logits = False
        streamed = copy.deepcopy(plain)
        prefix = "base_model.model." if hasattr(streamed, "peft_config") else ""
        patterns = [prefix + layers for layers in MODELS[name][2]]
        plain = moved(plain, backend.device)
        with offload_layers(streamed, patterns, backend=backend, **options) as offloaded:
            yield plain, streamed, offloaded
        backend.synchronize()


def batch(model: Any, step: int = 0) -> dict[str, Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    ids = ids.to(model.get_input_embeddings().weight.device)
    return {"input_ids": ids, "labels": ids}


def train(model: Any, steps: int = 2) -> list[Tensor]:
    """Losses, last gradients, and parameters after a few steps of two microbatches."""
    model.train()
    optimizer = OnHost(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(2):
            torch.manual_seed(10 * step + number)
            losses.append(model(**batch(model, 10 * step + number), use_cache=False).loss)
            losses[-1].backward()
        optimizer.step()
    return [loss.detach().cpu() for loss in losses] + state(model)


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
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in layers)


CHECKPOINTS: dict[str, Checkpoints] = {
    "none": none,
    "non-reentrant": partial(theirs, use_reentrant=False),
    "reentrant": partial(theirs, use_reentrant=True),
    "wrapped": wrapped,
}


@pytest.mark.covering(1)
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
        for each in (plain, model) if when == "after" else ():
            prepare(each)
        assert same_bits(train(model), train(plain))
        assert offloaded.parameter_bytes_on_device == 0
        moved = offloaded.statistics()
        assert moved.bytes_reloaded > 0
        assert (moved.bytes_offloaded == 0) == is_lora, "gradients of a frozen base do not exist"
        assert moved.bytes_in_flight == 0
    assert_no_hooks()


def generated(model: Any) -> Tensor:
    model.eval()
    tokens: Tensor = model.generate(
        batch(model)["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    return tokens.cpu()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", TWO_BACKENDS)
def test_generate(kind: str, name: str) -> None:
    """Each token is a forward; an encoder runs once, before the first."""
    with pair(name, kind) as (plain, model, offloaded):
        assert torch.equal(generated(model), generated(plain))
        assert offloaded.parameter_bytes_on_device == 0
        assert same_bits(train(model, steps=1), train(plain, steps=1)), "and then it trains"
