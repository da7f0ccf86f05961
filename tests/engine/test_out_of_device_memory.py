"""Without device memory for what comes ahead, each tensor comes when backward asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sessions import assert_idle, assert_same, begin_step, drawn, group, session, settle
from torch import Tensor

KINDS = ("late", "threads")


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


def chain(is_on: bool) -> tuple[Tensor, Tensor]:
    x = drawn(8, 8).requires_grad_()
    y = x
    for name in ("first", "second", "third"):
        y = group(y, lambda h: torch.tanh(h.sin()).cos(), is_on, name)
    return x, y.sum()


@pytest.mark.parametrize("tiers", [("host",), ("disk",)], ids=str)
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_ahead_comes_on_demand(
    kind: str, num: int, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    plain, y = chain(False)
    y.backward()
    options: dict[str, Any] = {"disk_dir": tmp_path} if "disk" in tiers else {}
    with session(kind, max_in_flight_bytes=0, tiers=tiers, **options) as manager:
        for _ in range(2):
            begin_step()
            x, y = chain(True)
            settle(manager)
            with room_for(num):
                y.backward()
            assert plain.grad is not None and x.grad is not None
            assert_same([x.grad], [plain.grad])
        assert manager.statistics().bytes_reloaded == manager.statistics().bytes_offloaded
        del y
        assert_idle(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_the_error_of_torch_comes_and_backward_can_go_on(kind: str) -> None:
    plain, y = chain(False)
    y.backward()
    with session(kind, max_in_flight_bytes=0) as manager:
        begin_step()
        x, y = chain(True)
        settle(manager)
        with room_for(0), pytest.raises(torch.OutOfMemoryError, match="the device is full"):
            y.backward(retain_graph=True)
        y.backward()
        assert plain.grad is not None and x.grad is not None
        assert_same([x.grad], [plain.grad])
        del y
        begin_step()
        assert_idle(manager)
