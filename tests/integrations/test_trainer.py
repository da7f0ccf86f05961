"""Offload in the Trainer of Hugging Face: on where it trains, and only there; nothing is left."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from toy import assert_no_hooks, repeated, same_bits

from pp_offload import (
    ActivationOffloadingMixin,
    CpuBackend,
    OffloadConfig,
    OffloadHiddenStates,
    checkpoint_function,
)
from pp_offload.integrations import huggingface

pytest.importorskip("transformers")
pytest.importorskip("peft")

import transformers
from tiny_llama import (
    CHECKPOINTING,
    LENGTH,
    OffloadTrainer,
    assert_nothing_left,
    imports_frozen,
    make_data,
    make_llama,
    make_trainer,
    plain,
    train,
)
from transformers import Trainer, TrainingArguments

__all__ = ["imports_frozen"]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "one microbatch": {"gradient_accumulation_steps": 1},
    "two epochs": {"max_steps": -1, "num_train_epochs": 2},
    "no clipping": {"max_grad_norm": 0.0},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "several evaluations": {"eval_on_start": True, "eval_accumulation_steps": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits_with_the_options_of_a_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path, **options)
    got = train(trainer)
    assert same_bits(got, plain(make_llama, tmp_path, **options))
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)


@pytest.mark.parametrize("more", [{"use_cache": True}, {"attn_implementation": "eager"}], ids=str)
def test_same_bits_with_the_options_of_a_model(more: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(**more), tmp_path)
    got = train(trainer)
    assert same_bits(got, plain(lambda: make_llama(**more), tmp_path))
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)


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


@pytest.mark.parametrize(
    "lora",
    [{"modules_to_save": ["lm_head"]}, {"target_modules": "all-linear"}, {"use_dora": True}],
    ids=str,
)
def test_same_bits_with_other_adapters(lora: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(lora=lora), tmp_path)
    got = train(trainer)
    assert same_bits(got, plain(lambda: make_llama(lora=lora), tmp_path))
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)


@pytest.mark.parametrize(
    "offload",
    [
        {"use_pin_memory": False},
        {"use_streams": False},
        {"max_fwd_stash_size": 1},
        {"min_offload_size": 1024},
        {"head": "model.norm"},
        {"warn_if_no_head": False},
        {"config": OffloadConfig(prefetch_bytes=0)},
        {"config": OffloadConfig(tiers=("disk",), verify=True)},
    ],
    ids=lambda offload: ",".join(offload),
)
def test_same_bits_with_the_options_of_offload(offload: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path, offload=offload)
    got = train(trainer)
    assert same_bits(got, plain(make_llama, tmp_path))
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """A ``compute_loss`` that does not ask the trainer's is in the context all the same."""

    class Own:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any):
            outputs = model(input_ids=inputs["input_ids"])
            loss = outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    class Ours(Own, OffloadTrainer):
        pass

    class Theirs(Own, Trainer):
        pass

    trainer = make_trainer(make_llama(), tmp_path, kind=Ours)
    got = train(trainer)
    assert same_bits(got, plain(make_llama, tmp_path, kind=Theirs))
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert_nothing_left(trainer)


def test_evaluation_and_prediction_are_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path)
    packed = []
    trainer.activation_offload.stash.pack = packed.append
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert not packed
    assert trainer.activation_offload.stash.is_over, "no forward has begun"


