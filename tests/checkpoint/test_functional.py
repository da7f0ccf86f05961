"""``checkpoint`` does to one call what the checkpoints of a model do to its layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.checkpointed import MM
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import OffloadConfig, checkpoint, checkpoint_function
from pp_offload.backends import CpuBackend

OFFLOAD = {"offload_inputs": True, "min_offload_size": 1}


def test_inputs_leave_and_nothing_else() -> None:
    """To the byte: each call's input, its mask and its scale, shared ones once per forward."""
    backend = CpuBackend()
    run = checkpoint_function(**OFFLOAD, backend=backend)
    assert run.stash is not None
    block, x = nn.Linear(8, 8), torch.randn(6, 8)
    y = checkpoint(block, x, **OFFLOAD, backend=backend)
    y = checkpoint(lambda a, b: torch.tanh(a["x"]) * b, {"x": y}, b=y, **OFFLOAD, backend=backend)
    assert run.stash.statistics().bytes_offloaded == 2 * x.nbytes, "x, and y once"
    y.sum().backward()
    assert run.counts.recomputed_calls == run.counts.forward_calls == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_call_written_for_pytorch(use_reentrant: bool) -> None:
    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(1)
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(3, 8)
        x.requires_grad_()
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": True}
        y = call(layer, x, **options)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    assert same_bits(run(checkpoint), run(torch_checkpoint))


def test_without_grad_and_without_random_state() -> None:
    run = checkpoint_function(preserve_rng_state=False, backend=CpuBackend())
    x = torch.ones(64, requires_grad=True)
    with torch.no_grad():
        run(torch.sin, x)
    assert run.counts.forward_calls == 0
    y = run(lambda x: nn.functional.dropout(x, 0.5), x)
    torch.manual_seed(9)
    y.sum().backward()
    assert not torch.equal(x.grad, y.detach())


def test_what_is_not_deterministic_is_found() -> None:
    sizes = iter((3, 4))
    x = torch.ones(8, requires_grad=True)
    y = checkpoint(lambda x: x[: next(sizes)].sin(), x, **OFFLOAD)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


def test_equal_options_share_one_engine() -> None:
    one = checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert one is checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert one is not checkpoint_function(offload_inputs=True)
    assert one is not checkpoint_function(
        offload_inputs=True, config=OffloadConfig(prefetch_bytes=7), backend=CpuBackend()
    )
    assert checkpoint_function().stash is None


def test_an_engine_goes_with_its_backend() -> None:
    backend = CpuBackend()
    gone = weakref.ref(backend)
    x = torch.ones(64, requires_grad=True)
    checkpoint(torch.sin, x, backend=backend, **OFFLOAD).sum().backward()
    run = checkpoint_function(backend=backend, **OFFLOAD)
    assert run is checkpoint_function(backend=backend, **OFFLOAD)
    del run, backend
    gc.collect()
    assert gone() is None


def test_operators_may_be_named() -> None:
    backend = CpuBackend()
    run = checkpoint_function(
        offload_ops_keys=[MM], recompute_every={}, min_offload_size=1, backend=backend
    )
    x = torch.randn(4, 4, requires_grad=True)
    run(lambda x: (x @ x).sin().cos(), x).sum().backward()
    assert run.counts.offloaded_outputs == run.counts.recomputed_ops == 1 and run.stash is not None
    assert run.stash.statistics().bytes_offloaded == run.counts.offloaded_bytes == x.nbytes


def test_graphs_that_are_dropped_do_not_gather() -> None:
    """Nobody says that a forward begins, and there is no backward to tell either."""
    options = {**OFFLOAD, "backend": CpuBackend()}
    layer, x = nn.Linear(8, 8), torch.randn(6, 8)
    for _ in range(50):
        checkpoint(layer, checkpoint(layer, x, **options), **options)
    stash = checkpoint_function(**options).stash
    assert stash is not None
    assert len(stash._forward.chunk.groups) <= 2
    assert stash._step.num_chunks <= 2
    assert stash.statistics().live_tensors == 0


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"context_fn": None}, ValueError, "no context_fn.*offload_ops_keys"),
        ({"debug": True}, ValueError, "no debug.*torch.utils.checkpoint.checkpoint"),
        ({"use_reentrant": None}, ValueError, "use_reentrant is None"),
        ({"use_reentrant": True, "early_stop": False}, ValueError, "one or the other"),
        ({"determinism_check": "all"}, ValueError, 'expected "default" or "none"'),
        ({"min_offload_size": -1}, ValueError, "min_offload_size is -1.*bytes"),
        ({"config": {}}, TypeError, "config is.*OffloadConfig"),
        ({"backend": "cuda"}, TypeError, "backend is 'cuda'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        checkpoint(torch.sin, torch.ones(2), **options)


def test_bad_calls() -> None:
    with pytest.raises(TypeError, match="function is .*, expected a module or another callable"):
        checkpoint(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"offload_input .did you mean offload_inputs"):
        checkpoint_function(offload_input=True)
