"""Only hidden states that checkpointed layers are given leave: so many bytes; no bit changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.checkpointed import results
from helpers.sessions import assert_no_hooks
from helpers.sliced import first_in_first_out
from helpers.toy import WIDTH, Block, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import OffloadConfig, OffloadHiddenStates, checkpoint_wrapper, recompute_layers
from pp_offload.backends import Backend, CpuBackend

LAYERS, ROWS = 4, 6
HIDDEN_BYTES = ROWS * WIDTH * 4


class Model(nn.Module):
    """A few of them between layers that are not checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout=0.2) for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(x).sin()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x) * scale


def by_flag(model: Model, **options: Any) -> None:
    for layer in model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(torch_checkpoint, **options)


def by_wrapper(model: Model, *, use_reentrant: bool, **options: Any) -> None:
    way = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    for name, layer in list(model.layers.named_children()):
        model.layers.register_module(name, CheckpointWrapper(layer, way))


def make(
    device: torch.device, ask: Callable[..., None] = by_flag, *, use_reentrant: bool = False
) -> Model:
    torch.manual_seed(3)
    model = Model()
    ask(model, use_reentrant=use_reentrant)
    return model.to(device)


def step(model: Model, device: torch.device, context: Any = None, num: int = 2) -> list[Tensor]:
    """Results of some microbatches, all forwards first."""
    return results(model, first_in_first_out, 5, device, context=context, num=num, rows=ROWS)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("ask", [by_flag, by_wrapper])
@on_two_backends
def test_so_many_bytes_and_no_bit_changes(active: Backend, ask: Any, use_reentrant: bool) -> None:
    plain, model = (make(active.device, ask, use_reentrant=use_reentrant) for _ in range(2))
    config = OffloadConfig(device_limit_bytes=None)
    offload = OffloadHiddenStates(model, min_offload_size=1, config=config, backend=active)
    for _ in range(3):
        expected = step(plain, active.device)
        assert same_bits(step(model, active.device, offload), expected)
        assert_no_hooks()
    gc.collect()
    statistics = offload.statistics()
    assert statistics.bytes_offloaded == 3 * 2 * LAYERS * HIDDEN_BYTES
    assert statistics.live_tensors == statistics.host_bytes_in_use == 0


class ByKeyword(Block):
    """A layer whose hidden states a checkpoint keeps itself, where no hook sees them."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self._gradient_checkpointing_func(partial(self.compute, x=x, mask=mask))


def by_keyword(model: Model) -> None:
    for layer in model.layers:
        layer.__class__ = ByKeyword


def compiled(model: Model) -> None:
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def by_ours(model: Model) -> None:
    options = {"backend": CpuBackend(), "offload_inputs": True, "min_offload_size": 1}
    for name, layer in list(model.layers.named_children()):
        layer.gradient_checkpointing = False
        model.layers.register_module(name, checkpoint_wrapper(layer, **options))


def recomputed(model: Model) -> None:
    for layer in model.layers:
        layer.gradient_checkpointing = False
    recompute_layers(model, [f"layers.{number}" for number in range(LAYERS)])


def first_alone(model: Model) -> None:
    for layer in model.layers[1:]:
        layer.gradient_checkpointing = False


@pytest.mark.parametrize(
    ("change", "size", "num_left"),
    [
        (id, LAYERS - 1, LAYERS - 1),
        (by_keyword, 1, 0),
        (nn.Module.eval, 1, 0),
        (compiled, 1, 0),
        (by_ours, 1, 0),
        (recomputed, 1, 0),
        (first_alone, 1, 1),
    ],
)
def test_what_stays(change: Callable[[Model], object], size: int, num_left: int) -> None:
    """An unfinished stash, and layers whose hidden states a checkpoint does not save by itself."""
    backend = CpuBackend()
    plain, model = make(backend.device), make(backend.device)
    change(plain)
    change(model)
    offload = OffloadHiddenStates(
        model, min_offload_size=1, max_fwd_stash_size=size, backend=backend
    )
    expected = step(plain, backend.device, num=1)
    assert same_bits(step(model, backend.device, offload, num=1), expected)
    assert offload.statistics().bytes_offloaded == num_left * HIDDEN_BYTES
    step(model, backend.device)
    assert offload.statistics().bytes_offloaded == num_left * HIDDEN_BYTES, "outside"


def test_where_no_layer_is_checkpointed_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(TypeError, match="model is 3, expected an nn.Module"):
        OffloadHiddenStates(3)  # type: ignore[arg-type]
    model, inputs = Model(), [torch.ones(ROWS, WIDTH)] * 3
    context = OffloadHiddenStates(model, min_offload_size=1, backend=CpuBackend())
    with caplog.at_level("WARNING"):
        for _ in range(3):
            with context:
                y = model(*inputs)
            y.sum().backward()
    assert context.statistics().bytes_offloaded == 0
    assert caplog.text.count("no layer of Model is checkpointed") == 1
    caplog.clear()
    by_flag(model, use_reentrant=False)
    with caplog.at_level("WARNING"), OffloadHiddenStates(model, backend=CpuBackend()):
        model(*inputs).sum().backward()
    assert "is checkpointed" not in caplog.text
