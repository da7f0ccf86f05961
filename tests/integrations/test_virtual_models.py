"""Models of Hugging Face on a virtual device, from their configs."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload.simulate import DEVICES, VirtualBackend

pytest.importorskip("transformers")

from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config

from pp_offload.simulate.huggingface import model_from_config

WIDTH, FFN, VOCABULARY, LENGTH, LAYERS, EXPERTS, TOP = 1024, 2816, 8192, 2048, 2, 8, 2
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=EXPERTS, num_experts_per_tok=TOP),
}
PROJECTIONS = WIDTH * WIDTH * (2 + 2 * 4 / 8)
"""Weights of the query, the output, the keys and the values."""


ATTENTION = 7 * LAYERS * WIDTH * LENGTH**2
"""Two products with the scores forward and five backward, and half of each, as it is causal."""


def flops(experts_of_a_token: int) -> float:
    """Of a step."""
    layer = PROJECTIONS + experts_of_a_token * 3 * WIDTH * FFN
    router = WIDTH * EXPERTS if experts_of_a_token > 1 else 0
    return ATTENTION + 3 * 2 * LENGTH * (LAYERS * (layer + router) + WIDTH * VOCABULARY)


def step(config: PretrainedConfig, *, offload: bool) -> tuple[float, int]:
    """How long compute is busy in a step, in seconds, and bytes that it offloads."""
    backend = VirtualBackend(replace(DEVICES["H100"], memory_bytes_per_s=inf))
    with use_backend(backend):
        model = model_from_config(config)
        ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
        activations = OffloadActivations(config=OffloadConfig(), backend=backend)
        with activations if offload else torch.enable_grad():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
        return backend.compute.busy_s, activations.statistics().bytes_offloaded


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_from_its_config_takes_the_time_of_its_products(name: str) -> None:
    one = DEVICES["H100"]
    seconds = flops(TOP if name == "mixtral" else 1) / (one.matmul_flops * one.matmul_fraction)
    busy_s, moved = step(CONFIGS[name], offload=True)
    assert busy_s == pytest.approx(seconds)
    assert moved > LAYERS * 10 * LENGTH * WIDTH * 2
    assert step(CONFIGS[name], offload=False) == (pytest.approx(seconds), 0)
