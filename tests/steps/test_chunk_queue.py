"""Which chunk runs backward next: by virtual stage, or by a known order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pp_offload._core.keys import ChunkKey
from pp_offload._groups.chunk_queue import ChunkQueue


@dataclass(eq=False)
class Chunk:
    """A chunk with nothing but a key."""

    key: ChunkKey

    def is_empty_chunk(self, name: str | None = None) -> bool:
        return False


def push(queue: Any, *keys: tuple[int, int]) -> None:
    """Chunks by stage and microbatch."""
    for key in keys:
        queue.push(Chunk(ChunkKey(*key)))


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


@given(st.permutations(range(6)), st.permutations(range(6)), st.booleans())
def test_chunks_come_in_the_known_order_however_they_went_in(
    forward: list[int], backward: list[int], is_known: bool
) -> None:
    """Else those of the last stage come first, in forward order."""
    queue = ChunkQueue()
    pushed, order = ([(i % 2, i // 2) for i in numbers] for numbers in (forward, backward))
    if is_known:
        queue.set_order([ChunkKey(*key) for key in order])
    push(queue, *pushed)
    expected = order if is_known else sorted(pushed, key=lambda key: -key[0])
    assert [queue.pop().key for _ in forward] == expected  # type: ignore[union-attr]
