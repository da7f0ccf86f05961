"""Which chunk runs backward next: by virtual stage, or by a known order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp_offload._core.keys import ChunkKey
from pp_offload._groups.chunk_queue import ChunkQueue


@dataclass(eq=False)
class Chunk:
    """A chunk with nothing but names."""

    key: ChunkKey | None
    names: list[str] = field(default_factory=lambda: ["mlp"])

    def is_empty_chunk(self, name: str | None = None) -> bool:
        return not any(name in (None, own) for own in self.names)


def chunk(vp_stage: int, ordinal: int, *names: str) -> Chunk:
    return Chunk(ChunkKey(vp_stage, ordinal), list(names) or ["mlp"])


def push_all(queue: ChunkQueue, chunks: list[Chunk]) -> None:
    for each in chunks:
        queue.push(each)


def grid(vp_size: int, num_microbatches: int) -> list[Chunk]:
    """Forward, stage by stage."""
    return [chunk(s, m) for s in range(vp_size) for m in range(num_microbatches)]


def keys(chunks: object) -> list[tuple[int, int]]:
    return [tuple(chunk.key) for chunk in chunks]  # type: ignore[attr-defined]


def pop_all(queue: ChunkQueue, name: str | None = None) -> list[tuple[int, int]]:
    chunks = []
    while (popped := queue.pop(name)) is not None:
        chunks.append(popped)
    return keys(chunks)


@pytest.mark.parametrize("vp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_backward_visits_the_last_stage_first(vp_size: int, num_microbatches: int) -> None:
    queue = ChunkQueue()
    push_all(queue, grid(vp_size, num_microbatches))
    expected = [(s, m) for s in reversed(range(vp_size)) for m in range(num_microbatches)]
    assert pop_all(queue) == expected


def test_without_an_order_only_chunks_of_the_last_stage_are_certain() -> None:
    queue = ChunkQueue()
    queue.vp_size = 2
    push_all(queue, [chunk(0, 0), chunk(0, 1)])
    assert keys(queue.certain()) == []
    push_all(queue, [chunk(1, 0), chunk(1, 1)])
    assert keys(queue.certain()) == [(1, 0), (1, 1)]
    queue.set_order([ChunkKey(0, 1)])
    assert keys(queue.certain()) == [(0, 1), (1, 0), (1, 1), (0, 0)]


def test_a_name_selects_the_next_chunk_that_has_it_and_empty_chunks_are_skipped() -> None:
    queue = ChunkQueue()
    attn, both = chunk(0, 0, "attn"), chunk(0, 1, "mlp", "attn")
    queue.push(Chunk(ChunkKey(0, 2), []))
    queue.push(attn)
    queue.push(both)
    assert queue.front("mlp") is both
    assert queue.pop("mlp") is both
    assert queue.pop("mlp") is None
    assert queue.pop("attn") is attn


def test_a_chunk_that_will_not_come_is_not_waited_for() -> None:
    queue = ChunkQueue()
    queue.set_order([ChunkKey(1, 0), ChunkKey(0, 0)], is_scheduled=True)
    queue.push(chunk(0, 0))
    assert keys(queue.certain()) == []
    queue.skip(ChunkKey(1, 0))
    assert keys(queue.certain()) == [(0, 0)]
    queue.clear()  # in the next step it may come
    queue.push(chunk(0, 0))
    assert keys(queue.certain()) == []


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_chunks_come_in_the_known_order_however_they_went_in(
    forward: list[int], backward: list[int]
) -> None:
    queue = ChunkQueue()
    queue.set_order([ChunkKey(i % 2, i // 2) for i in backward])
    push_all(queue, [chunk(i % 2, i // 2) for i in forward])
    assert pop_all(queue) == [(i % 2, i // 2) for i in backward]
