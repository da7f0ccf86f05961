"""``pp-offload simulate --hf``: models of Transformers, and those that are made otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import check_refused, good
from transformers import CONFIG_MAPPING, Gemma2Config, GPT2Config, LlamaConfig, LlamaForCausalLM

from pp_offload.simulate.huggingface import groups_of, stages_of

SMALL = "--ranks 2 --microbatches 4 --length 256 --min-numel 1".split()
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
TINY = LlamaConfig(**SIZES)


def test_a_config(tmp_path: Path) -> None:
    LlamaConfig(**SIZES | {"num_hidden_layers": 2}).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert "mlp may leave" in good("simulate", "--hf", path, *SMALL, "--groups", "mlp")
    check_refused("simulate --hf ./nowhere", "found no file or directory './nowhere'")


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_parts_of_saved_tensors_are_planned(tmp_path: Path, kind: str) -> None:
    """Norms of heads are computed again from parts; Phi-3's values are a part of its product."""
    CONFIG_MAPPING[kind](**SIZES | {"head_dim": 16, "pad_token_id": 0}).save_pretrained(tmp_path)
    how = (*SMALL, "--length", "3000", "--limit", "1GiB", "-o", tmp_path / "plan.json")
    assert "may leave" in good("plan", "--hf", tmp_path, *how)


def test_stages_compute_what_the_model_computes() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY)
    tokens = torch.randint(96, (2, 12))
    for num_stages in (1, 2, 5):
        stages = stages_of(model, num_stages)
        x = tokens
        for stage in stages:
            x = stage(x)
        assert torch.equal(x, model(tokens, use_cache=False).logits)
        num_layers = [len(stage.layers) for stage in stages]
        assert sum(num_layers) == 5 and max(num_layers) - min(num_layers) <= 1
    assert groups_of(stages[0]) == {"self_attn": "layers.*.self_attn", "mlp": "layers.*.mlp"}


T5 = {"model_type": "t5"}
GEMMA3 = {**SIZES, "head_dim": 16, "model_type": "gemma3_text"}
WRONG = {
    "as GPT-2": (GPT2Config(n_layer=2, n_embd=64, n_head=2).to_dict(), "expected a decoder made l"),
    "layers": (TINY.to_dict() | {"num_hidden_layers": 1}, "there are 2 stages for 1 layers, expec"),
    "rotary": (GEMMA3, "Gemma3ForCausalLM cannot run in stages without data (TypeError: Gemma3Rot"),
    "caps": (Gemma2Config(**SIZES).to_dict(), "Gemma2Config caps scores or logits, expected"),
    "not causal": (T5, "cannot be made (ValueError: Unrecognized configuration class"),
    "value": ({"model_type": "llama", "hidden_size": "many"}, "found no config of Transformers at"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, name: str) -> None:
    config, problem = WRONG[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_refused(f"simulate --hf {tmp_path} --ranks 2", problem)
