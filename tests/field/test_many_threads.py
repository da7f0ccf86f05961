"""F54: any number of threads through one manager, forward and backward, is right in every bit.

A scope, its stack and the current chunk belong to their thread. Where one manager cannot do what
two threads ask for, the second is told, and nothing is harmed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_backend
from threaded import (
    KINDS,
    TABLE,
    WIDTH,
    Lockstep,
    Net,
    assert_all_idle,
    block,
    frequent_switches,
    gradients,
    input_of,
    manager_of,
    on_threads,
    plain,
)
from toy import assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    OffloadError,
    PipelineOffloadManager,
)
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.field("F54")

NUM_THREADS = 4


def begin() -> None:
    off_interface.init_chunk_handler(None, None, 1)


def microbatch(model: Net, number: int, step: int) -> list[torch.Tensor]:
    """One forward and backward with a chunk of its own."""
    if model.is_on:
        begin()
    leaf = input_of(number, step).requires_grad_()
    model(leaf).square().mean().backward()
    return gradients(model, leaf)


def each(run: Callable[[int], Any]) -> list[Callable[[], Any]]:
    """``run`` with its number, for every thread."""
    return [partial(run, number) for number in range(NUM_THREADS)]


def all_at_once(run: Callable[[int], Any]) -> list[Any]:
    """What ``run`` returns for each number, on threads that begin together."""
    barrier = Lockstep(NUM_THREADS)

    def begin_together(number: int) -> Any:
        barrier.wait()
        return run(number)

    return on_threads(each(begin_together), barrier)


def a_step_is_right(manager: PipelineOffloadManager) -> None:
    """Another step, on this thread alone."""
    before = manager.statistics().bytes_offloaded
    manager.reset()
    for number in range(3):
        assert same_bits(microbatch(Net(number), number, 1), plain(number, number, 1))
    assert manager.statistics().bytes_offloaded > before
    manager.reset()
    assert_all_idle(manager)


@pytest.mark.parametrize("window_bytes", [None, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_in_threads(
    kind: str, window_bytes: int | None, tmp_path: Path
) -> None:
    """Each with a model of its own and microbatches of its own, all within one step."""
    models = [Net(number) for number in range(NUM_THREADS)]

    def microbatches(steps: range, number: int) -> list[list[torch.Tensor]]:
        return [microbatch(models[number], number, step) for step in steps]

    with frequent_switches(), manager_of(kind, tmp_path, window_bytes=window_bytes) as manager:
        for step in range(8):
            steps = range(step, step + 3)
            manager.reset()
            for number, found in enumerate(all_at_once(partial(microbatches, steps))):
                for one, gradients_of_one in zip(steps, found, strict=True):
                    assert same_bits(gradients_of_one, plain(number, number, one)), (one, number)
        manager.reset()
        assert_all_idle(manager)
        assert manager.statistics().bytes_offloaded > 0
        a_step_is_right(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_every_thread_with_steps_of_its_own(kind: str, tmp_path: Path) -> None:
    """Who calls ``reset`` inside the step of another is told so, and goes on within that step."""
    num_steps = 30
    expected = [[plain(n, n, step) for step in range(num_steps)] for n in range(NUM_THREADS)]
    refusals: list[tuple[int, str]] = []
    barrier = Lockstep(NUM_THREADS)
    with frequent_switches(), manager_of(kind, tmp_path) as manager:

        def run(number: int) -> list[list[torch.Tensor]]:
            model, found = Net(number), []
            barrier.wait()
            for step in range(num_steps):
                try:
                    off_interface.reset()
                except GroupStateError as refusal:
                    refusals.append((threading.get_ident(), str(refusal)))
                found.append(microbatch(model, number, step))
            return found

        work = each(run)
        for number, found in enumerate(on_threads(work, barrier)):
            for step, one in enumerate(found):
                assert same_bits(one, expected[number][step]), (step, number)
        for ident, said in refusals:
            assert str(ident) in said, said
        a_step_is_right(manager)


@pytest.mark.parametrize("stage", ["in the forward", "before the backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_reset_inside_the_step_of_another(kind: str, stage: str, tmp_path: Path) -> None:
    """It names both threads and changes nothing: the step goes on as if nobody had asked."""
    barrier = Lockstep(2)
    idents: list[int] = []
    weight = Net(0).weights[0].detach()

    def both(is_on: bool, pause: Callable[[str], None]) -> list[torch.Tensor]:
        leaf = input_of(0, 5).requires_grad_()
        h = block(leaf, weight, TABLE, is_on)
        with off_interface(is_on, h, "held") as h:
            h = h.exp()
            pause("in the forward")
            h = h.sin()
        if is_on:
            off_interface.group_commit(h, name="held")
        pause("before the backward")
        h.sum().backward()
        assert leaf.grad is not None
        return [leaf.grad]

    def other() -> list[torch.Tensor]:
        def pause(now: str) -> None:
            if now == stage:
                barrier.wait()
                barrier.wait()

        idents.append(threading.get_ident())
        begin()
        return both(True, pause)

    def this() -> None:
        barrier.wait()
        idents.append(threading.get_ident())
        before = manager.statistics()
        with pytest.raises(GroupStateError) as refusal:
            manager.reset()
        for ident in idents:
            assert str(ident) in str(refusal.value)
        after = manager.statistics()
        assert (after.live_tensors, after.host_bytes_in_use, after.disk_bytes_in_use) == (
            before.live_tensors,
            before.host_bytes_in_use,
            before.disk_bytes_in_use,
        )
        barrier.wait()

    with manager_of(kind, tmp_path) as manager:
        manager.reset()
        found, _ = on_threads([other, this], barrier)
        assert same_bits(found, both(False, lambda now: None))
        a_step_is_right(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_died_in_its_forward(kind: str, tmp_path: Path) -> None:
    """Its step is nobody's: the next ``reset`` goes through."""

    def forward() -> None:
        begin()
        h = block(input_of(0, 1).requires_grad_(), torch.eye(WIDTH), TABLE, True)
        with off_interface(True, h, "open") as h:
            h = h.exp()
            raise KeyError("died")

    def dies() -> None:
        with pytest.raises(KeyError, match="died"):
            forward()

    with manager_of(kind, tmp_path) as manager:
        manager.reset()
        on_threads([dies])
        gc.collect()  # the error held the graph
        a_step_is_right(manager)


