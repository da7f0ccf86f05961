"""Programs and checks that the field scenarios share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.testing import SimulatedBackend


class Chain(nn.Module):
    """Layers of named parts, every part a group when ``is_on``. The same weights every time."""

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
    with off_interface(is_on, x, name) as x:
        y = torch.tanh(x @ weight).sin()
    return off_interface.group_commit(y, name=name) if is_on else y


def side_stream(backend: Any, name: str = "side") -> Any:
    """Another stream of the device for compute."""
    if isinstance(backend, SimulatedBackend):
        return backend.new_stream(name)
    return torch.Stream(device=backend.device)


def on_stream(backend: Any, stream: Any) -> AbstractContextManager[object]:
    """What is launched inside is queued on ``stream``."""
    return backend.stream(stream) if isinstance(backend, SimulatedBackend) else stream


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
    moves, done = [], 0
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
    stages: Sequence[nn.Module], inputs: Sequence[Tensor], moves: Iterable[Move], is_on: bool
) -> list[Tensor]:
    """One step in the order of ``moves``; losses, gradients of inputs and of parameters."""
    if is_on:
        off_interface.reset()
    leaves: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    results: dict[int, list[Tensor]] = {}
    last = len(stages) - 1
    for is_forward, stage, m in moves:
        if is_forward:
            if is_on:
                off_interface.init_chunk_handler(len(stages), stage, 1)
            x = inputs[m] if stage == 0 else outputs[stage - 1, m]
            leaves[stage, m] = leaf = x.detach().clone().requires_grad_()
            y = stages[stage](leaf)
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
    for stage_module in stages:
        flat += [p.grad.clone() for p in stage_module.parameters() if p.grad is not None]
        stage_module.zero_grad()
    return flat


def make_inputs(
    num: int, *, step: int = 0, length: int = 4, width: int = 6, device: object = "cpu"
) -> list[Tensor]:
    """The same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * step + length)
    drawn = [torch.randn(length, width, generator=generator) for _ in range(num)]
    return [x.to(torch.device(str(device))) for x in drawn]


def hook_depth() -> int:
    """How many pairs of saved-tensor hooks are on this thread's stack."""
    stack = torch._C._autograd
    found = []
    while (top := stack._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        stack._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(found):
        stack._push_saved_tensors_default_hooks(pack, unpack)
    return len(found)
