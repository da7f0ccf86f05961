"""What Megatron-LM's main has beside the calls of a layer, and errors on bad input."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.sessions import session
from helpers.toy import same_bits
from helpers.wrapped import KeepsSaved
from main_layer import begin, in_group
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from pp_offload import CpuBackend
from pp_offload import PipelineOffloadManager as IntroducedManager
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.compat.megatron import PipelineOffloadManager, print_offload_summary_table


@pytest.fixture
def face() -> Iterator[PipelineOffloadManager]:
    """The manager as main sees it, with a chunk begun, for tensors of any size."""
    with session(CpuBackend()):
        begin()
        yield PipelineOffloadManager.get_instance()


# Flags on tensors


class Quantized(TwoTensor):
    """A pair that tells its parts as quantized tensors of Transformer Engine do."""

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        return None, self.b


def ones() -> Tensor:
    return torch.ones(3, 3)


@pytest.mark.parametrize(
    ("flag", "stays"),
    [
        (None, False),
        ("_TE_do_not_offload", True),
        ("_do_not_offload", True),
        ("_unknown", False),
    ],
)
@pytest.mark.parametrize("flagged", ["tensor", "whole", "part"])
def test_what_is_flagged_stays(
    face: PipelineOffloadManager, flagged: str, flag: str | None, stays: bool
) -> None:
    """A tensor, one that is made of tensors, or one of these."""
    saved: Any = ones() if flagged == "tensor" else Quantized(ones(), ones())
    if flag is not None:
        setattr(saved.b if flagged == "part" else saved, flag, True)
    x = torch.ones(3, requires_grad=True)
    in_group(x, lambda y: KeepsSaved.apply(y, saved)).sum().backward()
    assert same_bits([getattr(KeepsSaved.seen.pop(), "a", ones())], [ones()])
    assert (face.statistics().bytes_offloaded == 0) is stays


def test_what_is_flagged_is_not_released(face: PipelineOffloadManager) -> None:
    x = torch.ones(9, requires_grad=True) * 1
    x._do_not_offload = True  # type: ignore[attr-defined]
    in_group(x, lambda inside: (inside * 2).exp(), forced_released_tensors=[x])
    face.statistics()
    assert x.untyped_storage().nbytes() == 36


def test_marking_none_does_nothing(face: PipelineOffloadManager) -> None:
    off_interface.mark_not_offload(None)
    marked = torch.ones(9)
    off_interface.mark_not_offload(marked)
    assert not face.cur_forward_chunk().tensor_need_offloading_checker(marked[3:])
    assert not hasattr(marked, "_do_not_offload")


# Groups by name


def test_groups_are_committed_by_name(face: PipelineOffloadManager) -> None:
    chunk = face.cur_forward_chunk()
    outer, inner = (chunk.on_group_start_forward(name) for name in ("outer", "inner"))
    assert chunk.offload_groups == [outer, inner]
    assert chunk.find_group_with_name(chunk.offload_groups, "inner") is inner
    assert chunk.find_group_with_name(chunk.offload_groups, "outer", 1) is None
    assert chunk.should_bulk_offload(outer)
    chunk.bulk_offload("outer", None)
    assert [group.name for group in chunk.open_groups] == ["inner"]
    chunk.bulk_offload_group(inner)
    assert not chunk.open_groups
    chunk.on_group_start_forward("last")
    chunk.on_group_commit_forward("last", [])


def test_a_hook_that_waits_keeps_no_tensor_alive(face: PipelineOffloadManager) -> None:
    called: list[Any] = []
    dropped, held = torch.ones(9), torch.ones(9)
    gone = weakref.ref(dropped)
    face.push_offload_groups(lambda _, tensors: called.append(tensors), "act", [dropped, held])
    IntroducedManager.get_instance().push_offload_groups(called.append, [dropped, held])
    del dropped
    assert gone() is None
    off_interface.flush_delayed_groups()
    assert [[tensor is held for tensor in tensors] for tensors in called] == [[True], [True]]


# The table


def test_the_table_of_a_process_group_has_a_line_for_bytes_copied_twice(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_offload_summary_table({"mlp": 2**20}, {"mlp": (3, 2**19)}, dist.group.WORLD)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "rank 0, mlp: 3 copies of what was copied before, 512.00 KiB"
    print_offload_summary_table({"mlp": 2**20})
    assert "copied before" not in capsys.readouterr().out
