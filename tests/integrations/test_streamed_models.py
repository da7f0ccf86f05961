"""Models of Hugging Face train with their layers on the host as they do on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.toy import assert_no_hooks, same_bits
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

from conftest import BACKENDS, TWO_BACKENDS
from helpers.streamed import MODELS, batch, make, make_lora, pair, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

Checkpoints = Callable[[Any], None]


def none(model: Any) -> None:
    """No checkpoints."""


def theirs(model: Any, use_reentrant: bool) -> None:
    """Those that the layers of Hugging Face have inside, by either name of them."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    model.enable_input_require_grads()
    enable({"use_reentrant": use_reentrant})


def wrapped(model: Any) -> None:
    """Those of PyTorch around each layer."""
    kinds = {type(layer) for layer in model.modules() if hasattr(layer, "gradient_checkpointing")}
    layers = {kind for kind in kinds if "Layer" in kind.__name__ or "Block" in kind.__name__}
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in layers)


CHECKPOINTS: dict[str, Checkpoints] = {
    "none": none,
    "non-reentrant": partial(theirs, use_reentrant=False),
    "reentrant": partial(theirs, use_reentrant=True),
    "wrapped": wrapped,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_resident", [1, 2, 3])
@pytest.mark.parametrize("weights", ["all", "frozen base"])
@pytest.mark.parametrize("checkpoints", list(CHECKPOINTS))
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", BACKENDS)
def test_equal_bit_for_bit(
    kind: str, name: str, checkpoints: str, weights: str, num_resident: int, when: str
) -> None:
    """Checkpoints may be there before the layers are offloaded, or come after."""
    prepare, is_lora = CHECKPOINTS[checkpoints], weights == "frozen base"

    def build(name: str) -> Any:
        model = make_lora(name) if is_lora else make(name)
        if when == "before":
            prepare(model)
        return model

    options = {"frozen_only": is_lora, "num_resident": num_resident}
    with pair(name, kind, build, **options) as (plain, model, offloaded):
        for each in (plain, model) if when == "after" else ():
            prepare(each)
        assert same_bits(train(model), train(plain))
        assert offloaded.parameter_bytes_on_device == 0
        moved = offloaded.statistics()
        assert moved.bytes_reloaded > 0
        assert (moved.bytes_offloaded == 0) == is_lora, "gradients of a frozen base do not exist"
        assert moved.bytes_in_flight == 0
    assert_no_hooks()


def generated(model: Any) -> Tensor:
    model.eval()
    tokens: Tensor = model.generate(
        batch(model)["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    return tokens.cpu()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("kind", TWO_BACKENDS)
def test_generate(kind: str, name: str) -> None:
    """Each token is a forward; an encoder runs once, before the first."""
    with pair(name, kind) as (plain, model, offloaded):
        assert torch.equal(generated(model), generated(plain))
        assert offloaded.parameter_bytes_on_device == 0
        assert same_bits(train(model, steps=1), train(plain, steps=1)), "and then it trains"
