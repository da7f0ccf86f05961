"""What ``rematerialize="cheap"`` spares: bytes to copy, step time and peak, beside "none".

    python benchmarks/rematerialize.py --json rematerialize.json

First the bytes that layers of Hugging Face's models copy in bfloat16, on the CPU: each decoder
layer is a group, all groups leave, and tensors of less than 1 KiB for each token stay. Gradients
are compared bit for bit.

Then steps on a virtual H100 with rates that were measured on a real one, in a rank of 1F1B where
all groups leave: the cases of on_card.py, which runs them on a card.

Figures of a virtual row, beside those of virtual_h100.py
    ratio, compute     of times, and of busy times, to those of a step without offload
    bytes              copied to those copied without recipes
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from command import parser_for, write_figures
from on_card import CASES, LARGE
from torch import Tensor, nn
from virtual_h100 import MEASURED, virtual_step

from pp_offload import CpuBackend, OffloadConfig, offload_modules, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

MIB = 2**20
VOCABULARY = 512
SHAPE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
GPT2 = {"n_embd": 256, "n_layer": 3, "n_head": 8}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LAYERS = ["model.layers.*"]


MODELS: dict[str, tuple[Any, list[str]]] = {
    "Llama": (transformers.LlamaConfig(**SHAPE, **HEADS), LAYERS),
    "Qwen3": (transformers.Qwen3Config(**SHAPE, **HEADS, head_dim=32), LAYERS),
    "Gemma": (transformers.GemmaConfig(**SHAPE, **HEADS, head_dim=32), LAYERS),
    "GPT-2": (transformers.GPT2Config(**GPT2), ["transformer.h.*"]),
}
"""The config of each, and the names of its layers."""


def model_of(config: Any) -> nn.Module:
    """In bfloat16, with the same weights each time."""
    torch.manual_seed(0)
    config.vocab_size = VOCABULARY
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()


def step(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The loss and all gradients of a step."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def measured(name: str, num_tokens: int) -> dict[str, Any]:
    """The row of a model."""
    config, layers = MODELS[name]
    model, generator = model_of(config), torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, num_tokens), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    expected = step(model, inputs)
    row: dict[str, Any] = {"model": name}
    for choice in ("none", "cheap"):
        config = OffloadConfig(
            device_limit_bytes=None,
            min_offloaded_tensor_size=256 * num_tokens // 8,
            rematerialize=choice,
        )
        with use_backend(CpuBackend(), config=config) as manager:
            handle = offload_modules(model, {"layer": layers})
            off_interface.init_chunk_handler(None, None, 1)
            results = step(model, inputs)
            handle.remove()
            row[f"{choice}_bytes"] = manager.statistics().bytes_offloaded
            row["again_bytes"] = manager.statistics().bytes_computed_again
            off_interface.reset()
        row[f"{choice}_equal"] = all(map(torch.equal, results, expected))
    return row | {"ratio": row["cheap_bytes"] / row["none_bytes"]}


def virtual_rows(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each case and way, beside that without offload."""
    rows = []
    for case in ["tiny"] if quick else LARGE:
        for way, choice in (("none", ""), ("recompute", ""), ("ours", "none"), ("ours", "cheap")):
            name = f"{way}, {choice}" if choice else way
            row = virtual_step(
                CASES[case], way, device_limit_bytes=None, rematerialize=choice or "none"
            )
            rows.append({"case": case, "way": name, **row})
    plain = {row["case"]: row for row in rows if row["way"] == "none"}
    copied = {row["case"]: row["copied_gib"] for row in rows if row["way"] == "ours, none"}
    for row in rows:
        row["ratio"] = row["step_ms"] / plain[row["case"]]["step_ms"]
        row["compute"] = row["busy_ms"] / plain[row["case"]]["busy_ms"]
        row["bytes"] = row["copied_gib"] / copied[row["case"]]
    return rows


def main() -> None:
    options = parser_for(__doc__).parse_args()
    rows = [measured(name, 32 if options.quick else 256) for name in MODELS]
    print("model     copied without, MiB   copied, MiB   again, MiB   ratio   equal bits")
    for row in rows:
        without, copied, again = (row[f"{k}_bytes"] / MIB for k in ("none", "cheap", "again"))
        equal = "yes" if row["none_equal"] and row["cheap_equal"] else "NO"
        print(
            f"{row['model']:<8}{without:>22.2f}{copied:>14.2f}{again:>13.2f}{row['ratio']:>8.3f}"
            f"   {equal}"
        )
    title = f"virtual, {MEASURED.name}"
    print(f"\n{title:<34}step ms  ratio  compute  peak GiB  copied GiB  bytes")
    virtual = virtual_rows(quick=options.quick)
    for row in virtual:
        print(
            f"{row['case']:<20}{row['way']:<14}{row['step_ms']:>7.1f}{row['ratio']:>7.3f}"
            f"{row['compute']:>9.3f}{row['peak_gib']:>10.2f}{row['copied_gib']:>12.2f}"
            f"{row['bytes']:>7.3f}"
        )
    write_figures({"models": rows, "virtual": virtual}, options.json)


if __name__ == "__main__":
    main()