class FailsOnce:
    """The second microbatch of the first step."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.calls += 1
        if self.calls == 2:
            raise ValueError("in the loss")
        return loss


class FailsWithOffload(FailsOnce, OffloadTrainer):
    pass


class FailsWithout(FailsOnce, Trainer):
    pass


def test_an_error_in_the_loss_leaves_nothing(tmp_path: Path) -> None:
    """And the same trainer then trains as if there were no offload."""

    def run(kind: type[Trainer]) -> list[Tensor]:
        trainer = make_trainer(make_llama(), tmp_path, kind=kind)
        with pytest.raises(ValueError, match="in the loss"):
            trainer.train()
        trainer.model.zero_grad()
        if kind is FailsWithOffload:
            assert_nothing_left(trainer)
        return train(trainer)

    assert same_bits(run(FailsWithOffload), repeated(lambda: run(FailsWithout)))


def test_training_again_goes_on(tmp_path: Path) -> None:
    def run(kind: type[Trainer]) -> list[Tensor]:
        trainer = make_trainer(make_llama(), tmp_path, kind=kind)
        return [*train(trainer), *train(trainer)]

    assert same_bits(run(OffloadTrainer), repeated(lambda: run(Trainer)))


def test_a_model_made_anew_has_a_context_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(None, tmp_path, trainer={"model_init": lambda: make_llama()})
    first = trainer.activation_offload
    train(trainer)
    second = trainer.activation_offload
    assert second is not first and second is trainer.activation_offload
    assert first.statistics().bytes_offloaded == 0 < second.statistics().bytes_offloaded


@dataclass
class Arguments(TrainingArguments):
    """As those of TRL and axolotl."""

    activation_offloading: bool = False


@pytest.mark.parametrize("said", [None, False, True])
@pytest.mark.parametrize("wanted", [None, False, True, "options"])
def test_who_says_whether_it_is_on(said: bool | None, wanted: Any, tmp_path: Path) -> None:
    choice = {"min_offload_size": 1} if wanted == "options" else wanted
    trainer = make_trainer(
        make_llama(),
        tmp_path,
        arguments=TrainingArguments if said is None else Arguments,
        trainer={"activation_offloading": choice},
        **({} if said is None else {"activation_offloading": said}),
    )
    is_on = said in (None, True) if wanted is None else wanted is not False
    assert (trainer.activation_offload is not None) == is_on
    trainer.train()
    assert_no_hooks()


@dataclass
class Modes(TrainingArguments):
    """As those of axolotl, where it is a word as well."""

    activation_offloading: Any = False


@pytest.mark.parametrize("place", ["trainer", "arguments"])
@pytest.mark.parametrize("word", ["disk", "off"])
def test_words_of_other_trainers_mean_what_they_mean_there(
    word: str, place: str, tmp_path: Path
) -> None:
    def run(word: Any) -> tuple[Any, list[Tensor]]:
        trainer = make_trainer(
            make_llama(),
            tmp_path,
            arguments=Modes,
            trainer={"activation_offloading": word if place == "trainer" else None},
            activation_offloading=word if place == "arguments" else False,
        )
        return trainer, train(trainer)

    trainer, trained = run(word)
    assert same_bits(trained, repeated(lambda: run(False)[1]))
    offload = trainer.activation_offload
    assert (offload is None) == (word == "off")
    if offload is not None:
        statistics = offload.statistics()
        assert statistics.disk_bytes_written == statistics.bytes_offloaded > 0


@pytest.mark.parametrize("place", ["trainer", "arguments"])
@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("yes", "expected True, False, 'off', 'disk', 'hidden_states', 'legacy' or a mapping"),
        (1, "expected True, False, 'off', 'disk', 'hidden_states', 'legacy' or a mapping"),
    ],
)
def test_a_word_that_means_nothing_here_is_refused(
    word: Any, advice: str, place: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"activation_offloading.* is {word!r}.*{advice}"):
        make_trainer(
            make_llama(),
            tmp_path,
            arguments=Modes,
            trainer={"activation_offloading": word if place == "trainer" else None},
            activation_offloading=word if place == "arguments" else False,
        )


HIDDEN_BYTES = 2 * LENGTH * 16 * 4
"""Of a layer's hidden states: rows, tokens, width, and four bytes each."""


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("place", ["trainer", "arguments", "option"])
@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_hidden_states_alone(
    lora: dict[str, Any] | None, place: str, use_reentrant: bool, tmp_path: Path
) -> None:
    """Layers times bytes, for each microbatch of each step; evaluation offloads nothing."""
    checkpoints = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": use_reentrant}}
    word = "hidden_states"
    trainer = make_trainer(
        make_llama(lora=lora),
        tmp_path,
        arguments=Modes,
        trainer={
            "activation_offloading": {"trainer": word, "arguments": None, "option": {word: True}}[
                place
            ]
        },
        activation_offloading=word if place == "arguments" else False,
        **checkpoints,
    )
    got = train(trainer)
    assert same_bits(got, plain(lambda: make_llama(lora=lora), tmp_path, **checkpoints))
    assert trainer.activation_offload.statistics().bytes_offloaded == 4 * 2 * HIDDEN_BYTES
    assert_nothing_left(trainer)


@pytest.mark.parametrize("name", ["encoder and decoder", "experts", "masked"])
def test_hidden_states_of_other_models(name: str, tmp_path: Path) -> None:
    def make_model() -> Any:
        kind = getattr(transformers, MODELS[name][0])
        torch.manual_seed(5)
        return kind(kind.config_class(**MODELS[name][1], decoder_start_token_id=0))

    checkpoints = {CHECKPOINTING: True}
    options = {"hidden_states": True, "min_offload_size": 1}
    trainer = make_trainer(
        make_model(), tmp_path, trainer={"activation_offloading": options}, **checkpoints
    )
    got = train(trainer)
    layers = 2 if name == "encoder and decoder" else 1
    assert trainer.activation_offload.statistics().bytes_offloaded == 4 * layers * HIDDEN_BYTES
    assert same_bits(got, plain(make_model, tmp_path, **checkpoints))
    assert_nothing_left(trainer)


