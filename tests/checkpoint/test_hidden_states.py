"""Only hidden states that checkpointed layers are given leave: so many bytes; no bit changes."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from toy import assert_no_hooks, same_bits

from pp_offload import OffloadConfig, OffloadHiddenStates, checkpoint_wrapper
from pp_offload.backends import CpuBackend

LAYERS, ROWS, WIDTH = 4, 6, 8
HIDDEN_BYTES = ROWS * WIDTH * 4


class Layer(nn.Module):
    """A layer as those of Hugging Face: its forward asks for a checkpoint if it is to have one."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def compute(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.sigmoid(self.up(x * mask))), 0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.compute, x, mask)
        return self.compute(x, mask)


class Model(nn.Module):
    """A few of them between layers that are not checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(x).sin()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).square().mean()


def by_flag(model: Model, **options: Any) -> None:
    for layer in model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(torch_checkpoint, **options)


def by_wrapper(model: Model, *, use_reentrant: bool, **options: Any) -> None:
    way = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    for name, layer in list(model.layers.named_children()):
        model.layers.register_module(name, CheckpointWrapper(layer, way))


HOW: dict[str, Callable[..., None]] = {"flag": by_flag, "wrapper": by_wrapper}


def make(device: torch.device, how: str = "flag", *, use_reentrant: bool = False) -> Model:
    torch.manual_seed(3)
    model = Model()
    HOW[how](model, use_reentrant=use_reentrant)
    return model.to(device)


def step(model: Model, device: torch.device, context: Any = None) -> list[Tensor]:
    """The losses and gradients of two microbatches, both forwards first."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(8)
    losses = []
    for _ in range(2):
        draw = [torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in range(2)]
        with context or torch.enable_grad():
            losses.append(model(*draw))
    for loss in losses:
        loss.backward()
    found = [loss.detach() for loss in losses]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", HOW)
@on_two_backends
def test_so_many_bytes_and_no_bit_changes(backend, how: str, use_reentrant: bool) -> None:
    with backend.activate():
        plain = make(backend.device, how, use_reentrant=use_reentrant)
        model = make(backend.device, how, use_reentrant=use_reentrant)
        config = OffloadConfig(device_limit_bytes=None)
        offload = OffloadHiddenStates(model, min_offload_size=1, config=config, backend=backend)
        for _ in range(3):
            expected = step(plain, backend.device)
            assert same_bits(step(model, backend.device, offload), expected)
            assert_no_hooks()
        gc.collect()
        statistics = offload.statistics()
        assert statistics.bytes_offloaded == 3 * 2 * LAYERS * HIDDEN_BYTES
        assert statistics.live_tensors == statistics.host_bytes_in_use == 0


def test_a_stash_that_is_not_full_stays() -> None:
    """Its backward comes next, as for all activations."""
    backend = CpuBackend()
    model = make(backend.device)
    offload = OffloadHiddenStates(
        model, min_offload_size=1, max_fwd_stash_size=LAYERS - 1, backend=backend
    )
    with offload:
        loss = model(torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH))
    loss.backward()
    assert offload.statistics().bytes_offloaded == (LAYERS - 1) * HIDDEN_BYTES


@pytest.mark.parametrize("how", HOW)
def test_what_is_given_by_keyword_stays(how: str) -> None:
    """The checkpoint keeps it itself, where no hook sees it."""

    class ByKeyword(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.layers = model.layers

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x=x, mask=mask)
            return x.square().mean()

    class ByKeywordLayer(Layer):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            run = partial(self.compute, x=x, mask=mask)
            return self._gradient_checkpointing_func(run)

    backend = CpuBackend()
    plain, model = (ByKeyword(make(backend.device, how)) for _ in range(2))
    if how == "flag":
        for layer in (*plain.layers, *model.layers):
            layer.__class__ = ByKeywordLayer
    offload = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
    expected = step(plain, backend.device)
    assert same_bits(step(model, backend.device, offload), expected)
    assert offload.statistics().bytes_offloaded == 0


