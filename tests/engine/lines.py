"""An engine driven by hand: forwards of layers in groups, backwards in the order they are queued.

line = Line(backend, prefetch_bytes=2**16)
with line.chunk() as chunk:
    y = line.group("mlp", layer, x)
line.reset()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from pp_offload import OffloadConfig
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.tiers import HostTier
from pp_offload._memory.host_pool import HostPool

push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
unpack = methodcaller("unpack")


class Line:
    """Chunks go backward in the order in which they went forward, and groups last first."""

    def __init__(self, backend: Any, *, min_numel: int = 1, **options: Any) -> None:
        config = OffloadConfig(min_offloaded_tensor_size=1, **options)
        self.min_numel = min_numel
        self.pool = HostPool(backend.allocate_host)
        self.engine = Engine(backend, HostTier(self.pool), self, config)
        self._chunks: deque[list[Group]] = deque()
        self._open: list[Group] = []
        self._current: list[Group] = []

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """A microbatch's forward."""
        self._open = []
        self._chunks.append(self._open)
        yield

    def group(self, name: str, forward: Callable[..., Any], *args: Any, keep: bool = False) -> Any:
        """Run a part of the forward as a group."""
        group = Group(name, engine=self.engine, min_numel=self.min_numel)
        self.engine.follow(self.engine.current_stream())
        self._open.append(group)
        push_hooks(group.pack, unpack)
        try:
            result = forward(*args)
        finally:
            pop_hooks()
        payloads = self.engine.payloads(group)
        if keep or group.is_used:
            self.engine.keep(group)
        else:
            self.engine.send(group, payloads)
        return result

    def begin(self, group: Group) -> None:
        """Backward has reached a group."""
        for chunk in list(self._chunks):
            if group in chunk:
                self._chunks.remove(chunk)
                self._current = chunk

    def after(self, group: Group) -> Iterator[Group]:
        """What backward visits next."""
        if group in self._current:
            yield from reversed(self._current[: self._current.index(group)])
        for chunk in self._chunks:
            yield from reversed(chunk)

    def reset(self) -> None:
        """A step begins."""
        self._chunks.clear()
        self.engine.shared.clear()
        self.engine.window.begin_at(None)
        self.engine.mover.poll()

    def assert_clean(self) -> None:
        """Nothing is in use once all copies have run."""
        self.engine.mover.synchronize()
        assert self.pool.in_use_bytes == 0
        assert self.engine.mover.in_flight.nbytes == 0
        assert self.engine.mover.arrived.unused_bytes == 0


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
