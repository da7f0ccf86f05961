"""F45: where threads run and memory lies is the launcher's choice; nothing is changed behind it."""

from __future__ import annotations

import os

import pytest
from conftest import BACKENDS, make_backend
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import ConfigError, OffloadConfig, use_backend

pytestmark = [
    pytest.mark.field("F45"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity"),
]


@pytest.mark.parametrize("is_bound", [False, True], ids=["anywhere", "bound"])
@pytest.mark.parametrize("tiers", [("host",), ("disk",)], ids=str)
@pytest.mark.parametrize("kind", BACKENDS)
def test_affinity_is_as_it_was(kind: str, tiers: tuple[str, ...], is_bound: bool) -> None:
    """Also where a launcher has bound the process, as ``torchrun --numa-binding`` does."""
    before = os.sched_getaffinity(0)
    bound = {min(before)} if is_bound else before
    config = OffloadConfig(min_offloaded_tensor_size=1, tiers=tiers)
    os.sched_setaffinity(0, bound)
    try:
        with use_backend(make_backend(kind), config=config) as manager:
            device = str(manager.backend.device)
            on, off = make_model(device=device), make_model(groups=(), device=device)
            inputs = [x.to(device) for x in batches(3)]
            expected = run_step(off, inputs, offload=False)
            assert same_bits(run_step(on, inputs), expected)
            assert os.sched_getaffinity(0) == bound
            assert_idle(manager)
    finally:
        os.sched_setaffinity(0, before)


def test_no_option_moves_a_thread() -> None:
    with pytest.raises(ConfigError, match="no option numa_node"):
        OffloadConfig(numa_node=0)  # type: ignore[call-arg]