def test_layers_without_a_checkpoint_keep_all() -> None:
    backend = CpuBackend()
    model = make(backend.device)
    model.layers[1].gradient_checkpointing = False
    offload = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
    step(model, backend.device, offload)
    assert offload.statistics().bytes_offloaded == 2 * (LAYERS - 1) * HIDDEN_BYTES
    model.eval()
    step(model, backend.device, offload)
    assert offload.statistics().bytes_offloaded == 2 * (LAYERS - 1) * HIDDEN_BYTES


def test_checkpoints_may_be_enabled_anew() -> None:
    """As a trainer does that trains again."""
    backend = CpuBackend()
    model = make(backend.device)
    offload = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
    for _ in range(2):
        by_flag(model, use_reentrant=False)
        step(model, backend.device, offload)
    assert offload.statistics().bytes_offloaded == 2 * 2 * LAYERS * HIDDEN_BYTES


def test_checkpoints_of_this_package_are_left_alone() -> None:
    backend = CpuBackend()
    model = make(backend.device)
    ours = {"backend": backend, "offload_inputs": True, "min_offload_size": 1}
    for name, layer in list(model.layers.named_children()):
        layer.gradient_checkpointing = False
        model.layers.register_module(name, checkpoint_wrapper(layer, **ours))
    offload = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
    expected = step(make(backend.device), backend.device)
    assert same_bits(step(model, backend.device, offload), expected)
    assert model.layers[0].recompute.counts.forward_calls == 2 * LAYERS
    assert offload.statistics().bytes_offloaded == 0


def test_outside_of_the_context_nothing_leaves() -> None:
    backend = CpuBackend()
    model = make(backend.device)
    offload = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
    expected = step(model, backend.device, offload)
    before = offload.statistics().bytes_offloaded
    assert same_bits(step(model, backend.device), expected)
    assert offload.statistics().bytes_offloaded == before


def test_checkpoints_keep_their_options() -> None:
    given: list[dict[str, Any]] = []

    def function(run: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
        given.append(options)
        return torch_checkpoint(run, *args, **options)

    model = make(torch.device("cpu"))
    options = {"use_reentrant": False, "determinism_check": "none", "early_stop": False}
    for layer in model.layers:
        layer._gradient_checkpointing_func = partial(function, **options)
    step(model, torch.device("cpu"), OffloadHiddenStates(model, backend=CpuBackend()))
    assert given == [options] * 2 * LAYERS


def test_a_model_that_was_in_one_can_be_pickled() -> None:
    backend = CpuBackend()
    model = make(backend.device)
    expected = step(model, backend.device, OffloadHiddenStates(model, backend=backend))
    other = pickle.loads(pickle.dumps(model))
    offload = OffloadHiddenStates(other, min_offload_size=1, backend=backend)
    assert same_bits(step(other, backend.device, offload), expected)
    assert offload.statistics().bytes_offloaded == 2 * LAYERS * HIDDEN_BYTES


def test_compiled_layers_are_left_alone() -> None:
    torch._dynamo.reset()
    backend = CpuBackend()
    plain, model = make(backend.device), make(backend.device)
    for one in (plain, model):
        for layer in one.layers:
            layer.compile(backend="aot_eager")
    offload = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
    expected = step(plain, backend.device)
    assert same_bits(step(model, backend.device, offload), expected)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="model is 3, expected an nn.Module"):
        OffloadHiddenStates(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_fwd_stash_size is 0"):
        OffloadHiddenStates(nn.Linear(2, 2), max_fwd_stash_size=0)


def test_where_no_layer_is_checkpointed_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x, mask = Model(), torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    context = OffloadHiddenStates(model, min_offload_size=1, backend=CpuBackend())
    with caplog.at_level("WARNING"):
        for _ in range(3):
            with context:
                loss = model(x, mask)
            loss.backward()
    assert context.statistics().bytes_offloaded == 0
    told = [one for one in caplog.records if "no layer of Model is checkpointed" in one.message]
    assert len(told) == 1
    caplog.clear()
    by_flag(model, use_reentrant=False)
    with caplog.at_level("WARNING"), OffloadHiddenStates(model, backend=CpuBackend()):
        model(x, mask).backward()
    assert not [one for one in caplog.records if "is checkpointed" in one.message]
