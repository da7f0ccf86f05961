"""Offload in the Trainer of Hugging Face: on where it trains, and only there; nothing is left."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toy import same_bits

from pp_offload import (
    ActivationOffloadingMixin,
    LayerOffloadingMixin,
    OffloadConfig,
)

pytest.importorskip("transformers")
pytest.importorskip("peft")

import transformers
from helpers.tiny_llama import (
    CHECKPOINTING,
    LENGTH,
    assert_nothing_left,
    imports_frozen,
    make_llama,
    make_trainer,
    plain,
    train,
)
from transformers import Trainer, TrainingArguments

__all__ = ["imports_frozen"]

CASES: list[Any] = [
    ({}, {}, {}),
    ({"bf16": True}, {}, {"use_pin_memory": False}),
    ({"gradient_accumulation_steps": 1}, {"use_cache": True}, {"use_streams": False}),
    ({"max_steps": -1, "num_train_epochs": 2}, {}, {"max_fwd_stash_size": 1}),
    pytest.param(
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {},
        {},
        marks=pytest.mark.slow,
    ),
    ({"eval_on_start": True}, {"attn_implementation": "eager"}, {"head": "model.norm"}),
    ({}, {"lora": {"target_modules": "all-linear"}}, {"config": OffloadConfig(prefetch_bytes=0)}),
    ({"max_grad_norm": 0.0}, {"lora": {"use_dora": True}}, {"warn_if_no_head": False}),
    ({}, {}, {"config": OffloadConfig(tiers=("disk",), verify=True)}),
]
"""Options of the trainer, of the model and of the offload."""


@pytest.mark.field("F46")
@pytest.mark.parametrize(("options", "model", "offload"), CASES, ids=str)
def test_same_bits_with_options(
    options: dict[str, Any], model: dict[str, Any], offload: dict[str, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(make_llama(**model), tmp_path, offload=offload, **options)
    got = train(trainer)
    assert same_bits(got, plain(lambda: make_llama(**model), tmp_path, **options))
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)


def test_each_training_loss_is_logged_with_what_was_moved_since_the_last(tmp_path: Path) -> None:
    """Evaluation, prediction and the summary are logged as they were."""
    trainer = make_trainer(make_llama(), tmp_path, max_steps=4, logging_steps=2)
    output = trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    statistics = trainer.activation_offload.statistics()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    moved = [entry["offload/bytes_offloaded"] for entry in entries]
    assert len(moved) == 2 and moved[0] == moved[1] > 0, "steps of the same shape"
    assert sum(moved) == statistics.bytes_offloaded
    assert sum(entry["offload/bytes_reloaded"] for entry in entries) == statistics.bytes_reloaded
    assert entries[-1]["offload/host_bytes_peak"] == statistics.host_bytes_peak > 0
    assert all("offload/on_demand_reloads" in entry for entry in entries)
    assert any("eval_loss" in entry for entry in others)
    for entry in (*others, output.metrics, predicted.metrics):
        assert not any(name.startswith("offload/") for name in entry)


SHAPE = {"vocab_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = {**SHAPE, "hidden_size": 16, "intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder and decoder": (
        "T5ForConditionalGeneration",
        {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    ),
    "experts": (
        "MixtralForCausalLM",
        {**DECODER, "num_local_experts": 4, "num_key_value_heads": 2, "output_router_logits": True},
    ),
    "state space": (
        "MambaForCausalLM",
        {"vocab_size": 48, "hidden_size": 8, "num_hidden_layers": 1},
    ),
    "masked": ("BertForMaskedLM", DECODER),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_bits_with_other_models(name: str, tmp_path: Path) -> None:
    def make_model() -> Any:
        kind = getattr(transformers, MODELS[name][0])
        torch.manual_seed(5)
        # A config of its own: a trainer writes use_cache=False to it, and without a cache the
        # keys have other strides, so another kernel multiplies them: equal on some processors only.
        return kind(kind.config_class(**MODELS[name][1], decoder_start_token_id=0))

    expected = plain(make_model, tmp_path)
    trainer = make_trainer(make_model(), tmp_path)
    got = train(trainer)
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)
    assert same_bits(got, expected)


def test_evaluation_and_prediction_are_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path)
    packed = []
    trainer.activation_offload.stash.pack = packed.append
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert not packed
    assert trainer.activation_offload.stash.is_over, "no forward has begun"


def test_a_model_made_anew_has_a_context_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(None, tmp_path, trainer={"model_init": lambda: make_llama()})
    first = trainer.activation_offload
    train(trainer)
    second = trainer.activation_offload
    assert second is not first and second is trainer.activation_offload
    assert first.statistics().bytes_offloaded == 0 < second.statistics().bytes_offloaded


HIDDEN_BYTES = 2 * LENGTH * 16 * 4
"""Of a layer's hidden states: rows, tokens, width, and four bytes each."""