def test_checkpoint_function_in_the_place_of_pytorch() -> None:
    """Whatever takes a checkpoint function takes this one; here layers are given one tensor."""

    def run(function: Callable[..., Any]) -> list[Tensor]:
        model = make_llama().train()
        model._set_gradient_checkpointing(True, function)
        rows = torch.stack([row["input_ids"] for row in make_data(2)])
        torch.manual_seed(1)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    ours = checkpoint_function(offload_inputs=True, backend=CpuBackend())
    assert same_bits(run(ours), run(partial(torch_checkpoint, use_reentrant=False)))
    assert ours.stash is not None
    assert ours.stash.statistics().bytes_offloaded == 2 * HIDDEN_BYTES


def test_legacy_is_hidden_states_without_streams(tmp_path: Path) -> None:
    trainer = make_trainer(
        make_llama(), tmp_path, trainer={"activation_offloading": "legacy"}, **{CHECKPOINTING: True}
    )
    got = train(trainer)
    assert same_bits(got, plain(make_llama, tmp_path, **{CHECKPOINTING: True}))
    offload = trainer.activation_offload
    assert isinstance(offload, OffloadHiddenStates) and not offload.use_streams
    assert offload.statistics().bytes_offloaded == 4 * 2 * HIDDEN_BYTES


def test_hidden_states_without_checkpoints_are_warned_of(tmp_path: Path) -> None:
    trainer = make_trainer(
        make_llama(), tmp_path, trainer={"activation_offloading": "hidden_states"}
    )
    with pytest.warns(UserWarning, match="no layer was checkpointed .gradient_checkpointing=True"):
        trainer.train()


SILENT: dict[str, Callable[[Path], Any]] = {
    "too small": lambda folder: make_trainer(
        make_llama(), folder, offload={"min_offload_size": 2**30}
    ),
    "elsewhere": lambda folder: make_trainer(make_llama(), folder, kind=Elsewhere),
}


class Elsewhere(OffloadTrainer):
    """Its loss is computed outside of what the trainer computes losses in."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t.detach(), lambda t: t)
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()


@pytest.mark.parametrize("build", SILENT.values(), ids=SILENT)
def test_one_warning_if_nothing_was_offloaded(build: Callable[[Path], Any], tmp_path: Path) -> None:
    trainer = build(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in caught if "offloaded nothing" in str(one.message)]
    assert len(said) == 1


def test_a_step_that_offloads_is_not_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(make_llama(), tmp_path).train()
    assert not [one for one in caught if "offload" in str(one.message)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"min_offload_bytes": 3},
            r"unknown options 'min_offload_bytes' \(did you mean min_offload_size\?\); expected",
        ),
        ({"model": None}, "unknown options 'model'"),
        ({"max_fwd_stash_size": 0}, "max_fwd_stash_size is 0, expected an integer of at least 1"),
        ({"head": "tail"}, "head is 'tail', but the model has no module of that name"),
        ({"hidden_states": "yes"}, "hidden_states is 'yes', expected True or False"),
        ({"hidden_states": True, "head": "lm_head"}, "hidden_states and head, expected one"),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_once(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(make_llama(), tmp_path, trainer={"activation_offloading": options})


class Alone(ActivationOffloadingMixin):
    pass


def test_without_a_trainer_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"class Alone\(ActivationOffloadingMixin, transformers"):
        Alone()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'pp_offload\[hf\]'"):
        Alone()


def test_behind_the_trainer_it_says_so() -> None:
    """There it would never be asked."""
    with pytest.raises(TypeError, match="no Trainer behind ActivationOffloadingMixin"):

        class Behind(Trainer, ActivationOffloadingMixin):
            pass


def test_a_context_manager_of_ones_own_around_it(tmp_path: Path) -> None:
    """A subclass may add to what the loss is computed in."""

    class Adds(OffloadTrainer):
        def compute_loss_context_manager(self) -> Any:
            stack = super().compute_loss_context_manager()
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            return stack

    trainer = make_trainer(make_llama(), tmp_path, kind=Adds)
    train(trainer)
    assert trainer.activation_offload.statistics().bytes_offloaded > 0


def test_nothing_of_hugging_face_is_imported() -> None:
    code = (
        "import sys; from pp_offload import ActivationOffloadingMixin, LayerOffloadingMixin; "
        "found = {'transformers', 'peft', 'accelerate'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["xpu:3", "mps"])
def test_the_backend_is_of_the_device_of_the_trainer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a number is the current one, which a backend finds out by itself."""
    asked: list[torch.device | None] = []

    def default_backend(device: torch.device | None = None) -> CpuBackend:
        asked.append(device)
        return CpuBackend()

    monkeypatch.setattr(huggingface, "default_backend", default_backend)
    args = SimpleNamespace(device=torch.device(name))
    model = torch.nn.Linear(2, 2)
    assert huggingface._Offloading({"warn_if_no_head": False}).prepare(
        SimpleNamespace(args=args, model=model)
    )
    assert asked == [torch.device(name)]
