"""Without device memory for what comes ahead, each tensor comes when backward asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sessions import check, drawn, gradients, group, settle
from torch import Tensor

from pp_offload import PipelineOffloadManager


@contextmanager
def room_for(num: int) -> Iterator[None]:
    """So many tensors more fit on the device, until others go: reloads are made by empty_like."""
    allocate, made = torch.empty_like, []

    def empty_like(*args: Any, **kwargs: Any) -> Tensor:
        if sum(ref() is not None for ref in made) >= num:
            raise torch.OutOfMemoryError("the device is full")
        tensor = allocate(*args, **kwargs)
        made.append(weakref.ref(tensor))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
        yield


@pytest.mark.parametrize("tiers", [("host",), ("disk",)], ids=str)
@pytest.mark.parametrize("num", [0, 1, 4])
@pytest.mark.parametrize("kind", ["late", "threads"])
def test_what_does_not_fit_ahead_comes_on_demand(
    kind: str, num: int, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    """Without room for any, the error of torch comes, and backward can go on."""

    def program(is_on: bool) -> list[Tensor]:
        x = h = drawn(8, 8).requires_grad_()
        for _ in range(4):
            h = group(h, lambda h: torch.tanh(h.sin()).cos(), is_on)
        y = h.sum()
        if is_on:
            manager = PipelineOffloadManager.get_instance()
            settle(manager)
            is_full = pytest.raises(torch.OutOfMemoryError, match="the device is full")
            with room_for(num), nullcontext() if num else is_full:
                y.backward(retain_graph=num == 0)
        if not is_on or num == 0:
            y.backward()
        else:
            statistics = manager.statistics()
            assert statistics.bytes_reloaded == statistics.bytes_offloaded
        return gradients(x)

    options: dict[str, Any] = {"disk_dir": tmp_path} if "disk" in tiers else {}
    check(program, kind, max_in_flight_bytes=0, tiers=tiers, **options)
