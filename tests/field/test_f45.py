"""F45: where threads run and memory lies is the user's choice; nothing is changed unasked."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS, make_backend
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import OffloadConfig, use_backend
from pp_offload._memory.numa import on_node, processors_of

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system has no affinity"
)


def node(root: Path, number: int, processors: str) -> Path:
    directory = root / f"sys/devices/system/node/node{number}"
    directory.mkdir(parents=True)
    (directory / "cpulist").write_text(processors + "\n")
    return root


def allocate(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("numa_node", [None, 0, 1000])
@needs_affinity
def test_f45_affinity_is_as_it_was(
    kind: str, numa_node: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    config = OffloadConfig(min_offloaded_tensor_size=1, numa_node=numa_node)
    with (
        caplog.at_level(logging.INFO, logger="pp_offload"),
        use_backend(make_backend(kind), config=config) as manager,
    ):
        device = str(manager.backend.device)
        on, off = make_model(device=device), make_model(groups=(), device=device)
        inputs = [x.to(device) for x in batches(3)]
        expected = run_step(off, inputs, offload=False)
        assert same_bits(run_step(on, inputs), expected)
        assert os.sched_getaffinity(0) == before
        assert_idle(manager)
    said = [record.getMessage() for record in caplog.records if "NUMA" in record.getMessage()]
    said += [r.getMessage() for r in caplog.records if "numa_node" in r.getMessage()]
    assert len(said) == (numa_node is not None)


@needs_affinity
def test_f45_memory_is_asked_for_on_the_node_and_nowhere_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    ran_on: list[set[int]] = []

    def spy(nbytes: int) -> torch.Tensor:
        ran_on.append(os.sched_getaffinity(0))
        return allocate(nbytes)

    with caplog.at_level(logging.INFO, logger="pp_offload"):
        placed = on_node(3, spy, node(tmp_path, 3, str(one)))
    assert "NUMA node 3" in caplog.text
    assert placed(10_000).numel() == 10_000
    assert ran_on == [{one}]
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_f45_affinity_is_restored_when_there_is_no_memory(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)

    def full(nbytes: int) -> torch.Tensor:
        raise MemoryError("full")

    with pytest.raises(MemoryError):
        on_node(0, full, node(tmp_path, 0, str(min(before))))(10)
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_f45_lists_of_processors(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    assert processors_of(0, node(tmp_path, 0, "0-3,8,100-200")) == mine & {
        *range(4),
        8,
        *range(100, 201),
    }
    assert processors_of(1, node(tmp_path, 1, "")) == set()
    assert processors_of(2, node(tmp_path, 2, "not a list")) == set()


def test_f45_without_information_nothing_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="pp_offload"):
        placed = on_node(0, allocate, tmp_path)
    assert placed is allocate
    assert "numa_node is 0" in caplog.text