@dataclass
class Arguments(TrainingArguments):
    """As those of TRL and axolotl, where it is a word as well."""

    activation_offloading: Any = False


@pytest.mark.parametrize(
    ("argument", "wanted", "is_on"),
    [
        (None, None, True),
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, {"min_offload_size": 1}, True),
    ],
)
def test_who_says_whether_it_is_on(
    argument: bool | None, wanted: Any, is_on: bool, tmp_path: Path
) -> None:
    given = {} if argument is None else {"activation_offloading": argument}
    kind = TrainingArguments if argument is None else Arguments
    choice = {"activation_offloading": wanted}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(make_llama(), tmp_path, arguments=kind, trainer=choice, **given)
    off = [each for each in caught if "the trainer activation_offloading=True" in str(each.message)]
    assert len(off) == (argument is False and wanted is None)
    assert (trainer.activation_offload is not None) == is_on


def trainer_of(word: Any, place: str, folder: Path, **options: Any) -> Any:
    """A trainer whose user or whose arguments have ``word`` for activation_offloading."""
    return make_trainer(
        make_llama(),
        folder,
        arguments=Arguments,
        trainer={"activation_offloading": word if place == "trainer" else None},
        activation_offloading=word if place == "arguments" else False,
        **options,
    )


@pytest.mark.parametrize("place", ["trainer", "arguments"])
@pytest.mark.parametrize("word", ["disk", "off", "hidden_states", "legacy"])
def test_words_of_other_trainers_mean_what_they_mean_there(
    word: str, place: str, tmp_path: Path
) -> None:
    """Hidden states are rows, tokens, width and four bytes, of each layer and microbatch."""
    options = {CHECKPOINTING: True} if word in ("hidden_states", "legacy") else {}
    trainer = trainer_of(word, place, tmp_path, **options)
    got = train(trainer)
    assert same_bits(got, plain(make_llama, tmp_path, **options))
    offload = trainer.activation_offload
    assert (offload is None) == (word == "off")
    if offload is not None:
        statistics = offload.statistics()
        written = statistics.bytes_offloaded if word == "disk" else 0
        assert statistics.disk_bytes_written == written and statistics.bytes_offloaded > 0
        assert not options or statistics.bytes_offloaded == 4 * 2 * HIDDEN_BYTES
        assert offload.use_streams == (word != "legacy")
        assert_nothing_left(trainer)


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ({"min_offload_size": 2**30}, "it saved no 5 tensors of at least"),
        ({"hidden_states": True}, "no layer was checkpointed, or given hidden states of at least"),
    ],
)
def test_one_warning_if_nothing_was_offloaded(
    offload: dict[str, Any], words: str, tmp_path: Path
) -> None:
    trainer = make_trainer(make_llama(), tmp_path, trainer={"activation_offloading": offload})
    with pytest.warns(UserWarning, match=f"offloaded nothing: either {words}") as caught:
        trainer.train()
    assert len([each for each in caught if "offloaded nothing" in str(each.message)]) == 1


@pytest.mark.parametrize("place", ["trainer", "arguments"])
def test_a_word_that_nobody_knows_is_refused_at_once(place: str, tmp_path: Path) -> None:
    words = "'yes', expected True, False, 'off', 'disk', 'hidden_states', 'legacy' or a mapping"
    with pytest.raises(ValueError, match=f"activation_offloading.* is {words}"):
        trainer_of("yes", place, tmp_path)


@pytest.mark.parametrize("mixin", [ActivationOffloadingMixin, LayerOffloadingMixin])
def test_a_trainer_comes_behind_the_mixin(mixin: type) -> None:
    name = mixin.__name__
    with pytest.raises(TypeError, match=rf"Trainer before {name}.*class Behind\({name}, Trainer"):
        type("Behind", (Trainer, mixin), {})


def test_no_library_is_imported() -> None:
    code = (
        "import sys; from pp_offload import *; import pp_offload.integrations.accelerate; "
        "libraries = {'transformers', 'peft', 'accelerate', 'lightning', 'pytorch_lightning'}; "
        "assert not libraries & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
