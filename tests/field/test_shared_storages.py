"""Tensors that share a storage, with each other or with other libraries: F09, F23, F34, F60."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_backend, on_two_backends
from helpers.scenarios import begin, check_steps, make_inputs, manager_on, ordered
from helpers.sessions import gradients, group, settle
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager
from pp_offload.backends import Backend

# F09: a release of one view


Split = Callable[[Tensor], Sequence[Tensor]]
"""The view that is released, and the one that is read later."""


SPLITS: dict[str, Split] = {
    "halves": lambda h: h.chunk(2),
    "halves without a base": lambda h: torch.unsafe_chunk(h, 2),
    "interleaved": lambda h: (h[::2], h[1::2]),
    "a view and its base": lambda h: (h.view(-1, 6), h),
    "an alias": lambda h: (h, h.detach()),
}


def read(view: Tensor) -> Tensor:
    """A number that depends on every element; an operator does not look whether they are there."""
    if view.untyped_storage().nbytes() == 0:
        pytest.fail("its storage was emptied", pytrace=False)  # pytest would print the view
    return view.sin().sum()


def release(views: Sequence[Tensor], forced: Tensor, is_on: bool, name: str = "first") -> Tensor:
    """A group that reads views, and may release one of them after its commit."""
    with off_interface(is_on, views[0], name):
        y = sum((read(view) for view in views), start=0)
    if not is_on:
        return y
    return off_interface.group_commit(y, name=name, forced_released_tensors=[forced])


def same_group(a: Tensor, b: Tensor, is_on: bool) -> Tensor:
    return release([a, b], a, is_on)


def later_group(a: Tensor, b: Tensor, is_on: bool) -> Tensor:
    return release([a], a, is_on) + release([b], a, is_on, "second")


def next_microbatch(a: Tensor, b: Tensor, is_on: bool) -> Tensor:
    y = release([a], a, is_on)
    begin(is_on)
    return y + release([b], b, is_on)


def outside_any_group(a: Tensor, b: Tensor, is_on: bool) -> Tensor:
    return read(b) + release([a], a, is_on)


READERS = [same_group, later_group, next_microbatch, outside_any_group]


@pytest.mark.field("F09")
@pytest.mark.covering(2)
@on_two_backends
@pytest.mark.parametrize("is_settled", [True, False], ids=["released", "copy queued"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("reader", READERS)
def test_a_sibling_of_what_was_released(
    manager: PipelineOffloadManager, reader: Callable[..., Tensor], split: Split, is_settled: bool
) -> None:
    def step(is_on: bool, number: int) -> list[Tensor]:
        begin(is_on)
        x = make_inputs(1, step=number, length=8, device=manager.backend.device)[0]
        a, b = split(x.requires_grad_() * 2)
        y = reader(a, b, is_on)
        if is_settled and is_on:
            settle(manager)
        if reader in (next_microbatch, outside_any_group):  # b was saved, and lives there alone
            del b
            return [y.detach(), *torch.autograd.grad(y, x)]
        return [read(b).detach(), y.detach(), *torch.autograd.grad(y, x)]

    check_steps(manager, step, steps=2)


# F23: memory of others


Made = tuple[Tensor, Any]
"""A tensor in memory that is not torch's own, and who else looks at it."""


def from_numpy(x: Tensor, path: Path) -> Made:
    array = x.numpy().copy()
    return torch.from_numpy(array), array


def from_a_file(x: Tensor, path: Path) -> Made:
    x.numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)
    return mapped.view(x.shape), np.memmap(path, np.float32)


def in_shared_memory(x: Tensor, path: Path) -> Made:
    return x.clone().share_memory_(), None


def on_a_shared_storage(x: Tensor, path: Path) -> Made:
    """As another process that was sent the tensor sees it; torch thinks it could resize it."""
    storage = torch.UntypedStorage._new_shared(x.nbytes)
    return torch.empty(0).set_(storage, 0, x.shape).copy_(x), None


@pytest.mark.field("F23")
@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("make", [from_numpy, from_a_file, in_shared_memory, on_a_shared_storage])
def test_memory_of_others_is_not_released(
    kind: str, make: Callable[..., Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; the group is offloaded all the same, and an ordinary tensor beside it goes."""
    with manager_on(make_backend(kind)) as manager:
        weight = nn.Parameter(torch.ones(4, 6))
        for step in range(2):
            x, own = make_inputs(2, step=step)
            values = own.clone()
            foreign, other = make(x, tmp_path / f"{step}")
            begin()
            with off_interface(True, own, "core"):
                y = own * weight + foreign * weight
            y = off_interface.group_commit(y, "core", forced_released_tensors=[own, foreign])
            settle(manager)
            assert own.untyped_storage().nbytes() == 0
            assert foreign.untyped_storage().nbytes() and same_bits([foreign], [x])
            assert other is None or np.array_equal(np.reshape(other, x.shape), x.numpy())
            y.sum().backward()
            assert same_bits(gradients(weight), [values + x])
        assert manager.statistics().bytes_offloaded == 2 * 2 * x.nbytes
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "forced_released_tensors" in warning and "(4, 6)" in warning


# F60: shared by groups


TABLES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "as it is": lambda table, number: table,
    "transposed by turns": lambda table, number: table if number % 2 else table.t().t(),
    "reshaped by turns": lambda table, number: table.view(-1).view(4, 6),
}


def layers_with_a_table(
    x: Tensor, weights: Sequence[Tensor], view: Callable[..., Tensor], is_on: bool
) -> Tensor:
    """Groups, one behind the other, that all save one tensor, as rotary tables are saved."""
    begin(is_on)
    table = (x.detach() * 2).cos()
    for number, weight in enumerate(weights):
        x = group(
            x,
            lambda x, w=weight, n=number: torch.tanh(x @ w) * view(table, n),
            is_on,
            f"layer {number % 2}",
        )
    return x.square().mean()


@pytest.mark.field("F60")
@pytest.mark.covering(2)
@pytest.mark.parametrize("view", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("window", ["auto", 0, 200, 10**6])
@pytest.mark.parametrize("tier", ["host", "disk"])
@ordered
def test_a_table_of_every_layer_comes_back_once(
    backend: Backend, tier: str, window: int | str, view: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Two microbatches in flight; a neighbour is near in any window."""
    with manager_on(
        backend,
        device_limit_bytes=None,
        prefetch_bytes=window,
        tiers=(tier,),
        disk_dir=tmp_path if tier == "disk" else None,
    ) as manager:
        weights = [nn.Parameter(w) for w in make_inputs(6, length=6, device=backend.device)]

        def step(is_on: bool, number: int) -> list[Tensor]:
            before = manager.statistics()
            waiting: list[Tensor] = []
            inputs = make_inputs(3, step=number, device=backend.device)
            for x in inputs:
                waiting.append(layers_with_a_table(x.requires_grad_(), weights, view, is_on))
                if len(waiting) == 2:
                    waiting.pop(0).backward()
            waiting.pop(0).backward()
            after = manager.statistics()
            moved = after.bytes_offloaded - before.bytes_offloaded
            assert after.bytes_reloaded - before.bytes_reloaded <= 1.02 * moved
            return gradients(*inputs, *weights)

        check_steps(manager, step)
