"""Offload in the Trainer of Hugging Face: on where it trains, and only there; nothing is left."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sessions import assert_idle, assert_no_hooks
from helpers.toy import repeated, same_bits
from torch import Tensor

from pp_offload import ActivationOffloadingMixin, LayerOffloadingMixin, OffloadConfig

pytest.importorskip("transformers")
pytest.importorskip("peft")

from helpers.tiny_llama import LENGTH, make_data, make_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(name for name in NAMES if name in TrainingArguments.__dataclass_fields__)
"""Option for checkpointing: its new name if it exists, because the old name warns."""


class OffloadTrainer(ActivationOffloadingMixin, Trainer):
    """The trainer as a user would write it."""


class LayerTrainer(LayerOffloadingMixin, Trainer):
    """Layers leave."""


class BothTrainer(LayerOffloadingMixin, ActivationOffloadingMixin, Trainer):
    """Activations leave as well."""


class OtherOrder(ActivationOffloadingMixin, LayerOffloadingMixin, Trainer):
    """As well, the other way round."""


@dataclass
class Arguments(TrainingArguments):
    """As those of TRL and axolotl, where both are words as well."""

    activation_offloading: Any = False
    layer_offloading: Any = False


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

    With activations, tensors of any size are offloaded. ``arguments`` is the class of its
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


def check_same_bits(trainer: Any, make_model: Callable[[], Any], **options: Any) -> None:
    """As without offload, and nothing is alive or in use."""
    got, folder = train(trainer), Path(trainer.args.output_dir)
    expected = repeated(lambda: train(make_trainer(make_model(), folder, kind=Trainer, **options)))
    assert same_bits(got, expected)
    gc.collect()
    if getattr(trainer, "activation_offload", None) is not None:
        assert trainer.activation_offload.statistics().bytes_offloaded > 0
        assert_idle(trainer.activation_offload)
    assert_no_hooks()


# Activations

CASES: list[Any] = [
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
    check_same_bits(trainer, lambda: make_llama(**model), **options)


def test_each_training_loss_is_logged_with_what_was_moved_since_the_last(tmp_path: Path) -> None:
    """Evaluation, prediction and the summary move nothing, and are logged as they were."""
    trainer = make_trainer(make_llama(), tmp_path, max_steps=4, logging_steps=2)
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert trainer.activation_offload.stash.is_over, "no forward has begun"
    output = trainer.train()
    statistics = trainer.activation_offload.statistics()
    predicted = trainer.predict(trainer.eval_dataset)
    assert trainer.activation_offload.statistics().bytes_offloaded == statistics.bytes_offloaded
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


def test_a_model_made_anew_has_a_context_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(None, tmp_path, trainer={"model_init": lambda: make_llama()})
    first = trainer.activation_offload
    train(trainer)
    second = trainer.activation_offload
    assert second is not first and second is trainer.activation_offload
    assert first.statistics().bytes_offloaded == 0 < second.statistics().bytes_offloaded


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


# Layers


def of_layers(wanted: Any) -> dict[str, Any]:
    """Options of a trainer whose layers leave."""
    return {"trainer": {"layer_offloading": wanted}, "kind": LayerTrainer}


ALL_LAYERS = of_layers({"frozen_only": False})
OPTIONS: list[dict[str, Any]] = [
    {CHECKPOINTING: True},
    {"bf16": True, "max_grad_norm": 0.0},
    {"max_steps": -1, "num_train_epochs": 2},
]


def adapters() -> Any:
    return make_llama(lora={}, num_hidden_layers=3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_weight_is_streamed(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path, **ALL_LAYERS, **options)
    check_same_bits(trainer, make_llama, **options)
    assert trainer.layer_offload.statistics().bytes_offloaded > 0
    assert trainer.layer_offload.names == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("kind", [LayerTrainer, BothTrainer, OtherOrder])
@pytest.mark.parametrize("options", [{}, {CHECKPOINTING: True}], ids=str)
def test_a_frozen_base_is_streamed(options: dict[str, Any], kind: Any, tmp_path: Path) -> None:
    """By default; a reference model that the trainer moves before its own is left alone."""
    reference = adapters()

    class WithReference(kind):
        def _move_model_to_device(self, model: Any, device: Any) -> None:
            super()._move_model_to_device(model, device)
            super()._move_model_to_device(reference, device)

    more = {"kind": WithReference, "trainer": {"layer_offloading": None}}
    trainer = make_trainer(adapters(), tmp_path, **more, **options)
    check_same_bits(trainer, adapters, **options)
    offloaded = trainer.layer_offload
    parameters = trainer.model.base_model.model.model.layers.parameters()
    base_bytes = sum(p.nbytes for p in parameters if not p.requires_grad)
    assert offloaded.peak_parameter_bytes_on_device == 2 * base_bytes // 3
    assert offloaded.statistics().bytes_offloaded == 0 < offloaded.statistics().bytes_reloaded
    assert offloaded.parameter_bytes_on_device == 0
    assert not any({"forward", "_apply"} & vars(module).keys() for module in reference.modules())


def test_the_next_trainer_of_a_model_takes_its_layers_over(tmp_path: Path) -> None:
    """Such as the next stage of a training, or the cell of a notebook that runs again."""
    model, expected = adapters(), adapters()
    for _ in range(2):
        trainer = make_trainer(model, tmp_path, **of_layers(True))
        got = train(trainer)
        assert same_bits(got, train(make_trainer(expected, tmp_path, kind=Trainer)))
        assert trainer.layer_offload.statistics().bytes_reloaded > 0


def test_saved_and_resumed(tmp_path: Path) -> None:
    """A checkpoint of a run goes on in the other kind of trainer, in both directions."""

    def run(first: dict[str, Any], second: dict[str, Any], folder: Path) -> Any:
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        train(make_trainer(make_llama(), folder, **first, **options))
        trainer = make_trainer(make_llama(), folder, **second, save_strategy="no", max_steps=3)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        return [p.detach().clone() for p in trainer.model.parameters()]

    without = {"kind": Trainer}
    expected = repeated(lambda: run(without, without, tmp_path / "plain"))
    for name, first, second in [
        ("both", ALL_LAYERS, ALL_LAYERS),
        ("from", ALL_LAYERS, without),
        ("to", without, ALL_LAYERS),
    ]:
        assert same_bits(run(first, second, tmp_path / name), expected), name


# Words and options of both

HIDDEN_BYTES = 2 * LENGTH * 16 * 4
"""Of a layer's hidden states: rows, tokens, width, and four bytes each."""


