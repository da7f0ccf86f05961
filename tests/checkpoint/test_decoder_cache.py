"""A decoder of Hugging Face that fills a cache in a checkpoint fills it twice, and is warned of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.checkpointed import FULL
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload import ActivationCheckpointing, FullACParams
from pp_offload._checkpoint.recompute import Recompute

pytest.importorskip("transformers")
pytest.importorskip("peft")

from helpers.tiny_llama import make_data, make_llama
from transformers import DynamicCache

MESSAGE = r"LlamaDecoderLayer .* DynamicCache,.* model\.config\.use_cache = False"


def llama(use_cache: bool, **options: Any) -> Any:
    """Without dropout, checkpointed if there are options."""
    model = make_llama(use_cache=use_cache, attention_dropout=0.0, attn_implementation="sdpa")
    if options:
        ActivationCheckpointing.apply_activation_checkpointing_(
            FULL, "model.layers", model, FullACParams(**options)
        )
    return model


def step(model: Any) -> list[Tensor]:
    """Loss and gradients."""
    rows = torch.stack([row["input_ids"] for row in make_data(4)])
    model.zero_grad()
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_that_is_filled_twice_is_warned_of_once(use_reentrant: bool) -> None:
    """Reentrant checkpoints are wrong then; others are right where attention looks at the keys of
    the forward alone.
    """
    expected = step(llama(use_cache=True))
    model = llama(use_cache=True, use_reentrant=use_reentrant)
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        results = [step(model) for _ in range(2)]
    assert len(caught) == 1
    assert [same_bits(result, expected) for result in results] == [not use_reentrant] * 2


class Reads(nn.Linear):
    """Looks at a cache and leaves it as it is, which is how such a layer says so."""

    _can_checkpoint_with_cache = True

    def forward(self, x: Tensor, past_key_values: Any) -> Tensor:
        assert past_key_values is not None
        return super().forward(x)


def test_a_layer_that_only_reads_is_not_warned_of() -> None:
    """Nor a model without a cache."""
    x = torch.ones(2, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(llama(use_cache=False, use_reentrant=True))
        for call in (Reads(4, 4), Reads(4, 4).forward):
            Recompute(FullACParams(use_reentrant=True))(call, x, past_key_values=DynamicCache())
