"""Each product as something that is done to a model in training, so that tests can go through all.

product = PRODUCTS["groups"](backend)
model = wrap(product.inside(model))   # before others wrap it
product.outside(model)                # and after
with product.forward():               # a microbatch
    loss = model(x)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from helpers.checkpointed import apply
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    PipelineOffloadManager,
    offload_modules,
)
from pp_offload._core.observer import Observer
from pp_offload._core.statistics import OffloadStatistics
from pp_offload.backends import Backend


class Product:
    """None: a model is trained as it is."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def inside(self, model: nn.Module) -> nn.Module:
        """The model to wrap, which has ``layers``."""
        return model

    def outside(self, model: nn.Module) -> None:
        """To what wraps it."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward of a microbatch, which is not over before the last one's backward is
        begun, or is.
        """
        return nullcontext()

    def begin_step(self) -> None:
        """Before the first microbatch."""

    def statistics(self) -> OffloadStatistics | None:
        """What was moved."""
        return None

    def listen(self, observer: Observer) -> None:
        """Have it hear what leaves, if it hears of activations at all."""


class Context(Product):
    """All activations; the context is not told which model it is for."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.offload = OffloadActivations(
            min_offload_size=1,
            max_fwd_stash_size=2,
            config=OffloadConfig(device_limit_bytes=None),
            backend=backend,
        )

    def forward(self) -> AbstractContextManager[Any]:
        return self.offload

    def statistics(self) -> OffloadStatistics:
        return self.offload.statistics()

    def listen(self, observer: Observer) -> None:
        self.offload.stash._offloader.observers.add(observer)


class Groups(Product):
    """By name, on what wraps the model, in whose state dict a prefix may be."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.manager = PipelineOffloadManager.get_instance()

    def outside(self, model: nn.Module) -> None:
        offload_modules(model, {"mlp": "layers.*.mlp"})

    def begin_step(self) -> None:
        off_interface.reset()

    def forward(self) -> AbstractContextManager[Any]:
        off_interface.init_chunk_handler(None, None, 1)
        return nullcontext()

    def statistics(self) -> OffloadStatistics:
        return self.manager.statistics()

    def listen(self, observer: Observer) -> None:
        self.manager.offloader.observers.add(observer)


class Marked(nn.Module):
    """Marks a group around a module itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with off_interface(True, x, "mlp") as x:
            y = self.inner(x)
        return off_interface.group_commit(y, name="mlp")


class Markers(Groups):
    """In the layers themselves."""

    def inside(self, model: nn.Module) -> nn.Module:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.mlp = Marked(layer.mlp)
        return model

    def outside(self, model: nn.Module) -> None:
        pass


class Checkpoints(Product):
    """Of the layers, in one of the ways of ``checkpointed.WAYS``."""

    def __init__(self, backend: Backend, *, way: str) -> None:
        super().__init__(backend)
        self.way = way

    def inside(self, model: nn.Module) -> nn.Module:
        stash = apply(model, "layers", self.way, self.backend).stash
        assert stash is not None
        self.stash = stash
        return model

    def statistics(self) -> OffloadStatistics:
        return self.stash.statistics()

    def listen(self, observer: Observer) -> None:
        self.stash._offloader.observers.add(observer)


class Parameters(Product):
    """Of the layers, in two slices."""

    def __init__(self, backend: Backend, *, checkpoint: bool) -> None:
        super().__init__(backend)
        self.checkpoint = checkpoint

    def inside(self, model: nn.Module) -> nn.Module:
        self.model = OffloadModel(
            nn.Sequential(*model.layers),  # type: ignore[misc]
            self.backend.device,
            num_slices=2,
            checkpoint_activation=self.checkpoint,
            backend=self.backend,
        )
        return self.model

    def statistics(self) -> OffloadStatistics:
        return self.model.statistics()


WAYS = ("full, offload", "every second layer, offload", "products offloaded", "all, offload")
PRODUCTS: dict[str, Any] = {
    "context": Context,
    "groups": Groups,
    "markers": Markers,
    **{way: partial(Checkpoints, way=way) for way in WAYS},
    "reentrant, offload": partial(Checkpoints, way="reentrant, offload"),
    "parameters": partial(Parameters, checkpoint=False),
    "parameters, checkpoint": partial(Parameters, checkpoint=True),
}
