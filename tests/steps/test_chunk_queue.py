"""Which chunks certainly run backward next: by virtual stage, or by a known order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pp_offload._core.keys import ChunkKey
from pp_offload._groups.chunk_queue import ChunkQueue


def push(queue: Any, *keys: tuple[int, int]) -> None:
    """Chunks by stage and microbatch."""
    for key in keys:
        queue.push(SimpleNamespace(key=ChunkKey(*key)))


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
