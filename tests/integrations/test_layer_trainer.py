"""Layers on the host in the Trainer of Hugging Face: the same bits, and all else where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toy import assert_no_hooks, repeated, same_bits

from pp_offload import ActivationOffloadingMixin, LayerOffloadingMixin

pytest.importorskip("transformers")
pytest.importorskip("peft")

from helpers.tiny_llama import CHECKPOINTING, imports_frozen, make_llama, make_trainer, plain, train
from transformers import Trainer, TrainingArguments

__all__ = ["imports_frozen"]

HOST = torch.device("cpu")


class LayerTrainer(LayerOffloadingMixin, Trainer):
    """The trainer as a user would write it."""


class BothTrainer(LayerOffloadingMixin, ActivationOffloadingMixin, Trainer):
    """Activations leave as well."""


class OtherOrder(ActivationOffloadingMixin, LayerOffloadingMixin, Trainer):
    """As well, the other way round."""


KINDS: dict[str, Any] = {
    "layers": LayerTrainer,
    "layers first": BothTrainer,
    "activations first": OtherOrder,
}


def adapters(**more: Any) -> Any:
    return make_llama(lora={}, num_hidden_layers=3, **more)


def streamed(model: Any, folder: Path, offload: Any = None, **options: Any) -> Any:
    kind = options.pop("kind", LayerTrainer)
    more = {**options.pop("trainer", {}), "layer_offloading": offload}
    return make_trainer(model, folder, kind=kind, trainer=more, **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {CHECKPOINTING: True},
    {"bf16": True, "max_grad_norm": 0.0},
    {"max_steps": -1, "num_train_epochs": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_weight_is_streamed(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = streamed(make_llama(), tmp_path, {"frozen_only": False}, **options)
    got = train(trainer)
    assert same_bits(got, plain(make_llama, tmp_path, **options))
    assert trainer.layer_offload.statistics().bytes_offloaded > 0
    assert trainer.layer_offload.names == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("kind", ["layers", "layers first", "activations first"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_a_frozen_base_is_streamed(options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """Activations may leave as well."""
    more: dict[str, Any] = {"kind": KINDS[kind]}
    if kind != "layers":
        activations = {"min_offload_size": 1, "max_fwd_stash_size": 3}
        more["trainer"] = {"activation_offloading": activations}
    trainer = streamed(adapters(), tmp_path, **more, **options)
    got = train(trainer)
    assert same_bits(got, plain(adapters, tmp_path, **options))
    offloaded = trainer.layer_offload
    frozen = [p for p in trainer.model.base_model.model.model.layers.parameters()]
    base_bytes = sum(p.nbytes for p in frozen if not p.requires_grad)
    assert offloaded.peak_parameter_bytes_on_device == 2 * base_bytes // 3
    assert offloaded.statistics().bytes_offloaded == 0 < offloaded.statistics().bytes_reloaded
    assert kind == "layers" or trainer.activation_offload.statistics().bytes_offloaded > 0
    assert offloaded.parameter_bytes_on_device == 0
    assert_no_hooks()


def test_saved_and_resumed(tmp_path: Path) -> None:
    """A checkpoint of a run goes on in the other kind of trainer, in both directions."""

    def run(first: Callable[..., Any], second: Callable[..., Any], folder: Path) -> Any:
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        train(first(make_llama(), folder, **options))
        trainer = second(make_llama(), folder, save_strategy="no", max_steps=3)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        return [p.detach().clone() for p in trainer.model.parameters()]

    def without(model: Any, folder: Path, **options: Any) -> Any:
        return make_trainer(model, folder, kind=Trainer, **options)

    def streaming(model: Any, folder: Path, **options: Any) -> Any:
        return streamed(model, folder, {"frozen_only": False}, **options)

    expected = repeated(lambda: run(without, without, tmp_path / "plain"))
    for name, first, second in [
        ("both", streaming, streaming),
        ("from", streaming, without),
        ("to", without, streaming),
    ]:
        assert same_bits(run(first, second, tmp_path / name), expected), name


@dataclass
class Arguments(TrainingArguments):
    """As those of axolotl."""

    layer_offloading: Any = False


@pytest.mark.parametrize("argument", [False, True])
@pytest.mark.parametrize("wanted", [None, False, {"num_resident": 1}])
def test_who_says_whether_it_is_on(argument: bool, wanted: Any, tmp_path: Path) -> None:
    how: Any = {"arguments": Arguments, "layer_offloading": argument}
    trainer = streamed(adapters(), tmp_path, wanted, **how)
    assert (trainer.layer_offload is not None) == (argument if wanted is None else bool(wanted))


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"layers": "model.layer"}, r"no module 'model.layer' \(did you mean model.layers\?\)"),
        ("yes", "layer_offloading is 'yes', expected True, False or a mapping of options"),
        (True, "have no frozen parameters.*freeze the base"),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_once(offload: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        streamed(make_llama(), tmp_path, offload)


def test_another_model_that_the_trainer_moves_is_left_alone(tmp_path: Path) -> None:
    """As a reference model is moved, before the trainer has its own."""
    reference = adapters()

    class WithReference(LayerTrainer):
        def _move_model_to_device(self, model: Any, device: Any) -> None:
            super()._move_model_to_device(model, device)
            super()._move_model_to_device(reference, device)

    trainer = streamed(adapters(), tmp_path, kind=WithReference)
    assert same_bits(train(trainer), plain(adapters, tmp_path))
    assert trainer.layer_offload.statistics().bytes_reloaded > 0
    assert not any({"forward", "_apply"} & vars(module).keys() for module in reference.modules())
