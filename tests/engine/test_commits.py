"""What a commit takes, whatever came before it and whatever goes on beside it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_backend
from processes import HANG_S
from torch import Tensor
from toy import batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    PipelineOffloadManager,
    use_backend,
)
from pp_offload._core.group import Group
from pp_offload._core.saved import Saved
from pp_offload.backends import Backend


def leaf_on(backend: Backend) -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).to(backend.device).requires_grad_()


def test_a_group_that_backward_used_before_its_commit_stays(
    manager: PipelineOffloadManager,
) -> None:
    x = leaf_on(manager.backend)
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, x * 2, "core") as h:
        y = h.sin()
        (inside,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y = off_interface.group_commit(y, name="core")
    assert manager.statistics().bytes_offloaded == 0
    (behind,) = torch.autograd.grad(y.sum(), x)
    assert same_bits([inside], [behind])


def test_what_is_saved_behind_a_backward_in_the_forward_leaves(
    activations: OffloadActivations, backend: Backend
) -> None:
    """What that backward used stays, and holds nothing else back."""
    x = leaf_on(backend)
    with activations:
        y = (x * 2).sin()
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert activations.statistics().bytes_offloaded == 0
        z = y.exp()
    activations.stash.send()
    assert activations.statistics().bytes_offloaded == z.nbytes
    z.sum().backward()


def test_what_is_named_for_release_stays_with_its_group(backend: Backend) -> None:
    """Nothing is emptied in a step that has no room, as nothing is in one without offload."""
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=1)
    with use_backend(backend, config=config) as manager:
        manager.init_model_chunk_offload_handler(None, None, 1)
        unsaved = torch.ones(3, 4).to(backend.device)
        with off_interface(True, leaf_on(backend) * 2, "core") as h:
            y = h.sin()
        off_interface.group_commit(y, name="core", forced_released_tensors=[unsaved])
        backend.synchronize()
        assert manager.statistics().bytes_offloaded == 0
        nbytes = unsaved.untyped_storage().nbytes()  # a message would read what was emptied
        assert nbytes == 48


@pytest.mark.parametrize(
    ("kind", "tiers", "advice"),
    [
        ("late", ("host",), 'tiers=("host", "disk")'),
        ("cpu", ("host",), 'tiers=("host", "disk")'),
        ("late", ("host", "disk"), "passes through host memory"),
        ("late", ("disk",), "passes through host memory"),
    ],
)
def test_over_budget_the_advice_is_nothing_that_is_set(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    tiers: tuple[str, ...],
    advice: str,
) -> None:
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
        host_budget_bytes=0,
    )
    with use_backend(make_backend(kind), config=config), caplog.at_level(logging.WARNING):
        run_step(make_model(), batches(2))
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [text for text in messages if "over the budget" in text]
    assert "raise host_budget_bytes" in message
    assert advice in message
    assert ("tiers=" in message) == (tiers == ("host",))


@pytest.mark.parametrize("is_before", [True, False])
def test_a_commit_of_another_thread_amid_an_unpack(is_before: bool) -> None:
    """It takes the tensor, or gives its batch in its place; who looks sees one of them."""
    commit: list[Callable[[], None]] = []

    class Amid(Saved):
        def __getattribute__(self, name: str) -> Any:
            if name != "tensor" or not commit:
                return super().__getattribute__(name)
            act = commit.pop()
            tensor = None if is_before else super().__getattribute__(name)
            act()
            return super().__getattribute__(name) if is_before else tensor

    with use_backend(make_backend("eager")) as manager:
        engine = manager.offloader.engine
        group = Group("core", engine=engine)
        group.is_used = True  # or the unpack would say so first
        group.streams.append(manager.backend.current_stream())
        saved = Amid(torch.ones(4), group)
        group.saved_refs.append(weakref.ref(saved))
        commit.append(lambda: engine.send(group, engine.payloads(group)))
        assert saved.unpack().eq(1).all()
        assert not commit


def test_a_forward_that_begins_amid_a_reset_is_not_forgotten(
    manager: PipelineOffloadManager,
) -> None:
    """Another thread begins while the delayed groups are committed."""
    may_end, has_begun = threading.Event(), threading.Event()
    device = manager.backend.device

    def forward() -> None:
        manager.init_model_chunk_offload_handler(None, None, 1)
        with off_interface(True, torch.ones(3, device=device), "core"):
            has_begun.set()
            assert may_end.wait(HANG_S)

    def begin(_: object) -> None:
        thread.start()
        assert has_begun.wait(HANG_S)

    thread = threading.Thread(target=forward, daemon=True)
    manager.push_offload_groups(begin, None)
    try:
        with pytest.raises(GroupStateError, match="waits for its backward"):
            manager.reset()
        assert manager.step.num_chunks == 1
    finally:
        may_end.set()
        thread.join(HANG_S)


def test_a_forward_of_a_thread_that_ended_holds_up_no_reset(
    manager: PipelineOffloadManager,
) -> None:
    """Its graph is good all the same."""
    x = leaf_on(manager.backend)
    outputs: list[Tensor] = []

    def forward() -> None:
        manager.init_model_chunk_offload_handler(None, None, 1)
        with off_interface(True, x * 2, "core") as h:
            y = h.sin()
        outputs.append(off_interface.group_commit(y, name="core"))

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    manager.reset()
    outputs.pop().sum().backward()
    assert same_bits([x.grad], [2 * (x.detach() * 2).cos()])
