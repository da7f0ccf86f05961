"""Scenarios of the field: chains of groups, pipeline orders, and comparisons on any device.

check_moves(manager, Chain(), make_inputs(4), schedule(4, ahead=2))     # a step in 1F1B order
check_steps(manager, program)      # program(is_on, step) runs one step and returns tensors
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ACCELERATORS
from torch import Tensor, nn

from helpers.sessions import gradients, group
from helpers.toy import assert_idle, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend

Compute = Callable[[Tensor], Tensor]

_numbers = itertools.count()

ordered = pytest.mark.parametrize(
    "backend", ["cpu threads", "late", "random", *ACCELERATORS], indirect=True
)
"""For a scenario in which a copy may be too early or too late; ``on_two_backends`` for others."""


def begin(is_on: bool = True, stages: int | None = None, stage: int | None = None) -> None:
    """The forward of a microbatch begins."""
    if is_on:
        off_interface.init_chunk_handler(stages, stage, 1)


@contextmanager
def manager_on(backend: Backend, **options: Any) -> Iterator[PipelineOffloadManager]:
    """A manager of its own, for tensors of any size."""
    config = OffloadConfig(**{"min_offloaded_tensor_size": 1, **options})
    with use_backend(backend, config=config) as manager:
        yield manager


def check_steps(
    engine: PipelineOffloadManager | OffloadActivations,
    program: Callable[[bool, int], Sequence[Tensor]],
    *,
    steps: int = 3,
    moves: bool = True,
) -> None:
    """Each step has the bits of the step without offload, and nothing is in use afterwards.

    Args:
        engine: Of ``statistics()``.
        program: Runs one step, with offload if its first argument is True.
        steps: How many.
        moves: Whether bytes have to be offloaded.
    """
    for step in range(steps):
        expected = program(False, step)
        if isinstance(engine, PipelineOffloadManager):
            engine.reset()
        assert same_bits(program(True, step), expected), step
        assert_idle(engine)
    assert not moves or engine.statistics().bytes_offloaded > 0


class Chain(nn.Module):
    """Layers of named parts, each a group that saves three tensors. The same weights every time."""

    def __init__(
        self,
        names: Sequence[str] = ("a", "b"),
        layers: int = 3,
        width: int = 6,
        *,
        is_on: bool = True,
        device: torch.device | str = "cpu",
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.is_on = is_on
        self.names = [name for _ in range(layers) for name in names]
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(width, width, generator=generator) / 2 for _ in self.names]
        self.weights = nn.ParameterList([nn.Parameter(w.to(device)) for w in weights])

    def forward(self, x: Tensor) -> Tensor:
        for name, weight in zip(self.names, self.weights, strict=True):
            x = x + part(name, x, weight, self.is_on)
        return x


def part(name: str, x: Tensor, weight: Tensor, is_on: bool) -> Tensor:
    """One group: three tensors are saved in it."""
    return group(x, lambda x: torch.tanh(x @ weight).sin(), is_on, name)


class Move(NamedTuple):
    """One action of a schedule."""

    is_forward: bool
    vp_stage: int
    microbatch: int


def schedule(microbatches: int, ahead: int, vp_size: int = 1, ranks: int = 1) -> list[Move]:
    """1F1B with ``ahead`` forwards before the first backward; interleaved for ``vp_size`` > 1."""
    rounds = [range(i, min(i + ranks, microbatches)) for i in range(0, microbatches, ranks)]
    forwards = [Move(True, s, m) for r in rounds for s in range(vp_size) for m in r]
    backwards = [Move(False, s, m) for r in rounds for s in reversed(range(vp_size)) for m in r]
    moves: list[Move] = []
    done = 0
    while done < len(backwards):
        seen = len(moves) - done
        wanted = backwards[done]
        is_ready = Move(True, vp_size - 1, wanted.microbatch) in moves
        if seen < len(forwards) and (not is_ready or seen < ahead + done):
            moves.append(forwards[seen])
        else:
            moves.append(wanted)
            done += 1
    return moves


def run_moves(
    stages: Chain | Sequence[Chain], inputs: Sequence[Tensor], moves: Iterable[Move], is_on: bool
) -> list[Tensor]:
    """One step in the order of ``moves``; losses, gradients of inputs and of parameters."""
    chains = [stages] if isinstance(stages, Chain) else list(stages)
    for chain in chains:
        chain.is_on = is_on
    if is_on:
        off_interface.reset()
    leaves: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    results: dict[int, list[Tensor]] = {}
    last = len(chains) - 1
    for is_forward, stage, m in moves:
        if is_forward:
            begin(is_on, len(chains), stage)
            x = inputs[m] if stage == 0 else outputs[stage - 1, m]
            leaves[stage, m] = leaf = x.detach().clone().requires_grad_()
            y = chains[stage](leaf)
            outputs[stage, m] = y.square().mean() if stage == last else y
        else:
            gradient = None if stage == last else leaves.pop((stage + 1, m)).grad
            y = outputs.pop((stage, m))
            y.backward(gradient)
            results.setdefault(m, []).append(y.detach())
            gradient = leaves[stage, m].grad
            assert gradient is not None
            results[m].append(gradient.clone())
    flat = [t for m in sorted(results) for t in results[m]]
    return flat + gradients(*(p for chain in chains for p in chain.parameters()))


def check_moves(
    manager: PipelineOffloadManager,
    stages: Chain | Sequence[Chain],
    inputs: Sequence[Tensor],
    moves: Sequence[Move],
) -> int:
    """One step has the bits of that without offload and leaves nothing; the bytes offloaded."""
    expected = run_moves(stages, inputs, moves, False)
    before = manager.statistics().bytes_offloaded
    assert same_bits(run_moves(stages, inputs, moves, True), expected)
    assert_idle(manager)
    return manager.statistics().bytes_offloaded - before


def make_inputs(
    num: int, *, step: int = 0, length: int = 4, width: int = 6, device: object = "cpu"
) -> list[Tensor]:
    """The same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * step + length)
    drawn = [torch.randn(length, width, generator=generator) for _ in range(num)]
    return [x.to(torch.device(str(device))) for x in drawn]


def side_stream(backend: Any) -> Any:
    """Another stream of the device for compute."""
    if isinstance(backend, SimulatedBackend):
        return backend.new_stream(f"side {next(_numbers)}")
    return torch.Stream(device=backend.device)


def on_stream(backend: Any, stream: Any) -> AbstractContextManager[object]:
    """What is launched inside is queued on ``stream``."""
    return backend.stream(stream) if isinstance(backend, SimulatedBackend) else stream


def hook_depth() -> int:
    """How many pairs of saved-tensor hooks are on this thread's stack."""
    stack = torch._C._autograd
    pairs = []
    while (top := stack._top_saved_tensors_default_hooks(True)) is not None:
        pairs.append(top)
        stack._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(pairs):
        stack._push_saved_tensors_default_hooks(pack, unpack)
    return len(pairs)
