"""Bytes that layers of Hugging Face's models copy with ``rematerialize="cheap"``, of those without.

Each decoder layer is a group, all groups leave, and tensors of less than 1 KiB for each token stay
on the device. Gradients are compared bit for bit. Bytes are exact, so one step is enough.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pp_offload import CpuBackend, OffloadConfig, offload_modules, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

VOCABULARY = 512
SHAPE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
GPT2 = {"n_embd": 256, "n_layer": 3, "n_head": 8, "resid_pdrop": 0, "embd_pdrop": 0}

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "Llama": (lambda: transformers.LlamaConfig(**SHAPE, **HEADS), "model.layers.*"),
    "Qwen3": (lambda: transformers.Qwen3Config(**SHAPE, **HEADS, head_dim=32), "model.layers.*"),
    "Gemma": (lambda: transformers.GemmaConfig(**SHAPE, **HEADS, head_dim=32), "model.layers.*"),
    "GPT-2": (lambda: transformers.GPT2Config(**GPT2, attn_pdrop=0), "transformer.h.*"),
}
"""What makes the configuration, and the names of the layers."""


def model_of(name: str) -> nn.Module:
    """In bfloat16, with the same weights each time."""
    config = MODELS[name][0]()
    config.vocab_size = VOCABULARY
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16).train()


def step(model: Any, ids: Tensor) -> list[Tensor]:
    """The loss and all gradients of a step."""
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters()]]


def measured(name: str, num_tokens: int) -> dict[str, Any]:
    """The row of a model."""
    model = model_of(name)
    ids = torch.randint(0, VOCABULARY, (1, num_tokens))
    expected = step(model, ids)
    row: dict[str, Any] = {"model": name}
    for choice in ("none", "cheap"):
        config = OffloadConfig(
            min_offloaded_tensor_size=256 * num_tokens // 8, rematerialize=choice
        )
        with use_backend(CpuBackend(), config=config) as manager:
            handle = offload_modules(model, {"layer": MODELS[name][1]})
            off_interface.init_chunk_handler(None, None, 1)
            found = step(model, ids)
            handle.remove()
            row[f"{choice}_bytes"] = manager.statistics().bytes_offloaded
            row["again_bytes"] = manager.statistics().bytes_computed_again
            off_interface.reset()
        row[f"{choice}_equal"] = all(map(torch.equal, found, expected))
    return row | {"ratio": row["cheap_bytes"] / row["none_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = [measured(name, 32 if options.quick else 256) for name in MODELS]
    print("model     copied without, MiB   copied, MiB   again, MiB   ratio   equal bits")
    for row in rows:
        without, copied, again = (row[f"{k}_bytes"] / 2**20 for k in ("none", "cheap", "again"))
        equal = row["none_equal"] and row["cheap_equal"]
        print(f"{row['model']:<8}{without:>22.2f}{copied:>14.2f}{again:>13.2f}", end="")
        print(f"{row['ratio']:>8.3f}   {'yes' if equal else 'NO'}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
