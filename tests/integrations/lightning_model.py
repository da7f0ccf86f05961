"""A small module of Lightning, and its trainer without anything around it."""

from __future__ import annotations

from typing import Any

import torch
from lightning import pytorch as pl
from small_blocks import Blocks, batches
from torch import Tensor, nn


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
