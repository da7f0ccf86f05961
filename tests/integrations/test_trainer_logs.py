"""What the Trainer of Hugging Face logs has figures of offload, wherever it logs to."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from helpers.tiny_llama import imports_frozen, make_llama, make_trainer

__all__ = ["imports_frozen"]


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
