"""Random training programs for two devices: one whose threads take their time, one with clocks.

program = draw(seed=3)
run = Run(program, backend.device, wait=backend.synchronize)
with use_backend(backend, config=program.config()):
    run.step(offload=True)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig
from pp_offload.simulate import Hardware

ITEM_BYTES = 4
SIZES = (2**12, 2**14, 2**15, 2**16)
"""Elements of a saved tensor. Small, for their real bytes move on the cores of this machine; some
groups are beyond the bytes below which reloads are put together, others are not."""


@dataclass(frozen=True)
class Node:
    """A function whose output is saved for backward."""

    numel: int
    num_forward: int
    """Kernels."""
    num_backward: int


@dataclass(frozen=True)
class Program:
    """One training step, and what the engine may do in it."""

    seed: int
    groups: tuple[tuple[Node, ...], ...]
    num_microbatches: int
    in_flight: int
    """Forwards before the first backward; as many as microbatches: all of them."""
    host_waits: bool
    """Whether the host waits for each backward, as for a loss that is printed."""
    bounds: tuple[float, float] | None
    """Bytes in flight and in the window, of a microbatch's; None where the engine chooses."""
    need: float
    """Time of a microbatch's copies of one direction, of its kernels' time."""

    @property
    def nodes(self) -> list[Node]:
        """Of a microbatch, in order."""
        return [node for group in self.groups for node in group]

    @property
    def chunk_bytes(self) -> int:
        """What a microbatch saves."""
        return sum(node.numel for node in self.nodes) * ITEM_BYTES

    @property
    def num_kernels(self) -> int:
        """Of a microbatch."""
        return sum(node.num_forward + node.num_backward for node in self.nodes)

    def copy_s(self, kernel_s: float) -> float:
        """How long each copy takes, where a kernel takes so long."""
        return self.need * self.num_kernels * kernel_s / len(self.nodes)

    def config(self) -> OffloadConfig:
        """With bounds in bytes."""
        if self.bounds is None:
            return OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
        cap, window = (int(share * self.chunk_bytes) for share in self.bounds)
        return OffloadConfig(
            device_limit_bytes=None,
            min_offloaded_tensor_size=1,
            max_in_flight_bytes=cap,
            prefetch_bytes=window,
        )


def draw(seed: int) -> Program:
    """One program, the same for a seed."""
    rng = random.Random(seed)
    groups = tuple(
        tuple(
            Node(rng.choice(SIZES), rng.randint(1, 2), rng.randint(1, 2))
            for _ in range(rng.randint(1, 3))
        )
        for _ in range(rng.randint(3, 6))
    )
    num = rng.randint(3, 5)
    cap = rng.choice([0.0, *(rng.uniform(0.05, 1.2) for _ in range(4))])
    return Program(
        seed,
        groups,
        num_microbatches=num,
        in_flight=rng.choice([rng.randint(1, num - 1), num]),
        host_waits=rng.random() < 0.25,
        bounds=None if rng.random() < 0.2 else (cap, rng.uniform(0.05, 1.2)),
        need=rng.uniform(0.05, 1.25),
    )


def small(program: Program) -> Program:
    """With two groups and two microbatches: it runs, and says little."""
    num = min(2, program.in_flight)
    return replace(program, groups=program.groups[:2], num_microbatches=2, in_flight=num)


def hardware(launch_s: float, copy_s: float) -> Hardware:
    """That takes these times, whatever the sizes."""
    return Hardware(
        name="paced",
        matmul_flops=inf,
        memory_bytes_per_s=inf,
        memory_bytes=2**40,
        link_bytes_per_s=inf,
        launch_s=launch_s,
        copy_latency_s=copy_s,
    )


class Work(torch.autograd.Function):
    """A node: so many kernels each way. The bits of its gradient depend on what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, node: Node) -> Tensor:
        y = x[:1].expand(node.numel) + 1
        for _ in range(node.num_forward - 1):
            y.mul_(0.75)
        ctx.save_for_backward(y)
        ctx.node, ctx.numel = node, x.numel()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        gradient = gradients[0][:1].expand(ctx.numel) * saved[-1:]
        for _ in range(ctx.node.num_backward - 1):
            gradient.mul_(0.75)
        return gradient, None


class Run:
    """A program's tensors on a device.

    Args:
        program: What to run.
        device: Where.
        wait: Has the host wait for all of it.
    """

    def __init__(self, program: Program, device: torch.device, wait: Callable[[], object]) -> None:
        self._program = program
        self._wait = wait
        self._x = torch.ones(SIZES[0], device=device)
        self._gradient = torch.ones(program.nodes[-1].numel, device=device)

    def step(self, *, offload: bool) -> list[Tensor]:
        """Queue a step; gradients of its inputs. Without offload the host never waits."""
        program = self._program
        if offload:
            off_interface.reset()
        leaves: list[Tensor] = []
        waiting: deque[Tensor] = deque()
        for _ in range(program.num_microbatches):
            leaves.append(self._x.detach().requires_grad_())
            waiting.append(self.forward(leaves[-1], offload=offload))
            if len(waiting) >= program.in_flight:
                self._next_backward(waiting, offload=offload)
        while waiting:
            self._next_backward(waiting, offload=offload)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def forward(self, x: Tensor, *, offload: bool) -> Tensor:
        """Of a microbatch."""
        if offload:
            off_interface.init_chunk_handler(None, None, 1)
        for nodes in self._program.groups:
            with off_interface(offload, x, "group") as x:
                for node in nodes:
                    x = Work.apply(x, node)  # type: ignore[no-untyped-call]
            if offload:
                x = off_interface.group_commit(x, name="group")
        return x

    def backward(self, y: Tensor) -> None:
        """Of a microbatch."""
        y.backward(self._gradient)

    def _next_backward(self, waiting: deque[Tensor], *, offload: bool) -> None:
        self.backward(waiting.popleft())
        if offload and self._program.host_waits:
            self._wait()