def test_a_new_thread_has_no_chunk(tmp_path: Path) -> None:
    """Not even if the system gives it the number of one that ended."""

    def forward() -> None:
        with pytest.raises(GroupStateError, match="init_chunk_handler"):
            block(input_of(0, 1).requires_grad_(), torch.eye(WIDTH), TABLE, True)
        assert_no_hooks()

    with manager_of("host", tmp_path) as manager:
        manager.reset()
        for _ in range(10):
            on_threads([begin])
            on_threads([forward])
        gc.collect()
        a_step_is_right(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_a_thread_that_ended(kind: str, tmp_path: Path) -> None:
    """A ``reset`` before its backward is refused or done; the gradients are right either way."""

    def forward() -> tuple[Net, torch.Tensor, torch.Tensor]:
        begin()
        model, leaf = Net(0), input_of(0, 1).requires_grad_()
        return model, leaf, model(leaf).square().mean()

    with manager_of(kind, tmp_path) as manager:
        manager.reset()
        ((model, leaf, loss),) = on_threads([forward])
        with suppress(GroupStateError):
            manager.reset()
        loss.backward()
        assert same_bits(gradients(model, leaf), plain(0, 0, 1))
        del loss
        a_step_is_right(manager)


def forwards(models: list[Net], step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and losses of a microbatch of each model."""
    graphs = []
    for number, model in enumerate(models):
        begin()
        leaf = input_of(number, step).requires_grad_()
        graphs.append((leaf, model(leaf).square().mean()))
    return graphs


@pytest.mark.parametrize("window_bytes", [None, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_in_threads(kind: str, window_bytes: int | None, tmp_path: Path) -> None:
    """Graphs of one thread, each taken backward by one of four threads, all at once."""
    models = [Net(number) for number in range(NUM_THREADS)]

    def one(step: int) -> None:
        graphs = forwards(models, step)
        all_at_once(lambda number: torch.autograd.backward(graphs[number][1]))
        for number, (leaf, _) in enumerate(graphs):
            found = gradients(models[number], leaf)
            assert same_bits(found, plain(number, number, step)), (step, number)

    with frequent_switches(), manager_of(kind, tmp_path, window_bytes=window_bytes) as manager:
        for step in range(20):
            manager.reset()
            one(step)
        manager.reset()
        assert_all_idle(manager)
        a_step_is_right(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_one_graph_in_threads(kind: str, tmp_path: Path) -> None:
    """A trunk with four heads: its saved tensors are asked for by all threads at once."""
    weights = [weight.detach() for weight in Net(0).weights]

    def forward(is_on: bool, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaf = h = input_of(0, step).requires_grad_()
        for weight in weights:
            h = block(h, weight, TABLE, is_on)
        return leaf, [(h * (number + 1)).square().sum() for number in range(NUM_THREADS)]

    def gradient(graph: tuple[torch.Tensor, list[torch.Tensor]], number: int) -> torch.Tensor:
        leaf, heads = graph
        return torch.autograd.grad(heads[number], leaf, retain_graph=True)[0]

    with frequent_switches(), manager_of(kind, tmp_path) as manager:
        for step in range(20):
            without = forward(False, step)
            expected = [gradient(without, number) for number in range(NUM_THREADS)]
            manager.reset()
            begin()
            assert same_bits(all_at_once(partial(gradient, forward(True, step))), expected), step
        manager.reset()
        assert_all_idle(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_beside_the_next_forward(kind: str, tmp_path: Path) -> None:
    """A thread for backward follows the thread that goes forward, one microbatch behind it."""
    models = [Net(number) for number in range(6)]

    def ahead(graphs: list[Any], barrier: Lockstep, step: int) -> None:
        for number, model in enumerate(models):
            begin()
            leaf = input_of(number, step + number).requires_grad_()
            graphs.append((leaf, model(leaf).square().mean()))
            barrier.wait()

    def behind(graphs: list[Any], barrier: Lockstep) -> None:
        for number in range(len(models)):
            barrier.wait()
            graphs[number][1].backward()

    def one(step: int) -> None:
        graphs: list[tuple[torch.Tensor, torch.Tensor]] = []
        barrier = Lockstep(2)
        on_threads(
            [partial(ahead, graphs, barrier, step), partial(behind, graphs, barrier)], barrier
        )
        for number, (leaf, _) in enumerate(graphs):
            found = gradients(models[number], leaf)
            assert same_bits(found, plain(number, number, step + number)), (step, number)

    with frequent_switches(), manager_of(kind, tmp_path, window_bytes=4096) as manager:
        for step in range(6):
            manager.reset()
            one(step)
        manager.reset()
        assert_all_idle(manager)
        a_step_is_right(manager)


# The other products


def layers(leaf: torch.Tensor, model: Net) -> torch.Tensor:
    for weight in model.weights:
        leaf = leaf + block(leaf, weight, TABLE, False)
    return leaf.square().mean()


def test_a_context_for_each_thread() -> None:
    """``OffloadActivations`` of its own in every thread."""
    num_steps = 30
    expected = [[plain(n, n, step) for step in range(num_steps)] for n in range(NUM_THREADS)]
    contexts = [
        OffloadActivations(min_offload_size=1, max_fwd_stash_size=3, backend=CpuBackend())
        for _ in range(NUM_THREADS)
    ]
    barrier = Lockstep(NUM_THREADS)

    def run(number: int) -> None:
        model = Net(number, is_on=False)
        barrier.wait()
        for step in range(num_steps):
            leaf = input_of(number, step).requires_grad_()
            with contexts[number]:
                loss = layers(leaf, model)
            loss.backward()
            assert same_bits(gradients(model, leaf), expected[number][step]), (number, step)

    with frequent_switches():
        on_threads(each(run), barrier)
    for context in contexts:
        assert_all_idle(context)
        assert context.statistics().bytes_offloaded > 0
    assert_no_hooks()


def test_checkpoints_for_each_thread() -> None:
    """``Recompute`` of its own in every thread."""
    num_steps = 20
    expected = [[plain(n, n, step) for step in range(num_steps)] for n in range(NUM_THREADS)]
    stashes = [ActivationStash("inputs", min_offload_size=1) for _ in range(NUM_THREADS)]
    barrier = Lockstep(NUM_THREADS)

    def run(number: int) -> None:
        model, recompute = Net(number, is_on=False), Recompute(stashes[number])
        barrier.wait()
        for step in range(num_steps):
            leaf = h = input_of(number, step).requires_grad_()
            recompute.begin()
            for weight in model.weights:
                h = h + recompute(block, h, weight, TABLE, False)
            h.square().mean().backward()
            assert same_bits(gradients(model, leaf), expected[number][step]), (number, step)

    with frequent_switches():
        on_threads(each(run), barrier)
    for stash in stashes:
        assert stash.statistics().bytes_offloaded > 0
        assert stash.statistics().live_tensors == stash.statistics().bytes_reloaded_unused == 0
    assert_no_hooks()


@pytest.mark.parametrize(("kind", "limit"), [("cpu", "auto"), ("eager", 1)])
def test_one_context_in_several_threads(kind: str, limit: int | str) -> None:
    """Right in every bit, or a clear error that names the threads; and good again afterwards."""
    num_steps = 30
    expected = [[plain(n, n, step) for step in range(num_steps)] for n in range(NUM_THREADS)]
    shared = OffloadActivations(
        min_offload_size=1,
        max_fwd_stash_size=3,
        config=OffloadConfig(device_limit_bytes=limit),
        backend=make_backend(kind),
    )
    barrier = Lockstep(NUM_THREADS)

    def one(number: int, step: int, model: Net) -> None:
        leaf = input_of(number, step).requires_grad_()
        with shared:
            loss = layers(leaf, model)
        loss.backward()
        assert same_bits(gradients(model, leaf), expected[number][step]), (number, step)

    def run(number: int) -> None:
        model = Net(number, is_on=False)
        barrier.wait()
        for step in range(num_steps):
            try:
                one(number, step, model)
            except OffloadError as refusal:
                assert str(threading.get_ident()) in str(refusal)
                model.zero_grad()
            assert_no_hooks()

    with frequent_switches():
        on_threads(each(run), barrier)
    before = shared.statistics().bytes_offloaded
    one(0, 0, Net(0, is_on=False))
    assert shared.statistics().bytes_offloaded > before
    assert_all_idle(shared)
    assert_no_hooks()


# Stress


@pytest.mark.parametrize("num_steps", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["host", "copy threads", "disk", "host and disk"])
def test_stress(kind: str, num_steps: int, tmp_path: Path) -> None:
    """Steps with a shape of its own each; graphs change hands between forward and backward."""
    num_shapes = 40
    expected = [[plain(n, n, step) for step in range(num_shapes)] for n in range(NUM_THREADS)]
    with frequent_switches(), manager_of(kind, tmp_path, window_bytes=6000) as manager:
        barrier = Lockstep(NUM_THREADS)
        next_step = Lockstep(NUM_THREADS, action=manager.reset)
        graphs: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * NUM_THREADS
        models = [Net(number) for number in range(NUM_THREADS)]

        def run(number: int) -> None:
            for step in range(num_steps):
                next_step.wait()
                begin()
                leaf = input_of(number, step % num_shapes).requires_grad_()
                graphs[number] = leaf, models[number](leaf).square().mean()
                barrier.wait()
                whose = (number + step) % NUM_THREADS
                mine, graphs[whose] = graphs[whose], None
                assert mine is not None
                leaf, loss = mine
                loss.backward()
                found = gradients(models[whose], leaf)
                assert same_bits(found, expected[whose][step % num_shapes]), (step, whose)
                del mine, leaf, loss

        def run_and_tell(number: int) -> None:
            try:
                run(number)
            except BaseException:
                next_step.abort()
                raise

        work = each(run_and_tell)
        on_threads(work, barrier)
        manager.reset()
        assert_all_idle(manager)
        assert manager.statistics().bytes_offloaded > 0
        a_step_is_right(manager)
