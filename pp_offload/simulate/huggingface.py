"""Models of Hugging Face without data.

    device = VirtualBackend(DEVICES["H100"])
    with use_backend(device):
        model = model_from_config(AutoConfig.from_pretrained("./llama"))
        ids = torch.zeros(1, 8192, dtype=torch.long, device="meta")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

NOTE [ What depends on data ]
    Which tokens may see which is decided by the mask, and which expert takes a token by its router:
    both are data, which a virtual device has not. So attention is causal and takes no mask, as the
    flash kernel takes none; and all experts are one grouped product, which takes as long as if each
    had as many tokens as the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "causal_without_mask"
"""The name by which Transformers knows the attention."""


def model_from_config(
    config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """A causal language model on ``meta``, to be trained.

    Args:
        config: Of Transformers; it is not changed.
        dtype: Of parameters and activations.

    Raises:
        ImportError: Transformers is not installed.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION}
    if any("experts" in name for name in config.to_dict()):
        options["experts_implementation"] = "grouped_mm"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            type(config).from_dict(config.to_dict()), **options
        )
    return model.train()
