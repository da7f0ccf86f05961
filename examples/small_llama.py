"""A Llama that a CPU can train, whole or with adapters, and whether two runs of it are the same."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

import torch
from torch import Tensor

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(f"{missing}; pip install 'pp_offload[hf]'") from missing

VOCABULARY = 256


class Trained(Protocol):
    """What a run came to."""

    losses: list[float]
    parameters: list[Tensor]


def check_width(parser: argparse.ArgumentParser, width: int) -> None:
    """End the program if heads cannot have it."""
    if width < 4 or width % 8:
        parser.error(f"--width {width} is not a multiple of 8: there are 4 heads")


def make_llama(options: argparse.Namespace) -> Any:
    """The same weights every time.

    Args:
        options: ``width``, ``layers`` and ``context``; without ``full``, adapters are trained.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.context,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if options.full:
        return model
    lora = LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def is_same(first: Trained, second: Trained) -> bool:
    """Whether losses and final parameters are equal bit for bit."""
    same = [torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True)]
    return first.losses == second.losses and all(same)
