"""The window: earliest needed first, and never more bytes reloaded and unused than it holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pp_offload import OffloadConfig
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.saved import Saved
from pp_offload._core.tiers import make_tier
from pp_offload.backends import CpuBackend

Payload = tuple[str, int, int]
"""The name of its group, its place there, and its bytes."""


class Backwards:
    """Groups of one chunk, the last first."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.begun: list[Group] = []

    def after(self, group: Group) -> Iterator[Group]:
        return iter(self.groups[: self.groups.index(group)][::-1])

    def begin(self, group: Group) -> None:
        self.begun.append(group)


class Bench:
    """Groups that left, and what came back of them.

    Args:
        sizes: Per group in forward order, the sizes of its tensors in bytes.
        window_bytes: Of the window.
    """

    def __init__(self, sizes: list[list[int]], window_bytes: int | str) -> None:
        backend, config = CpuBackend(), OffloadConfig(prefetch_bytes=window_bytes)
        self.order = Backwards()
        tier = make_tier(backend, config, backend.allocate_host)
        engine = Engine(backend, tier, self.order, config)
        self.window, self.mover = engine.window, engine.mover
        self.arrived, self.counts = self.mover.arrived, self.mover.counts
        self.groups = self.order.groups
        self.saved: list[list[Saved]] = []
        for number, row in enumerate(sizes):
            group = Group(f"g{number}", engine=engine)
            saved = [group.pack(torch.full((n,), n % 251, dtype=torch.uint8)) for n in row]
            assert all(isinstance(tensor, Saved) for tensor in saved)
            engine.send(group, engine.payloads(group))
            self.groups.append(group)
            self.saved.append(saved)  # type: ignore[arg-type]

    def needed(self, *, is_there: bool = False) -> list[Payload]:
        """What backward has still to use, that needed first first; or what of it is there."""
        payloads = []
        for group in reversed(self.groups):
            batch = None if group.batch is None else group.batch()
            if batch is not None:
                for index, nbytes in reversed(list(enumerate(batch.sizes))):
                    is_on_device = batch.back.device[index] is not None
                    if batch.back.uses_left[index] > 0 and (is_on_device or not is_there):
                        payloads.append((group.name, index, nbytes))
        return payloads

    def on_device(self) -> list[Payload]:
        return self.needed(is_there=True)

    def sizes(self) -> list[int]:
        """In bytes, of what is on the device."""
        return [nbytes for _, _, nbytes in self.on_device()]

    def check(self, window_bytes: int) -> None:
        """The invariants of the window, now."""
        on_device = self.on_device()
        assert self.arrived.unused_bytes == sum(self.sizes())
        assert self.arrived.unused_bytes <= window_bytes or len(on_device) == 1
        assert on_device == self.needed()[: len(on_device)]


def is_right(saved: Saved) -> bool:
    """Whether it comes back with its bytes."""
    tensor = saved.unpack()
    return bool(tensor.eq(tensor.numel() % 251).all())


sizes = st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(sizes, st.integers(0, 120))
def test_the_window_holds_through_a_whole_backward(
    sizes: list[list[int]], window_bytes: int
) -> None:
    bench = Bench(sizes, window_bytes)
    for group, saved in zip(reversed(bench.groups), reversed(bench.saved), strict=True):
        group.on_use()
        bench.check(window_bytes)
        for tensor in reversed(saved):
            assert is_right(tensor)
            bench.check(window_bytes)
    assert bench.arrived.unused_bytes == 0
    assert bench.counts.bytes_reloaded == sum(map(sum, sizes))


@settings(deadline=None)
@given(sizes, st.integers(0, 120), st.randoms(use_true_random=False))
def test_any_order_of_use_gives_the_right_bytes_once_each(
    sizes: list[list[int]], window_bytes: int, random: object
) -> None:
    bench = Bench(sizes, window_bytes)
    saved = [tensor for row in bench.saved for tensor in row]
    random.shuffle(saved)  # type: ignore[attr-defined]
    largest = max((n for row in sizes for n in row), default=0)
    for tensor in saved:
        assert is_right(tensor)
        assert bench.arrived.unused_bytes <= max(window_bytes, largest)
    assert bench.arrived.unused_bytes == 0
    assert bench.counts.bytes_reloaded == sum(map(sum, sizes))
