"""What is foreseen of backward: the second of its two parts, and which chunks run next."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import BEFORE_2_13, TWO_BACKENDS, make_backend
from helpers.sessions import MostUnused, assert_idle, assert_same, gradients
from helpers.toy import batches, make_model
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._core.group import ChunkKey, WeightPassKey
from pp_offload._groups.split_backward import BackwardPass, SplitBackward
from pp_offload._groups.step import ChunkQueue

MICROBATCHES = 6
GROUP_BYTES = 3 * 5 * 8 * 4
"""About what a group of the model saves."""


def moves(delay: int, ahead: int = 2) -> Iterator[tuple[str, int]]:
    """Forwards ``ahead`` of the inputs' gradients, and those ``delay`` ahead of the weights'."""
    for m in range(MICROBATCHES + ahead + delay):
        for kind, number in (("F", m), ("I", m - ahead), ("W", m - ahead - delay)):
            if 0 <= number < MICROBATCHES:
                yield kind, number


@contextmanager
def session(kind: str, delay: int, **options: Any) -> Iterator[PipelineOffloadManager]:
    """A manager that is told what ``attach`` would tell."""
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1, **options)
    with use_backend(make_backend(kind), config=config) as manager:
        keys: list[Any] = []
        for part, m in moves(delay):
            key = ChunkKey(0, m)
            keys += {"F": [], "I": [key], "W": [WeightPassKey(key)]}[part]
        manager.step.queue.set_order(keys, is_scheduled=True)
        is_keeping = config.split_backward == "keep"
        manager.offloader.follow_parts(SplitBackward(frozenset(keys), is_keeping=is_keeping))
        yield manager


def run_step(
    model: nn.Module, inputs: list[Tensor], delay: int, manager: PipelineOffloadManager | None
) -> list[Tensor]:
    """Outputs, gradients of inputs and of weights."""
    leaves: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    groups: dict[int, Any] = {}
    results = []

    def part(m: int, which: BackwardPass) -> Any:
        return manager.backward_pass(ChunkKey(0, m), which) if manager else nullcontext()

    if manager is not None:
        manager.reset()
    for kind, m in moves(delay):
        if kind == "F":
            if manager is not None:
                off_interface.init_chunk_handler(None, None, 1)
            leaves[m] = inputs[m].clone().requires_grad_()
            outputs[m] = model(leaves[m]).square().mean()
        elif kind == "I":
            with part(m, BackwardPass.INPUT):
                of_inputs, groups[m] = stage_backward_input(
                    [outputs.pop(m)], None, [leaves.pop(m)], model.parameters()
                )
            results += [gradient for gradient in of_inputs if gradient is not None]
        else:
            with part(m, BackwardPass.WEIGHT):
                stage_backward_weight(model.parameters(), groups.pop(m))
    return results + gradients(*model.parameters())


def assert_right(
    manager: PipelineOffloadManager, on: nn.Module, off: nn.Module, step: int, delay: int
) -> None:
    """A step has the bits that it has without offload, and leaves nothing."""
    inputs = [x.to(manager.backend.device) for x in batches(MICROBATCHES, step=step)]
    expected = run_step(off, inputs, delay, None)
    assert_same(run_step(on, inputs, delay, manager), expected, f"step {step}")
    assert_idle(manager)


@pytest.mark.parametrize("kind", TWO_BACKENDS)
@pytest.mark.parametrize("policy", ["reload", "keep"])
@pytest.mark.parametrize("delay", [0, 3])
def test_the_second_part_is_foreseen(kind: str, policy: str, delay: int) -> None:
    bounds = {"prefetch_bytes": 4 * GROUP_BYTES, "max_in_flight_bytes": 0}  # or nothing has left
    with session(kind, delay, split_backward=policy, **bounds) as manager:
        device = str(manager.backend.device)
        on, off = make_model(device=device), make_model(groups=(), device=device)
        peak, steps = MostUnused(manager.offloader), []
        for step in range(4):
            before, peak.nbytes = manager.statistics(), 0
            assert_right(manager, on, off, step, delay)
            steps.append(manager.statistics().since(before))
        at_peak = sum(each.saved for each in manager.step.summary.values())
        records = [record.group_bytes.values() for record in manager.step.records()]
        in_all = sum(each.saved for record in records for each in record)
    assert at_peak * MICROBATCHES == in_all * (3 + delay), "those that wait for W are in flight"
    on_demand = [step.on_demand_reloads for step in steps]
    assert on_demand[0] > 0, "of the first microbatch nothing is known"
    assert on_demand[2:] == [0, 0]
    assert 0 < peak.nbytes <= 4 * GROUP_BYTES
    is_kept = steps[2].bytes_reloaded <= steps[2].bytes_offloaded
    assert is_kept is (policy == "keep")


@pytest.mark.parametrize("kind", TWO_BACKENDS)
@pytest.mark.parametrize("policy", ["reload", "keep"])
def test_what_was_foreseen_wrongly_is_still_right(kind: str, policy: str) -> None:
    """Other layers and groups in every step, and a step that breaks off in a part."""
    with session(kind, delay=2, split_backward=policy) as manager:
        device = manager.backend.device
        programs = [(2, ("mix", "mlp")), (3, ("mlp",)), (1, ("mix",)), (3, ("mix", "mlp"))]
        for step, (layers, groups) in enumerate(programs):
            on = make_model(layers, groups=groups, device=str(device))
            off = make_model(layers, groups=(), device=str(device))
            assert_right(manager, on, off, step, delay=2)
            assert not manager.offloader.split._shared, "it is for the second part alone"
            if BEFORE_2_13:  # it keeps the graph of a backward in two parts that raises
                continue
            numbers = count(1)

            def fail(module: nn.Module, args: Any, y: Tensor, numbers: Any = numbers) -> None:
                if next(numbers) == 3:
                    y.register_hook(lambda gradient: 1 // 0)

            on.register_forward_hook(fail)
            inputs = [x.to(device) for x in batches(MICROBATCHES, step=step)]
            with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
                run_step(on, inputs, 2, manager)
            assert manager.offloader.split._running is None, "it would hold what the part holds"
            manager.reset()
            gc.collect()
            assert_idle(manager)


# Which chunks certainly run backward next


def push(queue: Any, *keys: tuple[int, int]) -> None:
    """Chunks by stage and microbatch."""
    for key in keys:
        queue.push(SimpleNamespace(key=ChunkKey(*key)))


def certain(queue: ChunkQueue) -> list[tuple[Any, ...]]:
    return [tuple(chunk.key) for chunk in queue.certain()]  # type: ignore[arg-type]


def test_without_an_order_only_chunks_of_the_last_stage_are_certain() -> None:
    queue = ChunkQueue()
    queue.vp_size = 2
    push(queue, (0, 0), (0, 1))
    assert certain(queue) == []
    push(queue, (1, 0), (1, 1))
    assert certain(queue) == [(1, 0), (1, 1)]
    queue.set_order([ChunkKey(0, 1)])
    assert certain(queue) == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_a_chunk_that_will_not_come_is_not_waited_for() -> None:
    queue = ChunkQueue()
    queue.set_order([ChunkKey(1, 0), ChunkKey(0, 0)], is_scheduled=True)
    push(queue, (0, 0))
    assert certain(queue) == []
    queue.skip(ChunkKey(1, 0))
    assert certain(queue) == [(0, 0)]
    queue.clear()  # in the next step it may come
    push(queue, (0, 0))
    assert certain(queue) == []
