"""A step like the one before derives no plan, and looks at no group one by one to see that."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
from conftest import on_two_backends
from helpers.toy import batches, make_model, run_step, same_bits

from pp_offload import PipelineOffloadManager
from pp_offload._groups import plan as plans
from pp_offload._groups.plan import ChunkShape


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often what takes time for every group was called."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(plans, "groups_to_keep")
    count(ChunkShape, "by_key")
    plans.make_plan.cache_clear()
    return counts


@on_two_backends
def test_steps_that_are_alike(manager: PipelineOffloadManager, calls: Counter[str]) -> None:
    model = make_model(device=manager.backend.device.type)
    inputs = [x.to(manager.backend.device) for x in batches(4)]
    expected = run_step(model, inputs, in_flight=2)
    manager.reset()
    plan, summary = manager.offloader.plan, manager.offload_summary_bytes
    assert calls.pop("groups_to_keep") == 1
    calls.clear()
    for _ in range(3):
        assert same_bits(run_step(model, inputs, in_flight=2), expected)
        manager.reset()
        assert manager.offloader.plan is plan
        assert manager.offload_summary_bytes.keys() == summary.keys()
    assert not calls


@on_two_backends
def test_of_a_chunk_whose_backward_is_over_a_record_is_kept(
    manager: PipelineOffloadManager,
) -> None:
    """When that of the next chunk begins; not if its tensors are alive, for they may be used."""
    model = make_model(device=manager.backend.device.type)
    losses, groups = [], []
    for x in batches(3):
        manager.init_model_chunk_offload_handler(None, None, 1)
        losses.append(model(x.to(manager.backend.device)).sum())
        chunk = manager.cur_forward_chunk()
        assert chunk is not None
        groups.append([weakref.ref(group) for group in chunk.groups])
    del chunk
    manager.end_chunk()
    for number, loss in enumerate(losses):
        loss.backward(retain_graph=number == 1)
        is_alive = [any(ref() is not None for ref in refs) for refs in groups]
        assert is_alive == [number == 0, True, True]
    assert manager.step.num_chunks == 3
    losses[1].backward()
    manager.reset()
    assert len(manager.offloader.plan.names) == 3 and manager.offload_summary_bytes
