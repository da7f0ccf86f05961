"""What a left-out module saves stays on the device: that of the output head, which is found in
models as Hugging Face makes them, and of chosen others.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sessions import assert_no_hooks, gradients
from helpers.toy import same_bits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from pp_offload import OffloadActivations, get_lora_act_offloading_ctx_manager
from pp_offload.activations import exclude, find_head, is_excluded, unwrapped
from pp_offload.testing import SimulatedBackend

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# The head

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def make(name: str, config: dict[str, Any] = SMALL, **more: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config, **more))


def lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def inside(attribute: str) -> Callable[[Any], nn.Module]:
    """Wraps as ``DistributedDataParallel`` does, or a value model of TRL."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapper = nn.Module()
        wrapper.v_head = nn.Linear(16, 1)
        setattr(wrapper, attribute, model)
        return wrapper

    return wrap


MODELS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "llama": (lambda: make("LlamaForCausalLM"), "lm_head"),
    "classifier": (lambda: make("LlamaForSequenceClassification", pad_token_id=0), "score"),
    "head of another name": (lambda: make("BertForMaskedLM"), "cls.predictions.decoder"),
    "encoder and decoder": (lambda: make("T5ForConditionalGeneration", T5), "lm_head"),
    "encoder": (lambda: make("BertModel"), None),
    "decoder without a head": (lambda: make("LlamaModel"), "norm"),
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


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "bare": lambda model: model,
    "parallel": inside("module"),
    "compiled": torch.compile,
    "checkpointed": checkpoint_wrapper,
    "lora": lora,
    "lora, valued": lambda model: inside("pretrained_model")(lora(model)),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_head_of_a_wrapped_model(wrap: Callable[[Any], nn.Module]) -> None:
    model = make("LlamaForCausalLM", tie_word_embeddings=True)
    head, wrapper = model.lm_head, wrap(model)
    assert unwrapped(wrapper) is model
    assert find_head(wrapper) is head is model.lm_head


# Inside its forward and nowhere else


def left_out(model: nn.Module) -> list[bool]:
    """Of each child, whether it is left out inside its forward."""
    seen: list[bool] = []
    for module in model.children():
        module.register_forward_pre_hook(lambda *_: seen.append(is_excluded()))
        module(torch.ones(2))
    assert not is_excluded()
    assert_no_hooks()
    return seen


def test_modules_of_liger_are_left_out() -> None:
    """By the name of the module: others of Liger save what any layer does. Also in a copy."""

    class LigerNorm(nn.Linear):
        pass

    modules = {name: nn.Linear(2, 2) for name in ("liger_loss", "head", "other")}
    model = nn.ModuleDict({"norm": LigerNorm(2, 2), **modules})
    get_lora_act_offloading_ctx_manager(model, head="head")
    for each in (copy.deepcopy(model), model):
        assert left_out(each) == [False, True, True, False]


def test_a_forward_that_raises_is_left() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for _ in range(2):
        exclude(model[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    assert left_out(model) == [True]


@pytest.mark.parametrize("impl", list(CheckpointImpl))
@pytest.mark.parametrize("order", ["late", "eager"])
def test_in_a_checkpoint_it_keeps_nothing(impl: CheckpointImpl, order: str) -> None:
    """After a forward the device has the same bytes, with left-out modules inside or without."""
    held, results = [], []
    for num_left_out in (0, 1, 3):
        backend = SimulatedBackend(order, seed=1)
        with backend.activate():
            torch.manual_seed(3)
            body = nn.Sequential(nn.SiLU(), nn.Sigmoid(), nn.Tanh())
            layers = [nn.Sequential(nn.Linear(8, 8), copy.deepcopy(body)) for _ in range(3)]
            for layer in layers[:num_left_out]:
                exclude(layer[1])
            model = nn.Sequential(*(checkpoint_wrapper(layer, impl) for layer in layers))
            offload = OffloadActivations(
                min_offload_size=1, max_fwd_stash_size=1, use_streams=False, backend=backend
            )
            x = torch.linspace(-1, 1, 128).view(16, 8).requires_grad_()
            before = backend.device_bytes
            with offload:
                loss = model(x * 1).sum()
            held.append((backend.device_bytes - before, offload.statistics().live_tensors))
            loss.backward()
            assert offload.statistics().live_tensors == 0
            results.append(gradients(x, *model.parameters()))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
    assert held[0] == held[1] == held[2]
    assert held[0][1] == len(model), "what the checkpoints keep: the input of each"
