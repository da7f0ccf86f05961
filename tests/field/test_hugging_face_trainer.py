"""F46: the Trainer of Hugging Face, full and LoRA, with checkpoints and tied heads: same bits.

All through ``Trainer.train()``: two microbatches a step, and an evaluation after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import BACKENDS, make_backend, skip_on_emulated
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from toy import same_bits

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tiny_llama import (
    CHECKPOINTING,
    assert_nothing_left,
    imports_frozen,
    make_llama,
    make_trainer,
    plain,
    train,
)

pytestmark = pytest.mark.field("F46")

__all__ = ["imports_frozen"]

LORA: dict[str, dict[str, Any] | None] = {"full": None, "lora": {}}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "kept": {},
    "wrapped": {},
    "reentrant": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
    "non-reentrant": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
}

on_backends = pytest.mark.parametrize("kind", BACKENDS)
loras = pytest.mark.parametrize("lora", LORA)
checkpoints = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
ties = pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])


WRAPPED = ("mlp", "q_proj")
"""Of every layer, checkpointed apart; with LoRA, adapters are inside."""


def build(lora: str, checkpoint: str, is_tied: bool) -> Any:
    """The model, with its checkpoint wrappers if these are what it has."""
    model = make_llama(is_tied=is_tied, lora=LORA[lora])
    if checkpoint == "wrapped":
        parts = [model.get_submodule(n) for n, _ in model.named_modules() if n.endswith(WRAPPED)]
        apply_activation_checkpointing(model, check_fn=lambda module: module in parts)
        assert sum("_checkpoint_wrapped_module" in n for n, _ in model.named_modules()) > 4
    return model


@cache
def expected(use_cpu: bool, lora: str, checkpoint: str, is_tied: bool) -> Sequence[Tensor]:
    """What the trainer comes to without offload."""
    with TemporaryDirectory() as folder:
        options = {**CHECKPOINTS[checkpoint], "use_cpu": use_cpu}
        return plain(lambda: build(lora, checkpoint, is_tied), Path(folder), **options)


@pytest.mark.covering(1)
@ties
@checkpoints
@loras
@on_backends
def test_same_bits(kind: str, lora: str, checkpoint: str, is_tied: bool, tmp_path: Path) -> None:
    backend = make_backend(kind)
    skip_on_emulated(backend, "accelerate knows no such device, and trains on the CPU")
    wanted = expected(backend.device.type == "cpu", lora, checkpoint, is_tied)
    with backend.activate():
        model = build(lora, checkpoint, is_tied)
        trainer = make_trainer(model, tmp_path, backend=backend, **CHECKPOINTS[checkpoint])
        got = train(trainer)
        assert same_bits(got, wanted)
        assert trainer.activation_offload.statistics().bytes_offloaded > 0
        assert_nothing_left(trainer)
