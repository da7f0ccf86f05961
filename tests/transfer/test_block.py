"""The states of a block: each move of the table is made, and no other."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from test_disk import disk_manager, disk_of, saved_in_a_group, settle, steps_are_equal

from pp_offload import DiskTierError, OffloadConfig, OffloadError, use_backend
from pp_offload._transfer.block import MOVES, Block, BlockState
from pp_offload.backends import CpuBackend

ALL = [(one, other) for one, found in MOVES.items() for other in found]


class NoTier:
    name = "none"


@pytest.mark.parametrize(("one", "other"), product(BlockState, repeat=2))
def test_a_move_is_in_the_table_or_refused(one: BlockState, other: BlockState) -> None:
    block = Block(NoTier())
    block.state = one
    if (one, other) in ALL:
        block.move_to(other)
        assert block.state is other
        return
    with pytest.raises(OffloadError, match=f"'none' that are {one.value} cannot be {other.value}"):
        block.move_to(other)
    assert block.state is one


Moves = set[tuple[BlockState, BlockState]]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moves]:
    """Those that are made."""
    seen: Moves = set()
    move_to = Block.move_to

    def noted(block: Block, state: BlockState) -> None:
        seen.add((block.state, state))
        move_to(block, state)

    monkeypatch.setattr(Block, "move_to", noted)
    yield seen


def fails(*args: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def reads_and_writes_that_fail(kind: str, directory: Path) -> None:
    with disk_manager(kind, directory, max_in_flight_bytes=0) as manager:
        assert steps_are_equal(manager)
        disk = disk_of(manager)
        x, h, loss = saved_in_a_group(manager)
        del h
        manager.backend.synchronize()
        settle(manager)
        disk._pread = fails  # type: ignore[method-assign]
        with pytest.raises(DiskTierError, match="Input/output"):
            torch.autograd.grad(loss, x)
        del disk._pread, loss
        disk._pwrite = fails  # type: ignore[method-assign]
        assert steps_are_equal(manager)


def test_through_staging_every_move_is_made_but_that_of_a_tensor_as_it_is(
    moves: Moves, tmp_path: Path
) -> None:
    reads_and_writes_that_fail("late", tmp_path)
    assert moves == {*ALL} - {(BlockState.NOWHERE, BlockState.WRITING)}


def test_on_the_direct_way_a_tensor_is_written_or_refused(moves: Moves, tmp_path: Path) -> None:
    reads_and_writes_that_fail("cpu", tmp_path)
    state = BlockState
    assert moves == {
        (state.NOWHERE, state.WRITING),
        (state.WRITING, state.ON_DISK),
        (state.WRITING, state.REFUSED),
    }


def test_in_host_memory_there_is_one_move(moves: Moves) -> None:
    with use_backend(CpuBackend(), config=OffloadConfig()) as manager:
        saved_in_a_group(manager)[2].backward()
        assert manager.statistics().bytes_offloaded > 0
    assert moves == {(BlockState.NOWHERE, BlockState.ON_HOST)}
