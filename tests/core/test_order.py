"""Promise 2: each ordering hazard, on a device whose copies are as late, or as random, as they may.

A missing wait reads poison, or the race detector raises; both end the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers.sessions import (
    SIMULATED,
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    check,
    drawn,
    gradients,
    group,
    make_backend,
    session,
    settle,
    side_stream,
)
from helpers.toy import WIDTH, Net, inputs, train
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

simulated = pytest.mark.parametrize("kind", SIMULATED)

# A host buffer that is read before it was written, or written before it was read


@pytest.mark.field("F01")
@simulated
@pytest.mark.parametrize("window", [0, 300, 10**6], ids=["on demand", "one part", "all ahead"])
def test_host_bytes_are_read_behind_their_write(kind: str, window: int) -> None:
    """In the first iteration as in the third: each microbatch goes backward at once."""
    net = Net([f"part {n}" for n in range(3)], layers=1)
    check(lambda on: train(net, inputs(3), on), kind, steps=3, prefetch_bytes=window)


@pytest.mark.field("F02")
@simulated
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_buffer_is_reused_behind_its_last_reader(kind: str, ahead: int) -> None:
    """Lengths change with every microbatch; the host has room for little more than a step."""
    net = Net()
    xs = [drawn(rows, WIDTH, seed=rows) for rows in (5, 9, 3, 7, 5, 2)]
    options: dict[str, Any] = {"host_budget_bytes": 2**17, "max_in_flight_bytes": 0}
    check(lambda on: train(net, xs, on, ahead=ahead), kind, steps=3, **options)


@simulated
@pytest.mark.parametrize("rows", [(6, 6, 6, 6), (2048, 1024, 512, 1024)], ids=["equal", "carved"])
def test_bytes_reloaded_and_never_used_do_not_free_their_buffer_early(
    kind: str, rows: tuple[int, ...]
) -> None:
    """Half of a graph goes backward, the rest dies while its reload is queued; others follow.

    The host has room for the largest alone, so others get parts of the same memory.
    """

    def program(is_on: bool) -> list[Tensor]:
        results = []
        for number in range(4):
            begin_microbatch(is_on and number > 0)
            x = drawn(rows[number], WIDTH, seed=number).requires_grad_()
            first = group(x * 2, torch.sin, is_on)
            last = group(first * 3, torch.cos, is_on)
            if is_on:
                settle(PipelineOffloadManager.get_instance())
            results += torch.autograd.grad(last.sum(), first, retain_graph=True)
        return results

    check(program, kind, prefetch_bytes=10**6, host_budget_bytes=2**17)


# A source that is let go before its copy has run


def overwrite_free_memory(rows: int) -> None:
    """New tensors may get what is free, and write to it."""
    junk = [torch.full((rows, WIDTH), float("nan")) for _ in range(3)]
    del junk


@simulated
@pytest.mark.parametrize("cap", [0, 200, "auto"])
def test_a_source_lives_until_its_copy_has_run(kind: str, cap: int | str) -> None:
    """Nothing else holds it, and the next tensors may get its memory."""

    def program(is_on: bool) -> list[Tensor]:
        x = h = drawn(6, WIDTH).requires_grad_()
        for number in range(4):
            h = group(h * 2, torch.sin, is_on, f"part {number % 2}")
            overwrite_free_memory(6)
        h.sum().backward()
        return gradients(x)

    check(program, kind, max_in_flight_bytes=cap)


# Gathered copies


@contextmanager
def aside(backend: Any) -> Iterator[None]:
    """On a side stream behind the main one, which waits for it afterwards."""
    main, side = backend.current_stream(), side_stream(backend)
    side.wait_stream(main)
    with backend.stream(side):
        yield
    main.wait_stream(side)


@pytest.mark.field("F08")
@simulated
@pytest.mark.parametrize(
    "view", [lambda h: h[:, 1:4], lambda h: h.t()[2:5]], ids=["columns", "transposed"]
)
@pytest.mark.parametrize("is_aside", [False, True], ids=["one stream", "side stream"])
def test_a_gathered_copy_is_ordered_with_compute(
    kind: str, view: Callable[[Tensor], Tensor], is_aside: bool
) -> None:
    """A part of a storage; on a side stream the memory is written again behind the commit."""

    def program(is_on: bool) -> list[Tensor]:
        leaf = drawn(9, WIDTH).requires_grad_()
        backend = PipelineOffloadManager.get_instance().backend
        with aside(backend) if is_on and is_aside else nullcontext():
            y = group(leaf * 2, lambda h: view(h).sin(), is_on)
        y.sum().backward()
        return gradients(leaf)

    check(program, kind)


# Streams


PATTERNS: dict[str, tuple[list[int], list[int]]] = {
    "all aside": ([1] * 4, [1] * 4),
    "microbatches in turn": ([0, 1, 2, 0], [0, 1, 2, 0]),
    "backward aside": ([0] * 4, [1] * 4),
    "forward aside": ([1] * 4, [0] * 4),
}
"""Streams of the forwards of four microbatches, and of their backwards."""


@pytest.mark.field("F07")
@simulated
@pytest.mark.parametrize(("forward", "backward"), PATTERNS.values(), ids=PATTERNS)
def test_waits_are_of_the_live_stream(kind: str, forward: list[int], backward: list[int]) -> None:
    """Whichever stream computes, it waits for what comes back, and what leaves waits for it."""
    weights = [drawn(WIDTH, WIDTH, seed=n).requires_grad_() for n in range(2)]

    def program(is_on: bool) -> list[Tensor]:
        backend = PipelineOffloadManager.get_instance().backend
        last = backend.current_stream()
        streams = [last, *(side_stream(backend) for _ in range(2))] if is_on else []

        def enter(number: int) -> Any:
            """Streams are handed over by events."""
            nonlocal last
            if not is_on:
                return nullcontext()
            if streams[number] is not last:
                streams[number].wait_stream(last)
            last = streams[number]
            return backend.stream(last)

        graphs = []
        for number in range(4):
            with enter(forward[number]):
                begin_microbatch(is_on and number > 0)
                h = leaf = drawn(4, WIDTH, seed=number).requires_grad_()
                for weight in weights:
                    h = group(h, lambda h, w=weight: torch.tanh(h @ w).sin(), is_on)
                graphs.append((leaf, h))
        for number, (_, h) in enumerate(graphs):
            with enter(backward[number]):
                h.sum().backward()
        with enter(0):
            return gradients(*(leaf for leaf, _ in graphs), *weights)

    check(program, kind, steps=3)


@pytest.mark.field("F10")
@pytest.mark.parametrize(
    "options", [{}, {"max_in_flight_bytes": 0}], ids=["auto", "none in flight"]
)
@simulated
@pytest.mark.parametrize("columns", [slice(None), slice(2, 5)], ids=["whole", "gathered"])
def test_what_another_stream_saved_is_ordered_with_the_commit(
    kind: str, columns: slice, options: dict[str, int]
) -> None:
    """It is committed on a stream that has not waited, and its memory is free at once."""
    x = drawn(9, WIDTH).requires_grad_()
    with session(kind, **options) as manager:
        main, side = manager.backend.current_stream(), side_stream(manager.backend)
        begin_step()
        with off_interface(True, x, "part"):
            side.wait_stream(main)
            with manager.backend.stream(side):
                y = (x * 2)[:, columns].sin()
        off_interface.group_commit(y, name="part")
        main.wait_stream(side)
        got = torch.autograd.grad(y.sum(), x)
        assert_same(got, torch.autograd.grad((x * 2)[:, columns].sin().sum(), x))


@simulated
def test_memory_of_the_stream_that_the_manager_was_made_on_waits_for_its_copy(kind: str) -> None:
    """All forwards compute on another one; what they are given is of this one."""
    with session(kind, max_in_flight_bytes=64) as manager:
        for rows in (6, 5):
            x = drawn(rows, WIDTH) * 2
            with aside(manager.backend):
                begin_step()
                y = group(x.requires_grad_(), torch.sin)
            del x, y
            overwrite_free_memory(rows)
        assert_idle(manager)


@simulated
def test_streams_that_nothing_orders(kind: str) -> None:
    """Two operators save one tensor; each goes backward on a stream of its own."""
    functions = (torch.sin, torch.cos, torch.tanh)
    x = drawn(4, WIDTH).requires_grad_()
    expected = [torch.autograd.grad(f(x * 2).sum(), x)[0] for f in functions]
    with session(kind) as manager:
        main, sides = manager.backend.current_stream(), [side_stream(manager.backend) for _ in "ab"]
        for _ in range(2):
            begin_step()
            ys = group(x * 2, lambda h: [f(h) for f in functions])
            settle(manager)
            results = []
            for side in sides:
                side.wait_stream(main)
            for stream, y in zip((main, *sides), ys, strict=True):
                with manager.backend.stream(stream):
                    results += torch.autograd.grad(y, x, torch.ones_like(x), retain_graph=True)
            for side in sides:
                main.wait_stream(side)
            assert_same(results, expected)
            del ys, y
            assert_idle(manager)


@simulated
def test_the_target_of_a_reload_belongs_to_compute(kind: str) -> None:
    """Its memory is free as soon as compute lets go of it: nothing else may still use it."""
    with session(kind, prefetch_bytes=10**6) as manager:
        begin_step()
        x = h = drawn(16, WIDTH).requires_grad_()
        for _ in range(3):
            h = group(h * 2, torch.sin)
        settle(manager)
        before = manager.backend.device_bytes
        h.sum().backward(retain_graph=True)
        del h
        assert_idle(manager)
        assert manager.backend.device_bytes <= before + x.nbytes
        manager.backend.check()


# Several managers


@simulated
def test_managers_of_one_device_do_not_share_what_is_in_use(kind: str) -> None:
    backend, managers, graphs = make_backend(kind), [], []
    with ExitStack() as stack:
        for number in range(2):
            managers.append(stack.enter_context(session(backend)))
            begin_step()
            x = drawn(5, WIDTH, seed=number).requires_grad_()
            graphs.append((x, group(x * 2, torch.sin)))
            settle(managers[-1])
        for x, y in graphs:
            y.sum().backward()
            assert_same(gradients(x), torch.autograd.grad((x * 2).sin().sum(), x))
        graphs.clear()
        del x, y
        for manager in managers:
            assert_idle(manager)
