"""What the Trainer of Hugging Face logs has figures of offload, wherever it logs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy import same_bits

from pp_offload import ActivationOffloadingMixin, OffloadConfig

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tiny_llama import imports_frozen, make_llama, make_trainer, plain, train
from transformers import Trainer, TrainerCallback

__all__ = ["imports_frozen"]

ALWAYS = {
    "offload/bytes_offloaded",
    "offload/bytes_reloaded",
    "offload/host_bytes_peak",
    "offload/on_demand_reloads",
}
"""On a device without a clock, and without a disk tier."""


class Logged(TrainerCallback):
    """What callbacks are given, as those of TensorBoard and wandb are."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.found.append(dict(logs))


def figures(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name.startswith("offload/")}


def steps(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def others(trainer: Any) -> Iterator[dict[str, Any]]:
    return (entry for entry in trainer.state.log_history if "loss" not in entry)


def test_each_logging_step_has_what_was_moved_since_the_last(tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path, max_steps=4, logging_steps=2)
    logged = Logged()
    trainer.add_callback(logged)
    trainer.train()
    statistics = trainer.activation_offload.statistics()
    entries = steps(trainer)
    assert [entry["step"] for entry in entries] == [2, 4]
    assert all(set(figures(entry)) == ALWAYS for entry in entries)
    moved = [entry["offload/bytes_offloaded"] for entry in entries]
    assert moved[0] == moved[1] > 0, "steps of the same shape"
    assert sum(moved) == statistics.bytes_offloaded
    assert sum(entry["offload/bytes_reloaded"] for entry in entries) == statistics.bytes_reloaded
    assert entries[-1]["offload/host_bytes_peak"] == statistics.host_bytes_peak > 0
    given = [entry for entry in logged.found if "loss" in entry]
    assert [figures(entry) for entry in given] == [figures(entry) for entry in entries]


def test_evaluation_prediction_and_the_summary_are_logged_as_they_were(tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path)
    output = trainer.train()
    metrics = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.log({"mine": 1.0})
    kinds = [entry for entry in others(trainer)]
    assert any("eval_loss" in entry for entry in kinds)
    assert any("train_runtime" in entry for entry in kinds)
    assert any("mine" in entry for entry in kinds)
    for entry in (*kinds, output.metrics, metrics, predicted.metrics):
        assert not figures(entry)


def test_a_disk_has_its_figures(tmp_path: Path) -> None:
    disk = {"config": OffloadConfig(tiers=("disk",))}
    trainer = make_trainer(make_llama(), tmp_path, offload=disk)
    trainer.train()
    statistics = trainer.activation_offload.statistics()
    entries = steps(trainer)
    more = {"offload/disk_bytes_written", "offload/disk_bytes_read", "offload/disk_bytes_peak"}
    assert all(set(figures(entry)) == ALWAYS | more for entry in entries)
    written = sum(entry["offload/disk_bytes_written"] for entry in entries)
    assert written == statistics.disk_bytes_written > 0


def test_without_offload_nothing_is_added(tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path, trainer={"activation_offloading": False})
    trainer.train()
    assert steps(trainer) and not any(figures(entry) for entry in trainer.state.log_history)


def test_where_nothing_leaves_the_figures_say_so(tmp_path: Path) -> None:
    """Offload is on, and every tensor is too small."""
    trainer = make_trainer(make_llama(), tmp_path, offload={"min_offload_size": 2**30})
    with pytest.warns(UserWarning, match="offloaded nothing"):
        trainer.train()
    assert [entry["offload/bytes_offloaded"] for entry in steps(trainer)] == [0, 0]


def test_a_model_made_anew_counts_anew(tmp_path: Path) -> None:
    """Of its own context: that of the model before had counted more."""
    trainer = make_trainer(None, tmp_path, trainer={"model_init": lambda: make_llama()})
    found = []
    for _ in range(2):
        trainer.train()
        found.append([entry["offload/bytes_offloaded"] for entry in steps(trainer)])
    assert found[0] == found[1] and min(found[0]) > 0


def test_logs_of_a_subclass_are_its_own(tmp_path: Path) -> None:
    """A ``log`` behind the mixin gets the figures; what is trained is as without."""

    class Counts(Trainer):
        seen: list[dict[str, float]] = []

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            self.seen.append(figures(logs))
            super().log(logs, *args, **kwargs)

    class Ours(ActivationOffloadingMixin, Counts):
        pass

    trainer = make_trainer(make_llama(), tmp_path, kind=Ours)
    got = train(trainer)
    assert [set(entry) for entry in Counts.seen if entry] == [ALWAYS, ALWAYS]
    assert same_bits(got, plain(make_llama, tmp_path))
