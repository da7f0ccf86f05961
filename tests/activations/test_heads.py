"""The output head is found in models as Hugging Face makes them, however they are wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pp_offload._activations.context import is_excluded
from pp_offload._activations.output_head import (
    find_head,
    get_lora_act_offloading_ctx_manager,
    unwrapped,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def make(name: str, config: dict[str, Any], **more: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config, **more))


def llama(**more: Any) -> Any:
    return make("LlamaForCausalLM", SMALL, **more)


def lora(model: Any, **more: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **more)
    return peft.get_peft_model(model, config)


class Parallel(nn.Module):
    """Wraps as ``DistributedDataParallel`` does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


class Valued(nn.Module):
    """Wraps as the value models of TRL do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Linear(16, 1)


MODELS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "llama": (llama, "lm_head"),
    "classifier": (lambda: make("LlamaForSequenceClassification", SMALL, pad_token_id=0), "score"),
    "head of another name": (lambda: make("BertForMaskedLM", SMALL), "cls.predictions.decoder"),
    "encoder and decoder": (lambda: make("T5ForConditionalGeneration", T5), "lm_head"),
    "encoder": (lambda: make("BertModel", SMALL), None),
    "decoder without a head": (lambda: make("LlamaModel", SMALL), "norm"),
}

WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "bare": lambda model: model,
    "parallel": Parallel,
    "compiled": torch.compile,
    "checkpointed": checkpoint_wrapper,
    "lora": lora,
    "lora, valued": lambda model: Valued(lora(model)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_a_model(name: str) -> None:
    build, head = MODELS[name]
    model = build()
    assert find_head(model) is (None if head is None else model.get_submodule(head))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_lora_act_offloading_ctx_manager(model)
    messages = [str(w.message) for w in caught if "no output head found" in str(w.message)]
    assert len(messages) == (head is None)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_head_of_a_wrapped_model(wrap: Callable[[Any], nn.Module]) -> None:
    model = llama(tie_word_embeddings=True)
    head, wrapper = model.lm_head, wrap(model)
    assert unwrapped(wrapper) is model
    assert find_head(wrapper) is head is model.lm_head


def test_modules_of_liger_are_left_out() -> None:
    """By the name of the module: others of Liger save what any layer does."""

    class LigerNorm(nn.Linear):
        pass

    model = nn.ModuleDict({"norm": LigerNorm(2, 2), "liger_loss": nn.Linear(2, 2)})
    model["head"], model["other"] = nn.Linear(2, 2), nn.Linear(2, 2)
    get_lora_act_offloading_ctx_manager(model, head="head")
    seen = {}
    for name, module in model.items():
        module.register_forward_pre_hook(lambda *_, name=name: seen.update({name: is_excluded()}))
        module(torch.ones(2))
    assert seen == {"norm": False, "liger_loss": True, "head": True, "other": False}
