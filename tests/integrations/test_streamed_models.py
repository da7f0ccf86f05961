"""Models of Hugging Face train with their layers on the host as they do on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from conftest import TWO_BACKENDS, make_backend
from helpers.sessions import assert_no_hooks
from helpers.sliced import EXACT_LR, state
from helpers.toy import moved, same_bits
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from pp_offload import OffloadedLayers, offload_layers

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "output_router_logits": True,
}
BLOCKS = {"n_embd": 16, "n_layer": 3, "n_head": 2}
STACKS = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "llama": ("LlamaForCausalLM", DECODER, "model.layers", ["q_proj", "v_proj", "o_proj"]),
    "qwen2-moe": ("Qwen2MoeForCausalLM", DECODER | EXPERTS, "model.layers", ["q_proj", "v_proj"]),
    "gpt2": ("GPT2LMHeadModel", BLOCKS, "transformer.h", ["c_attn", "c_proj"]),
    "t5": ("T5ForConditionalGeneration", STACKS, "*coder.block", ["q", "v", "wo"]),
}
"""Class, config, the layers, and where adapters go."""


def make(name: str, has_adapters: bool = False) -> Any:
    """The same weights every time; dropout is on where the model has any."""
    kind, config, _, targets = MODELS[name]
    torch.manual_seed(3)
    cls = getattr(transformers, kind)
    special = {"decoder_start_token_id": 0, "pad_token_id": 0}
    model = cls(cls.config_class(**config, **special, vocab_size=32))
    if not has_adapters:
        return model
    options = {"r": 2, "lora_dropout": 0.1, "init_lora_weights": False, "fan_in_fan_out": False}
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options))


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
        plain = moved(plain, backend.device)
        layers = prefix + MODELS[name][2]
        with offload_layers(streamed, layers, backend=backend, **options) as offloaded:
            yield plain, streamed, offloaded
        backend.synchronize()


def batch(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Tokens and labels."""
    ids = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(model.get_input_embeddings().weight.device)
    return {"input_ids": ids, "labels": ids}


def train(model: Any, steps: int = 2) -> list[Tensor]:
    """Losses, last gradients, and parameters after a few steps of two microbatches."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=EXACT_LR)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(2):
            torch.manual_seed(10 * step + number)
            losses.append(model(**batch(model, 10 * step + number), use_cache=False).loss)
            losses[-1].backward()
        optimizer.step()
    return [loss.detach().cpu() for loss in losses] + state(model)


def theirs(model: Any, use_reentrant: bool) -> None:
    """Checkpoints that the layers of Hugging Face have inside, by either name of them."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    model.enable_input_require_grads()
    enable({"use_reentrant": use_reentrant})


def wrapped(model: Any) -> None:
    """Those of PyTorch around each layer."""
    kinds = {type(layer) for layer in model.modules() if hasattr(layer, "gradient_checkpointing")}
    layers = {kind for kind in kinds if "Layer" in kind.__name__ or "Block" in kind.__name__}
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in layers)


CHECKPOINTS: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    "non-reentrant": partial(theirs, use_reentrant=False),
    "reentrant": partial(theirs, use_reentrant=True),
    "wrapped": wrapped,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_resident", [1, 2, 3])
@pytest.mark.parametrize("weights", ["all", "frozen base"])
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", TWO_BACKENDS)
def test_equal_bit_for_bit(
    kind: str, name: str, checkpoints: str, weights: str, num_resident: int, when: str
) -> None:
    """Checkpoints may be there before the layers are offloaded, or come after."""
    prepare, is_lora = CHECKPOINTS[checkpoints], weights == "frozen base"

    def build(name: str) -> Any:
        model = make(name, is_lora)
        if when == "before":
            prepare(model)
        return model

    options = {"frozen_only": is_lora, "num_resident": num_resident}
    with pair(name, kind, build, **options) as (plain, model, offloaded):
        for each in (plain, model) if when == "after" else ():
            prepare(each)
        assert same_bits(train(model), train(plain))
        assert offloaded.parameter_bytes_on_device == 0
        statistics = offloaded.statistics()
        assert statistics.bytes_reloaded > 0 == statistics.bytes_in_flight
        has_moved_gradients = statistics.bytes_offloaded > 0
        assert has_moved_gradients is not is_lora, "gradients of a frozen base do not exist"
    assert_no_hooks()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", TWO_BACKENDS)
def test_generate(kind: str, name: str) -> None:
    """Each token is a forward; an encoder runs once, before the first."""
    with pair(name, kind) as (plain, model, offloaded):
        tokens = []
        for each in (plain, model):
            ids = batch(each.eval())["input_ids"]
            generated = each.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
            tokens.append(generated.cpu())
        assert torch.equal(*tokens)
        assert offloaded.parameter_bytes_on_device == 0
        assert same_bits(train(model, steps=1), train(plain, steps=1)), "and then it trains"
