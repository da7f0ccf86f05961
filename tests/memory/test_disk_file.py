"""DiskFile: what is read is what was written, or an error says why not; nothing waits for it."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.processes import status_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pp_offload import ClosedError, DiskTierError, ForkedError
from pp_offload._memory.disk_file import BLOCK_BYTES, DiskFile, DiskWrite, file_system_of


@pytest.fixture
def file(tmp_path: Path) -> DiskFile:
    return DiskFile(tmp_path)


def some_bytes(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def written(file: DiskFile, *payloads: Tensor) -> DiskWrite:
    write = file.write(payloads)
    write.synchronize()
    return write


def read(file: DiskFile, write: DiskWrite) -> Tensor:
    target = torch.full((write.extent.nbytes,), 7, dtype=torch.uint8)
    file.read_into(write, [target]).synchronize()
    return target


def descriptor(file: DiskFile) -> int:
    assert file._file is not None
    return file._file.fd


@pytest.mark.parametrize(
    "sizes",
    [[1], [4097], [0, 5, 0], [BLOCK_BYTES, 1], [3 * BLOCK_BYTES + 13, 64], [10] * 515],
    ids=str,
)
def test_payloads_come_back(file: DiskFile, sizes: list[int]) -> None:
    payloads = [some_bytes(size, seed) for seed, size in enumerate(sizes)]
    write = written(file, *payloads)
    assert write.query() and write.failure is None
    for _ in range(2):
        targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        file.read_into(write, targets).synchronize()
        assert all(map(torch.equal, targets, payloads))
    assert (file.written_bytes, file.read_bytes) == (sum(sizes), 2 * sum(sizes))


def test_the_file_has_no_name_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "made" / "when needed")
    assert list((tmp_path / "made" / "when needed").iterdir()) == []
    status = os.fstat(descriptor(file))
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=30))
def test_no_batch_is_written_into_another(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[bool, int]]
) -> None:
    file = DiskFile(tmp_path_factory.getbasetemp())
    live: list[tuple[DiskWrite, Tensor]] = []
    for seed, (is_write, size) in enumerate(moves):
        if is_write or not live:
            data = some_bytes(size, seed)
            live.append((file.write([data]), data))
        else:
            del live[size % len(live)]  # perhaps while it is being written
        assert file.in_use_bytes >= sum(write.extent.nbytes for write, _ in live)
    for write, data in live:
        assert read(file, write).equal(data)
    file.close()


def test_short_writes_and_reads_go_on_where_they_ended(file: DiskFile) -> None:
    file._pwrite = lambda fd, view, at: os.pwrite(fd, view[:999], at)
    file._pread = lambda fd, view, at: os.preadv(fd, [view[:777]], at)
    payloads = [some_bytes(size, size) for size in (1, 998, 5000, 3)]
    assert read(file, written(file, *payloads)).equal(torch.cat(payloads))


def test_what_is_not_whole_in_the_file_is_not_read(file: DiskFile) -> None:
    write = written(file, some_bytes(10_000))
    os.ftruncate(descriptor(file), 5000)
    with pytest.raises(DiskTierError, match="the file ends at 5000"):
        read(file, write)
    file._pwrite = Mock(return_value=0)
    with pytest.raises(DiskTierError, match="the file ends at .*set disk_dir"):
        read(file, written(file, some_bytes(10)))


def test_a_directory_in_memory_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert file_system_of(tmp_path, mounts) == "tmpfs"
    assert file_system_of(tmp_path.parent, mounts) == "ext4"
    with pytest.raises(OSError, match="none"):
        file_system_of(tmp_path, tmp_path / "none")
    monkeypatch.setattr("pp_offload._memory.disk_file.file_system_of", lambda directory: "tmpfs")
    with caplog.at_level(logging.WARNING, logger="pp_offload"):
        DiskFile(tmp_path)
    assert "tmpfs" in caplog.text and "set disk_dir" in caplog.text


def test_a_closed_file_gives_up_queued_writes_and_takes_nothing(tmp_path: Path) -> None:
    """The read before them runs behind an earlier use of its memory, though that has failed."""
    file = DiskFile(tmp_path, num_threads=1)
    write, gate = written(file, some_bytes(10)), threading.Event()

    def fail_late() -> None:
        gate.wait()
        raise RuntimeError("an earlier use failed")

    earlier = [Mock(synchronize=fail_late)]
    read_before = file.read_into(write, [torch.zeros(10, dtype=torch.uint8)], earlier)
    queued = file.write([some_bytes(10)])
    threading.Timer(0.02, gate.set).start()
    file.close()
    file.close()
    read_before.synchronize()
    assert queued.failure is not None
    for do in (lambda: file.write([some_bytes(1)]), lambda: read(file, write)):
        with pytest.raises(ClosedError):
            do()


def test_a_forked_process_is_refused(file: DiskFile) -> None:
    """It shares the descriptor, and would write where its parent reads."""
    data = some_bytes(100)
    write = written(file, data)

    def child() -> None:
        for ask in (lambda: file.write([data]), lambda: file.read_into(write, [data])):
            with pytest.raises(ForkedError):
                ask()

    assert status_of(child) == 0
