"""Names of chunks and groups: the same in every step, as long as steps are alike."""

from __future__ import annotations

from typing import NamedTuple


class ChunkKey(NamedTuple):
    """Which chunk of a step, the same in every step."""

    vp_stage: int
    """Virtual pipeline stage."""

    microbatch: int
    """Its number in the step, from 0."""


class WeightPassKey(NamedTuple):
    """The second part of a chunk's backward, where it comes in two."""

    chunk: ChunkKey


class Place(NamedTuple):
    """Where a group is in the forward of a stage, the same for all microbatches."""

    vp_stage: int
    position: int


class GroupKey(NamedTuple):
    """Which group of a step, the same in every step."""

    chunk: ChunkKey
    position: int
    """Its position in the chunk's forward, from 0."""

    @property
    def place(self) -> Place:
        """The same without the microbatch."""
        return Place(self.chunk.vp_stage, self.position)
