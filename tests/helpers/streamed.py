"""Tiny models of Hugging Face, and programs that train them, plain and with layers on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from conftest import make_backend
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from helpers.sliced import adamw
from helpers.toy import moved
from pp_offload import OffloadedLayers, offload_layers

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
    options = LoraConfig(
        r=2, lora_dropout=0.1, init_lora_weights=False, target_modules=targets, fan_in_fan_out=False
    )
    return get_peft_model(make(name), options)


def layers_of(name: str, model: Any) -> list[str]:
    """The patterns of the layers, whatever is around the model."""
    is_wrapped = hasattr(model, "peft_config")
    return [f"base_model.model.{layer}" if is_wrapped else layer for layer in MODELS[name][2]]


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
        patterns = layers_of(name, streamed)
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


def loss_of(model: Any, step: int = 0) -> Tensor:
    """A forward; the same numbers are drawn for the same step."""
    torch.manual_seed(step)
    loss: Tensor = model(**batch(model, step), use_cache=False).loss
    return loss


def train(model: Any, steps: int = 2, microbatches: int = 2) -> list[Tensor]:
    """Losses, last gradients, and parameters after a few steps, on the host."""
    model.train()
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(microbatches):
            loss = loss_of(model, 10 * step + number)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return [loss.cpu().clone() for loss in losses] + state(model)


def state(model: nn.Module) -> list[Tensor]:
    """Parameters and gradients, on the host."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.cpu().clone() for tensor in tensors]
