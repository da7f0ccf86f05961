"""A decoder of Hugging Face that fills a cache in a checkpoint fills it twice, and is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpointed import FULL
from torch import Tensor, nn
from toy import same_bits

from pp_offload import ActivationCheckpointing, FullACParams
from pp_offload._checkpoint.recompute import Recompute

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tiny_llama import make_data, make_llama
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

MESSAGE = r"LlamaDecoderLayer .* DynamicCache .* model\.config\.use_cache = False"


def llama(use_cache: bool, **options: Any) -> Any:
    """Without dropout, checkpointed if there are options."""
    kernel = options.pop("attn_implementation", "sdpa")
    model = make_llama(use_cache=use_cache, attention_dropout=0.0, attn_implementation=kernel)
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


@pytest.mark.parametrize("offload_inputs", [False, True])
def test_reentrant_checkpoints_that_fill_a_cache_are_wrong_and_warned_of_once(
    offload_inputs: bool,
) -> None:
    expected = step(llama(use_cache=True))
    model = llama(use_cache=True, use_reentrant=True, offload_inputs=offload_inputs)
    with pytest.warns(UserWarning, match=MESSAGE) as said:
        found = [step(model) for _ in range(2)]
    assert len(said) == 1
    assert not any(same_bits(one, expected) for one in found), "or there is nothing to warn of"


def test_others_are_right_by_luck_and_warned_of() -> None:
    """Attention here looks at the keys of the forward alone."""
    expected = step(llama(use_cache=True))
    with pytest.warns(UserWarning, match=MESSAGE):
        assert same_bits(step(llama(use_cache=True, use_reentrant=False)), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_where_backward_fails_the_warning_comes_first(use_reentrant: bool) -> None:
    model = llama(use_cache=True, use_reentrant=use_reentrant, attn_implementation="eager")
    with pytest.warns(UserWarning, match=MESSAGE), pytest.raises(RuntimeError, match="must match"):
        step(model)


def in_training(model: Any) -> None:
    step(model)


def without_gradients(model: Any) -> None:
    model.config.use_cache = True
    rows = torch.stack([row["input_ids"] for row in make_data(2)])
    with torch.no_grad():
        model(input_ids=rows)
    model.generate(rows[:, :4], max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("use", [in_training, without_gradients])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nothing_is_said_where_no_cache_is_filled_twice(
    use: Callable[[Any], None], use_reentrant: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(llama(use_cache=False, use_reentrant=use_reentrant))


class Reads(nn.Linear):
    """Looks at a cache and leaves it as it is, which is how such a layer says so."""

    _can_checkpoint_with_cache = True

    def forward(self, x: Tensor, past_key_values: Any) -> Tensor:
        assert past_key_values is not None
        return super().forward(x)


class Holds:
    """Named like a cache, but of somebody else."""


Holds.__name__ = "Cache"


def test_a_layer_that_only_reads_is_not_warned_of() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recompute(use_reentrant=True)(Reads(4, 4), x, past_key_values=DynamicCache())
        Recompute(use_reentrant=True)(Reads(4, 4).forward, x, past_key_values=DynamicCache())
        Recompute(use_reentrant=True)(lambda x, other: x.sin(), x, Holds())


def test_a_cache_is_found_wherever_it_stands() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="function .* DynamicCache"):
        Recompute()(lambda x, more: x.sin(), x, {"some": (1, DynamicCache())})


def test_the_layer_of_llama_is_one_that_writes() -> None:
    assert not LlamaDecoderLayer._can_checkpoint_with_cache
