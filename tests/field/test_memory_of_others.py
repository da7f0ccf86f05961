"""F23: memory that is not torch's own is not released: the data stays, and one warning says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ON_THE_HOST, make_backend
from field_checks import make_inputs
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend

pytestmark = pytest.mark.field("F23")

Make = Callable[[Tensor, Path], tuple[Tensor, object]]
"""The same values in memory of another kind, and who else looks at it."""


def from_numpy(x: Tensor, directory: Path) -> tuple[Tensor, object]:
    array = x.numpy().copy()
    return torch.from_numpy(array), array


def from_a_buffer(x: Tensor, directory: Path) -> tuple[Tensor, object]:
    memory = bytearray(x.numpy().tobytes())
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape), np.frombuffer(memory, np.float32)


def from_dlpack(x: Tensor, directory: Path) -> tuple[Tensor, object]:
    array = x.numpy().copy()
    return torch.from_dlpack(array), array


def from_a_file(x: Tensor, directory: Path) -> tuple[Tensor, object]:
    path = str(directory / "activations")
    x.numpy().tofile(path)
    mapped = torch.from_file(path, shared=True, size=x.numel(), dtype=x.dtype)
    return mapped.view(x.shape), np.memmap(path, np.float32)


def in_shared_memory(x: Tensor, directory: Path) -> tuple[Tensor, object]:
    return x.clone().share_memory_(), None


def on_a_shared_storage(x: Tensor, directory: Path) -> tuple[Tensor, object]:
    """As another process that was sent the tensor sees it; torch thinks it could resize it."""
    storage = torch.UntypedStorage._new_shared(x.nbytes)
    return torch.empty(0).set_(storage, 0, x.shape).copy_(x), None


KINDS = [
    from_numpy,
    from_a_buffer,
    from_dlpack,
    from_a_file,
    in_shared_memory,
    on_a_shared_storage,
]

on_the_host = pytest.mark.parametrize("kind", ON_THE_HOST)
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


def released(h: Tensor, weight: Tensor) -> Tensor:
    """The output of a group that saved ``h`` and names it to be released."""
    with off_interface(True, h, "core"):
        y = h * weight
    return off_interface.group_commit(y, name="core", forced_released_tensors=[h])


def read(h: Tensor) -> Tensor:
    if h.untyped_storage().nbytes() == 0:
        pytest.fail("its storage was emptied", pytrace=False)  # pytest would print the tensor
    return h.clone()


@on_the_host
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("is_settled", [True, False], ids=["released", "copy queued"])
def test_is_skipped_with_one_warning(
    kind: str, make: Make, is_settled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two steps of several microbatches; the groups are offloaded all the same."""
    with (
        caplog.at_level(logging.WARNING, logger="pp_offload"),
        use_backend(make_backend(kind), config=CONFIG) as manager,
    ):
        weight = nn.Parameter(torch.ones(4, 6))
        for step in range(2):
            manager.reset()
            held, outputs = [], []
            for index, x in enumerate(make_inputs(3, step=step)):
                (tmp_path / f"{step} {index}").mkdir()
                h, other = make(x, tmp_path / f"{step} {index}")
                off_interface.init_chunk_handler(None, None, 1)
                outputs.append(released(h, weight))
                held.append((h, other, x))
                if is_settled:
                    manager.backend.synchronize()
                    manager.statistics()
            manager.backend.synchronize()
            manager.statistics()
            for h, other, x in held:
                assert same_bits([read(h)], [x])
                assert other is None or np.array_equal(np.reshape(other, x.shape), x.numpy())
            got = [torch.autograd.grad(y.sum(), weight)[0] for y in outputs]
            assert same_bits(got, [x for _, _, x in held])
            del outputs
            assert_idle(manager)
        assert manager.statistics().bytes_offloaded >= 3 * 4 * 6 * 4
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "forced_released_tensors" in warning and "(4, 6)" in warning


@on_the_host
def test_others_in_the_list_are_released(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """An ordinary tensor next to one that cannot be; and without such, there is no warning."""
    with (
        caplog.at_level(logging.WARNING, logger="pp_offload"),
        use_backend(make_backend(kind), config=CONFIG) as manager,
    ):
        x, own = make_inputs(2)
        weight, external = nn.Parameter(torch.ones(4, 6)), torch.from_numpy(x.numpy().copy())
        values = own.clone()
        for forced in ([], [external]):
            own = values.clone()
            off_interface.init_chunk_handler(None, None, 1)
            with off_interface(True, own, "core"):
                y = own * weight + external * weight
            y = off_interface.group_commit(y, "core", forced_released_tensors=[own, *forced])
            manager.backend.synchronize()
            manager.statistics()
            assert own.untyped_storage().nbytes() == 0
            assert same_bits([read(external)], [x])
            (got,) = torch.autograd.grad(y.sum(), weight)
            assert same_bits([got], [values + x])
            assert len(caplog.records) == len(forced)
