"""A Llama small enough for a test, and the trainer of Hugging Face around it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from helpers.toy import repeated
from pp_offload.integrations.huggingface import ActivationOffloadingMixin

NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(name for name in NAMES if name in TrainingArguments.__dataclass_fields__)
"""What checkpointing is called: by its new name where there is one, for the old one warns."""

VOCABULARY, LENGTH = 48, 12


@pytest.fixture(autouse=True, scope="module")
def imports_frozen() -> Iterator[None]:
    """Collecting garbage, as a trainer does too, leaves out what the imports made: 150 ms less."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class OffloadTrainer(ActivationOffloadingMixin, Trainer):
    """The trainer as a user would write it."""


def make_llama(*, lora: dict[str, Any] | None = None, **more: Any) -> Any:
    """The same weights every time; ``lora`` are options of an adapter, and {} are none."""
    torch.manual_seed(7)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "attention_dropout": 0.1,
        "use_cache": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **more}))
    if lora is None:
        return model
    targets = ["q_proj", "v_proj", "down_proj"]
    options = {"r": 2, "lora_dropout": 0.1, "init_lora_weights": False, "target_modules": targets}
    return get_peft_model(model, LoraConfig(**{**options, **lora}))


def make_data(num: int = 12) -> list[dict[str, Tensor]]:
    """Random tokens, the same every time."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(VOCABULARY, (num, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


class Gradients(TrainerCallback):
    """Notes every gradient before each step of the optimizer."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        grads = (parameter.grad for parameter in more["model"].parameters())
        self.gradients += [grad.clone() for grad in grads if grad is not None]


def make_trainer(
    model: Any,
    folder: Path,
    *,
    kind: type[Trainer] = OffloadTrainer,
    offload: dict[str, Any] | None = None,
    arguments: type[TrainingArguments] = TrainingArguments,
    trainer: dict[str, Any] | None = None,
    **args: Any,
) -> Any:
    """A trainer of a few steps of two microbatches, with an evaluation in between.

    :class:`OffloadTrainer` offloads tensors of any size. ``arguments`` is the class of its
    arguments, of which ``args`` are some, and ``trainer`` are others of its constructor.
    """
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    data, options = make_data(), trainer or {}
    if issubclass(kind, ActivationOffloadingMixin):
        small = {"min_offload_size": 1, "max_fwd_stash_size": 3, **(offload or {})}
        options = {"activation_offloading": small, **options}
    return kind(
        model,
        arguments(output_dir=str(folder), **{**defaults, **args}),
        train_dataset=data,
        eval_dataset=data[:5],
        **options,
    )


def train(trainer: Any) -> list[Tensor]:
    """Losses of training and of evaluation, gradients of each step, and the parameters after."""
    callback = Gradients()
    trainer.add_callback(callback)
    trainer.train()
    losses = [
        torch.tensor(float(entry[name]))
        for entry in trainer.state.log_history
        for name in ("loss", "eval_loss", "grad_norm", "train_loss")
        if name in entry
    ]
    parameters = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return [*losses, *callback.gradients, *parameters]


def plain(make_model: Callable[[], Any], folder: Path, **options: Any) -> Sequence[Tensor]:
    """What the trainer comes to without offload, seen to be so twice in a row.

    Each model has the same weights, and a config of its own.
    """
    kind = options.pop("kind", Trainer)
    return repeated(lambda: train(make_trainer(make_model(), folder, kind=kind, **options)))
