"""A Llama small enough for a test, and its data."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 48, 12


def make_llama(*, lora: dict[str, Any] | None = None, **more: Any) -> Any:
    """The same weights every time; ``lora`` are options of an adapter, and {} are none."""
    torch.manual_seed(7)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "attention_dropout": 0.1,
        "use_cache": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **more}))
    if lora is None:
        return model
    targets = ["q_proj", "v_proj", "down_proj"]
    options = {"r": 2, "lora_dropout": 0.1, "init_lora_weights": False, "target_modules": targets}
    return get_peft_model(model, LoraConfig(**{**options, **lora}))


def make_data(num: int = 12) -> list[dict[str, Tensor]]:
    """Random tokens, the same every time."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(VOCABULARY, (num, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]
