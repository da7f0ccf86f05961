"""F07: waits go to the live compute stream, whichever it is."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, on_stream, side_stream
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F07")

ON_STREAMS = [kind for kind in BACKENDS if not str(kind).startswith("cpu")]


class SideStreams:
    """Two compute streams beside the default one, handed work and taken it back by waits."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.main = backend.current_stream()
        self.sides = [side_stream(backend, name) for name in ("side 0", "side 1")]

    def on(self, index: int) -> AbstractContextManager[object]:
        return on_stream(self.backend, self.sides[index])

    def fork(self) -> None:
        """The side streams wait for all that was done elsewhere."""
        for side in self.sides:
            for other in (self.main, *self.sides):
                if other is not side:
                    side.wait_stream(other)

    def join(self) -> None:
        """The default stream waits for them."""
        for side in self.sides:
            self.main.wait_stream(side)


streams_of = pytest.mark.parametrize(
    ("forward", "backward"),
    [((0,), (0,)), ((0, 1), (0, 1)), ((0, 1), (1, 0)), ((0, 1), (0,))],
    ids=["one side stream", "alternating", "crossed", "gathered"],
)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ON_STREAMS)
@streams_of
@pytest.mark.parametrize("in_flight", [2])
def test_forward_and_backward_on_side_streams(
    kind: str, forward: tuple[int, ...], backward: tuple[int, ...], in_flight: int
) -> None:
    with use_backend(
        make_backend(kind), config=OffloadConfig(min_offloaded_tensor_size=1)
    ) as manager:
        device = manager.backend.device
        streams = SideStreams(manager.backend)
        on, off = (Chain(("a", "b"), 2, is_on=b, device=device) for b in (True, False))
        for step in range(3):
            inputs = make_inputs(4, step=step, length=3 + step, device=device)
            leaves = [x.clone().requires_grad_() for x in inputs]
            manager.reset()
            streams.fork()
            waiting: list[tuple[int, Tensor]] = []

            def run_backward(waiting: list[tuple[int, Tensor]] = waiting) -> None:
                m, loss = waiting.pop(0)
                streams.fork()
                with streams.on(backward[m % len(backward)]):
                    loss.backward()

            for m, leaf in enumerate(leaves):
                with streams.on(forward[m % len(forward)]):
                    off_interface.init_chunk_handler(None, None, 1)
                    waiting.append((m, on(leaf).square().mean()))
                if len(waiting) == in_flight:
                    run_backward()
            while waiting:
                run_backward()
            streams.join()
            got = [leaf.grad for leaf in leaves] + [p.grad for p in on.parameters()]
            plain = [x.clone().requires_grad_() for x in inputs]
            for leaf in plain:
                off(leaf).square().mean().backward()
            expected = [leaf.grad for leaf in plain] + [p.grad for p in off.parameters()]
            assert same_bits([t.clone() for t in got], [t.clone() for t in expected])
            on.zero_grad()
            off.zero_grad()
            assert manager.statistics().bytes_offloaded > 0
            assert_idle(manager)


@pytest.mark.parametrize("kind", ON_STREAMS)
def test_one_graph_over_two_streams(kind: str) -> None:
    """Each group of one microbatch is computed on another stream."""
    with use_backend(
        make_backend(kind), config=OffloadConfig(min_offloaded_tensor_size=1)
    ) as manager:
        device = manager.backend.device
        streams = SideStreams(manager.backend)
        for step in range(3):
            results = []
            for is_on in (True, False):
                parts = [Chain(("a",), 1, is_on=is_on, device=device, seed=s) for s in range(4)]
                (x,) = make_inputs(1, step=step, device=device)
                leaf = x.requires_grad_()
                streams.fork()
                if is_on:
                    manager.reset()
                    off_interface.init_chunk_handler(None, None, 1)
                h = leaf
                for index, module in enumerate(parts):
                    with streams.on(index % 2):
                        h = module(h)
                    streams.fork()
                streams.join()
                h.square().sum().backward()
                del h
                streams.join()
                results.append([leaf.grad, *(p.grad for m in parts for p in m.parameters())])
            assert same_bits(*results)
            assert_idle(manager)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ON_STREAMS)
@streams_of
def test_the_context_on_side_streams(
    kind: str, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    """Two microbatches in flight; made on the default stream, entered and used on others."""
    backend = make_backend(kind)
    with backend.activate():
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=3, backend=backend)
        streams = SideStreams(backend)
        model = Chain(("a", "b"), 2, is_on=False, device=backend.device)
        for step in range(3):
            inputs = make_inputs(4, step=step, length=3 + step, device=backend.device)
            leaves = [x.clone().requires_grad_() for x in inputs]
            streams.fork()
            losses: list[Tensor] = []
            for number in range(len(leaves) + 1):
                if number < len(leaves):
                    with streams.on(forward[number % len(forward)]), context:
                        losses.append(model(leaves[number]).square().mean())
                if number > 0:
                    streams.fork()
                    with streams.on(backward[(number - 1) % len(backward)]):
                        losses.pop(0).backward()
            streams.join()
            got = [t.grad.clone() for t in (*leaves, *model.parameters())]
            model.zero_grad()
            plain = [x.clone().requires_grad_() for x in inputs]
            for leaf in plain:
                model(leaf).square().mean().backward()
            assert same_bits(got, [t.grad for t in (*plain, *model.parameters())])
            model.zero_grad()
            assert_idle(context)
        assert context.statistics().bytes_offloaded > 0
