"""DiskFile: what is read is what was written, or an error says why not; nothing is left behind."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import stat
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pp_offload._memory.disk import ALIGNMENT, DiskExtent, DiskFile, file_system_of
from processes import Run, run
from torch import Tensor

from pp_offload import ClosedError, DiskTierError


def some_bytes(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def write(tier: DiskFile, data: Tensor) -> DiskExtent:
    extent = tier.allocate(data.numel())
    tier.write(extent, data).synchronize()
    return extent


def read(tier: DiskFile, extent: DiskExtent) -> Tensor:
    target = torch.full((extent.nbytes,), 7, dtype=torch.uint8)
    tier.read(extent, target).synchronize()
    return target


def start_of(tier: DiskFile, extent: DiskExtent) -> int:
    return extent.file_range.start


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 13])
def test_bytes_come_back(tmp_path: Path, nbytes: int) -> None:
    tier = DiskFile(tmp_path)
    data = some_bytes(nbytes)
    extent = write(tier, data)
    assert extent.failure is None
    assert read(tier, extent).equal(data)
    assert read(tier, extent).equal(data), "and again"
    assert start_of(tier, extent) % ALIGNMENT == 0


def test_the_file_has_no_name_and_is_its_owners_alone(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path / "made" / "when needed")
    assert list((tmp_path / "made" / "when needed").iterdir()) == []
    status = os.fstat(tier._file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0


def test_a_read_comes_after_the_write_that_is_queued_before_it(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path, num_threads=4)
    for seed in range(20):
        data = some_bytes(100_000, seed)
        extent = tier.allocate(100_000)
        tier.write(extent, data)
        target = torch.zeros(100_000, dtype=torch.uint8)
        tier.read(extent, target).synchronize()
        assert target.equal(data)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=30))
def test_no_extent_writes_into_another(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[bool, int]]
) -> None:
    tier = DiskFile(tmp_path_factory.getbasetemp())
    live: list[tuple[DiskExtent, Tensor]] = []
    for seed, (is_take, size) in enumerate(moves):
        if is_take or not live:
            live.append((tier.allocate(size), some_bytes(size, seed)))
            tier.write(*live[-1])
        else:
            del live[size % len(live)]  # perhaps while it is being written
        assert tier.statistics().in_use == sum(extent.nbytes for extent, _ in live)
        assert tier.statistics().num_payloads == len(live)
    for extent, data in live:
        assert read(tier, extent).equal(data)
    tier.close()


def test_room_given_back_is_used_again(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    for seed in range(50):
        write(tier, some_bytes(1 << 20, seed))
    assert tier.statistics().in_use == 0
    assert os.fstat(tier._file.fd).st_size <= 4 << 20


Step = Callable[[int, memoryview, int], int]


def failing(number: int, after: int = 0) -> Step:
    """A system call that fails from the second byte range on."""
    calls = [0]

    def step(fd: int, data: memoryview, offset: int) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(number, os.strerror(number))
        return os.pwrite(fd, data[: len(data) // 2], offset)

    return step


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1])
def test_a_write_that_fails_is_noted(tmp_path: Path, number: int, after: int) -> None:
    tier = DiskFile(tmp_path)
    tier._pwrite = failing(number, after)  # type: ignore[method-assign]
    extent = tier.allocate(10_000)
    tier.write(extent, some_bytes(10_000)).synchronize()  # it does not raise: the bytes are there
    assert extent.failure is not None
    message = str(extent.failure)
    for part in (str(tmp_path), "offset 0", os.strerror(number), "set disk_dir"):
        assert part in message
    with pytest.raises(DiskTierError, match=os.strerror(number)):
        read(tier, extent)


def test_short_writes_and_reads_go_on_where_they_ended(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    data = some_bytes(10_000)
    tier._pwrite = lambda fd, b, at: os.pwrite(fd, b[:999], at)  # type: ignore[method-assign]
    tier._pread = lambda fd, b, at: os.preadv(fd, [b[:777]], at)  # type: ignore[method-assign]
    assert read(tier, write(tier, data)).equal(data)


def test_a_write_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    tier._pwrite = lambda fd, b, at: 0  # type: ignore[method-assign]
    extent = write(tier, some_bytes(100))
    assert extent.failure is not None


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    extent = write(tier, some_bytes(10_000))
    os.ftruncate(tier._file.fd, 5000)
    with pytest.raises(DiskTierError, match="the file ends 5000 bytes too early"):
        read(tier, extent)


@pytest.mark.parametrize("place", [0, 1, 511, 4096, 262_143, 299_999])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_an_error(tmp_path: Path, place: int, bit: int) -> None:
    tier = DiskFile(tmp_path)
    data = some_bytes(300_000)
    extent = write(tier, data)
    at = start_of(tier, extent) + place
    os.pwrite(tier._file.fd, bytes([int(data[place]) ^ 1 << bit]), at)
    with pytest.raises(DiskTierError, match="checksum"):
        read(tier, extent)
    os.pwrite(tier._file.fd, bytes([int(data[place])]), at)
    assert read(tier, extent).equal(data), "an error is not remembered"


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(DiskTierError, match="a file"):
        DiskFile(tmp_path / "a file")


def test_a_closed_tier_takes_nothing(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    extent = write(tier, some_bytes(10))
    tier.close()
    tier.close()
    with pytest.raises(ClosedError):
        tier.allocate(1)
    assert tier.statistics().in_use == extent.nbytes


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    tier = DiskFile(tmp_path)
    write(tier, some_bytes(10))
    assert set(threading.enumerate()) > before
    tier.close()
    assert set(threading.enumerate()) <= before


def run_python(code: str, *arguments: object) -> Run:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        return run(command, Path(folder))


def test_a_full_file_system_is_noted_and_read_never(tmp_path: Path) -> None:
    """The kernel itself refuses: the size of files is limited, as by a full disk or a quota."""
    limit = 1 << 20
    result = run_python(
        """
        import resource, signal, sys, torch
        from pp_offload._memory.disk import DiskFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
        tier = DiskFile(sys.argv[1])
        data = [torch.full((600_000,), i, dtype=torch.uint8) for i in range(3)]
        extents = [tier.allocate(600_000) for _ in data]
        for extent, one in zip(extents, data):
            tier.write(extent, one).synchronize()
        print([extent.failure is None for extent in extents])
        print(extents[1].failure)
        target = torch.empty(600_000, dtype=torch.uint8)
        tier.read(extents[0], target).synchronize()
        print(target.equal(data[0]))
        """,
        tmp_path,
        limit,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "[True, False, False]"
    assert os.strerror(errno.EFBIG) in lines[1]
    assert lines[2] == "True"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    result = run_python(
        """
        import os, signal, sys, torch
        from pp_offload._memory.disk import DiskFile
        tier = DiskFile(sys.argv[1])
        tier.write(tier.allocate(1 << 20), torch.ones(1 << 20, dtype=torch.uint8)).synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert result.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_closed_tier_says_so_when_asked_to_read_or_write(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    extent = write(tier, some_bytes(10))
    tier.close()
    with pytest.raises(ClosedError):
        tier.read(extent, some_bytes(10))
    with pytest.raises(ClosedError):
        tier.write(extent, some_bytes(10))


def test_a_directory_in_memory_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert file_system_of(tmp_path, mounts) == "tmpfs"
    assert file_system_of(tmp_path.parent, mounts) == "ext4"
    assert file_system_of(tmp_path, tmp_path / "none") == ""
    spaced = tmp_path / "two words"
    spaced.mkdir()
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/two\\040words tmpfs rw 0 0\n")
    assert file_system_of(spaced, mounts) == "tmpfs"
    monkeypatch.setattr("pp_offload._memory.disk_file.file_system_of", lambda directory: "tmpfs")
    with caplog.at_level(logging.WARNING, logger="pp_offload"):
        DiskFile(tmp_path)
    assert "tmpfs" in caplog.text and "set disk_dir" in caplog.text


def test_a_file_system_without_unnamed_files_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    tier = DiskFile(tmp_path)
    data = some_bytes(5000)
    assert read(tier, write(tier, data)).equal(data)
    status = os.fstat(tier._file.fd)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert list(tmp_path.iterdir()) == []
