"""What the Trainer of Hugging Face logs has figures of offload, wherever it logs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from helpers.tiny_llama import imports_frozen, make_llama, make_trainer

__all__ = ["imports_frozen"]

ALWAYS = {
    "offload/bytes_offloaded",
    "offload/bytes_reloaded",
    "offload/host_bytes_peak",
    "offload/on_demand_reloads",
}
"""On a device without a clock, and without a disk tier."""


def figures(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name.startswith("offload/")}


def steps(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def others(trainer: Any) -> Iterator[dict[str, Any]]:
    return (entry for entry in trainer.state.log_history if "loss" not in entry)


def test_each_logging_step_has_what_was_moved_since_the_last(tmp_path: Path) -> None:
    trainer = make_trainer(make_llama(), tmp_path, max_steps=4, logging_steps=2)
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
