"""Names of chunks and groups: the same in every step, as long as steps are alike."""

from __future__ import annotations

from typing import NamedTuple


class ChunkKey(NamedTuple):
    """A chunk of a step, named alike in every step."""

    vp_stage: int
    """Virtual pipeline stage."""

    microbatch: int
    """Number of the microbatch in the step, from 0."""


class WeightPassKey(NamedTuple):
    """The second part of a chunk's split backward."""

    chunk: ChunkKey


class Place(NamedTuple):
    """Position of a group in the forward of a stage, the same for all microbatches."""

    vp_stage: int
    position: int


class GroupKey(NamedTuple):
    """A group of a step, named alike in every step."""

    chunk: ChunkKey
    position: int
    """Position of the group in the chunk's forward, from 0."""

    @property
    def place(self) -> Place:
        """This key without the microbatch."""
        return Place(self.chunk.vp_stage, self.position)
