"""F01: the first iteration reads no host buffer before it was filled, on either reload path."""

from __future__ import annotations

import pytest
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from toy import assert_idle, same_bits

from pp_offload import OffloadConfig, use_backend

pytestmark = pytest.mark.field("F01")

NAMES = ("a", "b", "c")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("prefetch_bytes", [0, 2**20], ids=["on demand", "prefetch"])
def test_first_iteration(kind: str, groups: int, prefetch_bytes: int) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1, prefetch_bytes=prefetch_bytes)
    for microbatches in (2, 3, 4):
        for ahead in {1, microbatches // 2, microbatches}:
            moves = schedule(microbatches, ahead)
            with use_backend(make_backend(kind, seed=microbatches), config=config) as manager:
                device = manager.backend.device
                inputs = make_inputs(microbatches, device=device)
                on, off = (Chain(NAMES[:groups], 1, is_on=b, device=device) for b in (True, False))
                expected = run_moves([off], inputs, moves, False)
                assert same_bits(run_moves([on], inputs, moves, True), expected)
                statistics = manager.statistics()
                assert statistics.bytes_offloaded > 0
                assert statistics.on_demand_reloads + statistics.taken_back > 0
                if prefetch_bytes and (groups > 1 or ahead > 1):
                    assert statistics.prefetched_reloads + statistics.taken_back > 0
                assert_idle(manager)


def test_read_before_any_backward(manager) -> None:
    """A saved tensor read right after the commit, when its copy may not have begun."""
    device = manager.backend.device
    (x,) = make_inputs(1, device=device)
    on = Chain(("a",), 1, device=device)
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    leaf = x.clone().requires_grad_()
    y = on(leaf)
    sine = y.grad_fn
    while sine.name() != "SinBackward0":
        sine = sine.next_functions[-1][0]
    assert same_bits([sine._saved_self], [(x @ on.weights[0].detach()).tanh()])
    y.sum().backward()
    del y, sine
    assert_idle(manager)
