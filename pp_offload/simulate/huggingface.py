"""Models of Hugging Face without data.

    device = VirtualBackend(DEVICES["H100"])
    with use_backend(device):
        model = model_from_config(AutoConfig.from_pretrained("./llama"))
        ids = torch.zeros(1, 8192, dtype=torch.long, device="meta")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

For a pipeline, ``stages_of(model, 4)`` cuts it into stages, and ``groups_of`` names their parts.

NOTE [ What depends on data ]
    The mask selects visible tokens, and the router an expert for each token: both are
    data, which a virtual device does not have. So attention is causal and takes no mask, and all
    experts are one grouped product, which takes as long as if each had as many tokens as the
    others.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "causal_without_mask"  # name under which Transformers registers the attention


def model_from_config(
    config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Make a trainable causal language model on ``meta``.

    Args:
        config: Config of Transformers; not changed.
        dtype: Dtype of parameters and activations.

    Raises:
        ImportError: Transformers is not installed.
        ValueError: The model caps scores or logits, as Gemma2 does.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    if any(getattr(config, name, None) for name in caps):
        raise ValueError(f"{type(config).__name__} caps scores or logits, expected a model without")
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION}
    if any("experts" in name for name in config.to_dict()):
        options["experts_implementation"] = "grouped_mm"
    config = type(config).from_dict(config.to_dict())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options).train()


class DecoderStage(nn.Module):
    """Consecutive layers of a causal language model: tokens in, logits out."""

    def __init__(self, model: Any, index: int, num_stages: int) -> None:
        super().__init__()
        decoder, num_layers = model.model, len(model.model.layers)
        first, last = (i * num_layers // num_stages for i in (index, index + 1))
        is_last = index == num_stages - 1
        self.embed = decoder.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList(list(decoder.layers)[first:last])
        self.rotary = copy.deepcopy(decoder.rotary_emb)
        self.norm = decoder.norm if is_last else None
        self.head = model.lm_head if is_last else None
        if index > 0:  # the head may share the embedding's weight, on another rank
            self.head = copy.deepcopy(self.head)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotated = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotated)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def stages_of(model: PreTrainedModel, num_stages: int) -> list[DecoderStage]:
    """Divide a causal language model into pipeline stages, as equal as possible.

    Args:
        model: Model of Transformers, such as Llama, Qwen2 or Mixtral. Its modules are used.
        num_stages: Number of stages, at most the number of layers.

    Raises:
        ValueError: The model's structure differs from Llama's, or it has too few layers.
    """
    decoder = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [name for name in parts if not hasattr(decoder, name)]
    missing += [] if hasattr(model, "lm_head") else ["lm_head"]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(missing)} where Llama has it, so it cannot "
            "be cut into stages; expected a decoder made like Llama's: give stages of your own"
        )
    num_layers = len(decoder.layers)  # type: ignore[union-attr, arg-type]
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"there are {num_stages} stages for {num_layers} layers, expected 1 to {num_layers}"
        )
    return [DecoderStage(model, index, num_stages) for index in range(num_stages)]


def groups_of(stage: DecoderStage) -> dict[str, str]:
    """Return patterns for :func:`pp_offload.attach`: a group per part of a layer, except norms."""
    names = [name for name, _ in stage.layers[0].named_children() if "norm" not in name]
    return {name: f"layers.*.{name}" for name in names}
