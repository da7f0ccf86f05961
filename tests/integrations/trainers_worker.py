"""One rank of loops of other libraries that replicate a model; for ``test_trainers_on_ranks``.

A case is ``library:product``, such as ``lightning:groups``.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import accelerate_loop
import lightning_model
import torch
from helpers.ranks import run_cases
from small_blocks import PRODUCTS
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pp_offload import use_backend
from pp_offload.backends import CpuBackend
from pp_offload.integrations import accelerate, lightning


class Replicated(lightning_model.Model):
    """Looks whether it is."""

    def on_train_start(self) -> None:
        assert isinstance(self.trainer.strategy.model, DistributedDataParallel)


def of_lightning(options: dict[str, Any] | None) -> tuple[list[Tensor], int]:
    """Its own strategy starts the process group; each rank has a part of the data."""
    callbacks = [] if options is None else [lightning.ActivationOffload(**options)]
    with patch.dict(os.environ, LOCAL_RANK=os.environ["RANK"]):  # Lightning takes some of it away
        trainer = lightning_model.make_trainer(
            *callbacks, strategy="ddp", devices=2, accumulate_grad_batches=2
        )
        seen = lightning_model.fit(Replicated(), trainer)
    return seen, callbacks[0].statistics().bytes_offloaded if callbacks else 0


def of_accelerate(options: dict[str, Any] | None) -> tuple[list[Tensor], int]:
    """In its DDP, with microbatches that are not synced."""

    def make(accelerator: Any, model: Any) -> Any:
        assert isinstance(model, DistributedDataParallel)
        return accelerate.ActivationOffload(accelerator, model, **options)

    how = {"num": 16, "gradient_accumulation_steps": 2}
    seen, offload = accelerate_loop.train(None if options is None else make, **how)
    if options is None:
        return seen, 0
    offload.close()
    return seen, offload.statistics().bytes_offloaded


LIBRARIES = {"accelerate": of_accelerate, "lightning": of_lightning}


def compare(case: str) -> dict[str, Any]:
    """One case, without and with offload."""
    library, _, product = case.partition(":")
    expected, _ = LIBRARIES[library](None)
    with use_backend(CpuBackend()):
        got, moved = LIBRARIES[library](PRODUCTS[product])
    same = len(got) == len(expected) > 0 and all(map(torch.equal, got, expected))
    return {"equal": same, "offloaded": moved, "loss": float(got[0])}


if __name__ == "__main__":
    run_cases(compare, has_group=False)
