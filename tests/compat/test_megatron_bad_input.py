"""Wrong input to what Megatron-LM's main calls; the next step is right all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toy import same_bits
from main_face import chunk_of, face
from main_layer import Model, batches, step

from pp_offload import CpuBackend, OffloadError, use_backend
from pp_offload.compat.megatron import (
    ChunkOffloadHandler,
    PipelineOffloadManager,
    fine_grained_offloading_group_offload,
    print_offload_summary_table,
)
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.errors import ConfigError, GroupStateError

__all__ = ["face"]

BAD: dict[str, tuple[Callable[[PipelineOffloadManager], Any], type[Exception], str]] = {
    "a rank below 0": (
        lambda _: off_interface.init_chunk_handler(-1, None, None, 1, 0, 1.0),
        ValueError,
        "pp_rank is -1, expected an integer of at least 0",
    ),
    "more than all": (
        lambda _: off_interface.init_chunk_handler(0, None, None, 1, 0, 1.5),
        ConfigError,
        "activation_offload_fraction",
    ),
    "less than no offload": (
        lambda _: off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0, -1),
        ValueError,
        "max_inflight_offloads is -1, expected an integer of at least 0",
    ),
    "a chunk with half an offload": (
        lambda _: ChunkOffloadHandler(1, None, 0.5),  # type: ignore[arg-type]
        ValueError,
        "max_inflight_offloads is 0.5",
    ),
    "no group of that name": (
        lambda _: fine_grained_offloading_group_offload(torch.ones(1), "act"),
        GroupStateError,
        "no group of that name was started",
    ),
    "a group that is none": (
        lambda face: chunk_of(face).should_bulk_offload("act"),  # type: ignore[arg-type]
        TypeError,
        "group is 'act', expected a group of this chunk",
    ),
    "a list of copies": (
        lambda _: print_offload_summary_table({}, [1]),  # type: ignore[arg-type]
        TypeError,
        "local_duplicate_summary is the list",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(face: PipelineOffloadManager, case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call(face)
    device = torch.device("cpu")
    on, off = Model(device), Model(device, is_on=False)
    off_interface.reset()
    assert same_bits(step(on, batches(device)), step(off, batches(device))), "the next step"


def test_a_group_without_a_chunk_is_an_error() -> None:
    x = torch.ones(1, requires_grad=True)
    with use_backend(CpuBackend()), pytest.raises(OffloadError, match="without a chunk"):
        fine_grained_offloading_group_offload(x, "act")