@pytest.mark.parametrize(
    ("argument", "wanted", "is_on"),
    [
        (None, None, True),
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, {}, True),
    ],
)
def test_who_says_whether_it_is_on(
    argument: bool | None, wanted: Any, is_on: bool, tmp_path: Path
) -> None:
    """The user of the trainer, or else its arguments if they have the word, or else it is on."""
    words = ("activation_offloading", "layer_offloading")
    given = {} if argument is None else dict.fromkeys(words, argument)
    how = {
        "kind": BothTrainer,
        "arguments": TrainingArguments if argument is None else Arguments,
        "trainer": dict.fromkeys(words, wanted),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(adapters(), tmp_path, **how, **given)
    off = [each for each in caught if "the trainer activation_offloading=True" in str(each.message)]
    assert len(off) == (argument is False and wanted is None)
    assert (trainer.activation_offload is not None) == is_on
    assert (trainer.layer_offload is not None) == is_on


@pytest.mark.parametrize("place", ["trainer", "arguments"])
@pytest.mark.parametrize("word", ["disk", "off", "hidden_states", "legacy"])
def test_words_of_other_trainers_mean_what_they_mean_there(
    word: str, place: str, tmp_path: Path
) -> None:
    """Hidden states are those of each layer and microbatch."""
    options = {CHECKPOINTING: True} if word in ("hidden_states", "legacy") else {}
    how = {
        "arguments": Arguments,
        "trainer": {"activation_offloading": word if place == "trainer" else None},
        "activation_offloading": word if place == "arguments" else False,
    }
    trainer = make_trainer(make_llama(), tmp_path, **how, **options)
    check_same_bits(trainer, make_llama, **options)
    offload = trainer.activation_offload
    assert (offload is None) == (word == "off")
    if offload is not None:
        statistics = offload.statistics()
        written = statistics.bytes_offloaded if word == "disk" else 0
        assert statistics.disk_bytes_written == written
        assert not options or statistics.bytes_offloaded == 4 * 2 * HIDDEN_BYTES
        assert offload.use_streams == (word != "legacy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trainer": {"activation_offloading": "yes"}},
            "activation_offloading is 'yes', expected True, False, 'off', 'disk', 'hidden_states',"
            " 'legacy' or a mapping",
        ),
        (
            {"arguments": Arguments, "activation_offloading": 0}
            | {"trainer": {"activation_offloading": None}},
            "activation_offloading of the trainer's arguments is 0, expected True, False",
        ),
        (
            of_layers({"layers": "model.layer"}),
            r"no module 'model.layer' \(did you mean model.layers\?\)",
        ),
        (of_layers("yes"), "layer_offloading is 'yes', expected True, False or a mapping of opt"),
        (of_layers(True), "have no frozen parameters.*freeze the base"),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_once(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(make_llama(), tmp_path, **options)


@pytest.mark.parametrize("mixin", [ActivationOffloadingMixin, LayerOffloadingMixin])
def test_a_trainer_comes_behind_the_mixin(mixin: type) -> None:
    name = mixin.__name__
    with pytest.raises(TypeError, match=rf"Trainer before {name}.*class Behind\({name}, Trainer"):
        type("Behind", (Trainer, mixin), {})
