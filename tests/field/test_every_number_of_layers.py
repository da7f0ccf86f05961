"""F13: every number of layers, groups and stages works in every iteration."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import OffloadConfig, use_backend

pytestmark = pytest.mark.field("F13")

NAMES = ("a", "b", "c")
STEPS = 4


@cache
def without(
    layers: int, groups: int, stages: int, vp_size: int, step: int, device: str
) -> list[Tensor]:
    chains = [
        Chain(NAMES[:groups], layers, is_on=False, device=device, seed=s) for s in range(vp_size)
    ]
    inputs = make_inputs(8, step=step, device=device)
    return run_moves(chains, inputs, schedule(8, stages, vp_size, stages), False)


def check(
    kind: str, layers: int, groups: int, stages: int, vp_size: int = 1, fraction: float = 1.0
) -> list[int]:
    """Run the steps; bytes offloaded until the end of each."""
    backend = make_backend(kind)
    device = backend.device.type
    expected = [without(layers, groups, stages, vp_size, s, device) for s in range(STEPS)]
    config = OffloadConfig(min_offloaded_tensor_size=1, activation_offload_fraction=fraction)
    moved = []
    with use_backend(backend, config=config) as manager:
        chains = [Chain(NAMES[:groups], layers, device=device, seed=s) for s in range(vp_size)]
        moves = schedule(8, stages, vp_size, stages)
        for step in range(STEPS):
            inputs = make_inputs(8, step=step, device=device)
            assert same_bits(run_moves(chains, inputs, moves, True), expected[step]), step
            assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
    return moved


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_all_configurations(stages: int) -> None:
    for layers, groups in product((1, 2, 3), repeat=2):
        check("cpu", layers, groups, stages)


@pytest.mark.parametrize("kind", BACKENDS[1:])
@pytest.mark.parametrize(("layers", "groups", "stages"), [(1, 1, 1), (1, 2, 2), (1, 3, 4)])
def test_one_layer(kind: str, layers: int, groups: int, stages: int) -> None:
    check(kind, layers, groups, stages)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize(("layers", "groups"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_virtual_stages(kind: str, layers: int, groups: int, stages: int) -> None:
    check(kind, layers, groups, stages, vp_size=2)


@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("vp_size", [1, 2])
def test_all_resident(kind: str, vp_size: int) -> None:
    moved = check(kind, 1, 2, 2, vp_size=vp_size, fraction=0.0)
    assert moved[0] > 0
    assert moved[0] == moved[-1]
