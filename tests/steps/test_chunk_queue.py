"""Which chunk runs backward next: by virtual stage, or by a known order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pp_offload._core.keys import ChunkKey
from pp_offload._groups.chunk_queue import ChunkQueue


@dataclass(eq=False)
class Chunk:
    """A chunk with nothing but names."""

    key: ChunkKey
    names: tuple[str, ...]

    def is_empty_chunk(self, name: str | None = None) -> bool:
        return not any(name in (None, own) for own in self.names)


def push(queue: Any, stage: int, number: int, *names: str) -> Chunk:
    chunk = Chunk(ChunkKey(stage, number), names or ("mlp",))
    queue.push(chunk)
    return chunk


def keys(chunks: Iterable[Any]) -> list[tuple[int, int]]:
    return [tuple(chunk.key) for chunk in chunks]


def test_without_an_order_only_chunks_of_the_last_stage_are_certain() -> None:
    queue = ChunkQueue()
    queue.vp_size = 2
    push(queue, 0, 0)
    push(queue, 0, 1)
    assert keys(queue.certain()) == []
    push(queue, 1, 0)
    push(queue, 1, 1)
    assert keys(queue.certain()) == [(1, 0), (1, 1)]
    queue.set_order([ChunkKey(0, 1)])
    assert keys(queue.certain()) == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_a_chunk_that_will_not_come_is_not_waited_for() -> None:
    queue = ChunkQueue()
    queue.set_order([ChunkKey(1, 0), ChunkKey(0, 0)], is_scheduled=True)
    push(queue, 0, 0)
    assert keys(queue.certain()) == []
    queue.skip(ChunkKey(1, 0))
    assert keys(queue.certain()) == [(0, 0)]
    queue.clear()  # in the next step it may come
    push(queue, 0, 0)
    assert keys(queue.certain()) == []


@given(st.permutations(range(6)), st.permutations(range(6)), st.booleans())
def test_chunks_come_in_the_known_order_however_they_went_in(
    forward: list[int], backward: list[int], is_known: bool
) -> None:
    """Else those of the last stage come first, in forward order."""
    queue = ChunkQueue()
    order = [(i % 2, i // 2) for i in backward]
    if is_known:
        queue.set_order([ChunkKey(*key) for key in order])
    pushed = [push(queue, i % 2, i // 2) for i in forward]
    expected = order if is_known else sorted(keys(pushed), key=lambda key: -key[0])
    assert [queue.pop().key for _ in forward] == expected  # type: ignore[union-attr]
