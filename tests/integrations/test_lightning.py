"""Offload in the trainer of Lightning: on where it trains, and only there; nothing is left."""

from __future__ import annotations

import csv
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.saving import Raises
from helpers.sessions import assert_no_hooks
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import CpuBackend

pytest.importorskip("lightning")

from lightning import pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from small_blocks import GROUPS, PRODUCTS, Blocks, batches

from pp_offload.integrations.lightning import ActivationOffload

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, small data

ON_DISK = {"config": OffloadConfig(tiers=("disk",)), "min_offload_size": 1}
CALLBACKS: dict[str, Callable[[], ActivationOffload]] = {
    name: partial(ActivationOffload, **options)
    for name, options in (*PRODUCTS.items(), ("on disk", ON_DISK))
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "ddp": {"strategy": "ddp", "devices": 1, "accumulate_grad_batches": 2},
}


class Model(Blocks, pl.LightningModule):
    """Trains by itself; notes its losses and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self(x), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [p.grad.clone() for p in self.parameters() if p.grad is not None]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ByHand(Model):
    """Two forwards with their backwards in a step, and no other loop to run them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            optimizer.zero_grad()
            loss = self.loss(part)
            self.manual_backward(loss)
            optimizer.step()
            self.seen.append(loss.detach().clone())


def make_trainer(*callbacks: Any, **options: Any) -> Any:
    """Quiet, on the CPU; two epochs with a sanity check and validations in the middle of each."""
    defaults = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "logger": False,
        "max_epochs": 2,
        "val_check_interval": 4,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(model: Model, trainer: Any) -> list[Tensor]:
    """Losses, gradients of each step, and parameters after."""
    torch.manual_seed(17)
    trainer.fit(model, batches(8), batches(2))
    return [*model.seen, *(p.detach().clone() for p in model.parameters())]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with use_backend(CpuBackend()), patch.dict(os.environ):
        yield
    if dist.is_initialized():  # by a strategy, which sets variables too
        dist.destroy_process_group()


def assert_nothing_left(model: Model, callback: ActivationOffload) -> None:
    gc.collect()
    statistics = callback.statistics()
    assert statistics is not None and statistics.live_tensors == 0
    assert PipelineOffloadManager.get_instance().statistics().live_tensors == 0
    assert "training_step" not in vars(model)
    assert not any(module._forward_pre_hooks for module in model.layers.modules())
    assert_no_hooks()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("kind", [Model, ByHand])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits_with_the_options_of_a_trainer(
    name: str, kind: type[Model], options: dict[str, Any]
) -> None:
    """Of the module's own, or with several forwards in a step of the optimizer, too."""
    if kind is not Model:
        options = {}
    callback, model = CALLBACKS[name](), kind()
    got = fit(model, make_trainer(callback, **options))
    assert same_bits(got, fit(kind(), make_trainer(**options)))
    assert callback.statistics().bytes_offloaded > 0
    assert_nothing_left(model, callback)


@pytest.mark.parametrize("name", CALLBACKS)
def test_validation_and_tests_are_left_alone(name: str) -> None:
    class Looks(Model):
        def loss(self, batch: Any) -> Any:
            before = callback.statistics()
            loss = super().loss(batch)
            if not self.training and before is not None:
                assert callback.statistics().since(before).bytes_offloaded == 0
            return loss

    callback, model = CALLBACKS[name](), Looks()
    trainer = make_trainer(callback, num_sanity_val_steps=2)
    assert callback.statistics() is None
    fit(model, trainer)
    moved = callback.statistics().bytes_offloaded
    trainer.validate(model, batches(2), verbose=False)
    trainer.test(model, batches(2), verbose=False)
    assert callback.statistics().bytes_offloaded == moved > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_leaves_nothing(name: str, error: type[BaseException], place: str) -> None:
    """And the same module and callback then train as if there were no offload."""

    class Fails(Model):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.calls += 1
            if self.calls == 2 and place == "forward":
                raise error
            return Raises.apply(loss, error) if self.calls == 2 else loss

    callback, model = CALLBACKS[name](), Fails()
    with pytest.raises((ValueError, SystemExit)):  # what an interrupt becomes
        fit(model, make_trainer(callback))
    assert_nothing_left(model, callback)
    model.zero_grad()
    model.seen.clear()
    plain = Model()
    plain.load_state_dict(model.state_dict())
    assert same_bits(fit(model, make_trainer(callback)), fit(plain, make_trainer()))
    assert_nothing_left(model, callback)


def logged(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir, "metrics.csv")) as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", CALLBACKS)
def test_each_step_of_the_optimizer_logs_what_it_moved(name: str, tmp_path: Path) -> None:
    callback = CALLBACKS[name]()
    logger = CSVLogger(str(tmp_path))
    trainer = make_trainer(callback, accumulate_grad_batches=2, logger=logger)
    fit(Model(), trainer)
    rows = [row for row in logged(logger) if row.get("offload/bytes_offloaded")]
    assert len(rows) == trainer.global_step == 8
    moved = [float(row["offload/bytes_offloaded"]) for row in rows]
    assert sum(moved) == callback.statistics().bytes_offloaded and min(moved) > 0
    assert all(row["loss"] for row in rows), "in the same rows"
    assert ("offload/disk_bytes_written" in rows[0]) == (name == "on disk")
    logger = CSVLogger(str(tmp_path))
    fit(Model(), make_trainer(ActivationOffload(**GROUPS, log=False), logger=logger))
    assert logged(logger) and not any("offload" in key for row in logged(logger) for key in row)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pp_offload.integrations.lightning"
    monkeypatch.delitem(sys.modules, name)
    for missing in ("lightning.pytorch", "lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'pp_offload\[lightning\]'"):
        importlib.import_module(name)
