"""The manager as Megatron-LM's main sees it, in a microbatch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pp_offload import CpuBackend, OffloadConfig, use_backend
from pp_offload.compat.megatron import (
    ChunkOffloadHandler,
    FineGrainedActivationOffloadingInterface,
    PipelineOffloadManager,
)


@pytest.fixture
def face() -> Iterator[PipelineOffloadManager]:
    """The manager with a chunk begun, for tensors of any size."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(CpuBackend(), config=config):
        FineGrainedActivationOffloadingInterface.init_chunk_handler(0, None, None, 1, 0, 1.0)
        yield PipelineOffloadManager.get_instance()


def chunk_of(face: PipelineOffloadManager) -> ChunkOffloadHandler:
    """The chunk that was begun."""
    chunk = face.cur_forward_chunk()
    assert isinstance(chunk, ChunkOffloadHandler)
    return chunk
