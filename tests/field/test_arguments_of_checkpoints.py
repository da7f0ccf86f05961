"""F39: what a checkpoint keeps of its arguments is offloaded wherever it stands in them.

Layers pass each other a tensor in a way of their own. Between forward and backward the device has
none of them; with ``OffloadActivations`` around PyTorch's own checkpoints, those not positional.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy import same_bits

from pp_offload._activations.context import OffloadActivations
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.testing import SimulatedBackend

pytestmark = pytest.mark.field("F39")

NUM_LAYERS = 6
Run = Callable[..., Tensor]


def positional(run: Run, x: Tensor) -> Tensor:
    return run(lambda x: x.sin().cos(), x)


def by_name(run: Run, x: Tensor) -> Tensor:
    return run(lambda *, hidden: hidden.sin().cos(), hidden=x)


def in_a_dict(run: Run, x: Tensor) -> Tensor:
    return run(lambda inputs: inputs["hidden"].sin().cos(), {"hidden": x, "length": 3})


def in_a_tuple(run: Run, x: Tensor) -> Tensor:
    return run(lambda inputs: inputs[1][0].sin().cos(), ("a", (x, None)))


def in_all(run: Run, x: Tensor) -> Tensor:
    def layer(a: Tensor, b: list[Tensor], *, c: dict[str, tuple[Tensor, int]]) -> Tensor:
        return (a * b[0]).sin() * c["c"][0].cos()

    return run(layer, x, [x], c={"c": (x, 1)})


WAYS = [positional, by_name, in_a_dict, in_a_tuple, in_all]


def chain(way: Callable[[Run, Tensor], Tensor], run: Run, x: Tensor) -> Tensor:
    for _ in range(NUM_LAYERS):
        x = way(run, x)
    return x.sum()


def recompute_on(backend, *, use_reentrant: bool) -> Recompute:
    stash = ActivationStash("inputs", min_offload_size=1, backend=backend)
    return Recompute(stash, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", BACKENDS)
def test_same_bits(kind: str, way, use_reentrant: bool) -> None:
    backend = make_backend(kind)
    with backend.activate():
        recompute = recompute_on(backend, use_reentrant=use_reentrant)
        found = []
        for run in (recompute, lambda function, *args, **kwargs: function(*args, **kwargs)):
            leaves = [torch.full((5,), n / 7, device=backend.device) for n in range(3)]
            losses = [chain(way, run, x.requires_grad_()) for x in leaves]
            for loss in losses:
                loss.backward()
            found.append([x.grad for x in leaves])
        assert same_bits(*found)
        assert recompute.stash is not None
        assert recompute.stash.statistics().bytes_offloaded == 3 * NUM_LAYERS * 5 * 4


def held_bytes(way: Callable[[Run, Tensor], Tensor], make_run: Callable[..., Run]) -> int:
    """Device bytes between forward and backward, but for what the caller has."""
    backend = SimulatedBackend("eager")
    with backend.activate():
        run = make_run(backend)
        x = torch.ones(1000, requires_grad=True) * 1
        before = backend.device_bytes
        loss = chain(way, run, x)
        held = backend.device_bytes - before - loss.nbytes
        loss.backward()
        return held


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_device_holds_no_input(way, use_reentrant: bool) -> None:
    assert held_bytes(way, partial(recompute_on, use_reentrant=use_reentrant)) == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_around_a_checkpoint_of_pytorch_only_positional_ones_go(way) -> None:
    def make_run(backend: SimulatedBackend) -> Run:
        offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)

        def run(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            with offload:
                return checkpoint(function, *args, use_reentrant=False, **kwargs)

        return run

    inputs = 0 if way is positional else (NUM_LAYERS - 1) * 4000
    assert held_bytes(way, make_run) == inputs
