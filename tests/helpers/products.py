"""Each product as something that is done to a model in training, so that tests can go through all.

product = PRODUCTS["groups"](backend)
model = wrap(product.inside(model))   # before others wrap it
product.outside(model)                # and after
product.begin_step()                  # before the first microbatch
with product.forward():               # a microbatch; the one before has begun its backward
    loss = model(x)
product.statistics()                  # of what was moved
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from helpers.checkpointed import apply
from helpers.sessions import group
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    PipelineOffloadManager,
    offload_modules,
)
from pp_offload._core.observers import Observer
from pp_offload._core.statistics import OffloadStatistics
from pp_offload.backends import Backend


class Product:
    """None: a model is trained as it is."""

    counted: Any = None
    """Has statistics."""

    offloader: Any = None
    """Has observers, if it hears of activations at all."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def inside(self, model: nn.Module) -> nn.Module:
        """The model to wrap, which has ``layers``."""
        return model

    def outside(self, model: nn.Module) -> None:
        """To what wraps it."""

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin_step(self) -> None: ...

    def statistics(self) -> OffloadStatistics | None:
        return None if self.counted is None else self.counted.statistics()

    def listen(self, observer: Observer) -> None:
        """Have it hear what leaves."""
        if self.offloader is not None:
            self.offloader.observers.add(observer)


class Context(Product):
    """All activations; the context is not told which model it is for."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.offload = self.counted = OffloadActivations(
            min_offload_size=1,
            max_fwd_stash_size=2,
            config=OffloadConfig(device_limit_bytes=None),
            backend=backend,
        )
        self.offloader = self.offload.stash._offloader

    def forward(self) -> AbstractContextManager[Any]:
        return self.offload


class Groups(Product):
    """By name, on what wraps the model, in whose state dict a prefix may be."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.counted = PipelineOffloadManager.get_instance()
        self.offloader = self.counted.offloader

    def outside(self, model: nn.Module) -> None:
        offload_modules(model, {"mlp": "layers.*.mlp"})

    def begin_step(self) -> None:
        off_interface.reset()

    def forward(self) -> AbstractContextManager[Any]:
        off_interface.init_chunk_handler(None, None, 1)
        return nullcontext()


class Marked(nn.Module):
    """Marks a group around a module itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return group(x, self.inner, name="mlp")


class Markers(Groups):
    """In the layers themselves."""

    def inside(self, model: nn.Module) -> nn.Module:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.mlp = Marked(layer.mlp)
        return model

    def outside(self, model: nn.Module) -> None: ...


class Checkpoints(Product):
    """Of the layers, in one of the ways of ``checkpointed.WAYS``."""

    def __init__(self, backend: Backend, *, way: str) -> None:
        super().__init__(backend)
        self.way = way

    def inside(self, model: nn.Module) -> nn.Module:
        self.keep(apply(model, "layers", self.way, self.backend).stash)
        return model

    def keep(self, stash: Any) -> None:
        self.counted, self.offloader = stash, stash._offloader


class Parameters(Product):
    """Of the layers, in two slices."""

    def __init__(self, backend: Backend, *, checkpoint: bool) -> None:
        super().__init__(backend)
        self.checkpoint = checkpoint

    def inside(self, model: nn.Module) -> nn.Module:
        self.counted = OffloadModel(
            nn.Sequential(*model.layers),  # type: ignore[misc]
            self.backend.device,
            num_slices=2,
            checkpoint_activation=self.checkpoint,
            backend=self.backend,
        )
        return self.counted


WAYS = ("full, offload", "every second layer, offload", "products offloaded", "all, offload")
PRODUCTS: dict[str, Any] = {
    "context": Context,
    "groups": Groups,
    "markers": Markers,
    **{way: partial(Checkpoints, way=way) for way in (*WAYS, "reentrant, offload")},
    "parameters": partial(Parameters, checkpoint=False),
    "parameters, checkpoint": partial(Parameters, checkpoint=True),
}
