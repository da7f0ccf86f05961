"""F35 and F36: a second reference keeps what was offloaded on the device; verify says who."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from torch import Tensor, nn
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, VerifyError, use_backend

on_backends = pytest.mark.parametrize("kind", BACKENDS)
CONFIG = OffloadConfig(min_offloaded_tensor_size=1, verify=True)


def chain(x: Tensor, weight: Tensor, kept: list[Tensor]) -> Tensor:
    """Saves two tensors in a group; the second is also put into ``kept``."""
    h = x * 1
    with off_interface(True, h, "core"):
        y = h @ weight
        kept.append(y)
        y = y.sin()
    return off_interface.group_commit(y, name="core")


def one_chain(manager: PipelineOffloadManager) -> tuple[Tensor, list[Tensor]]:
    """Its output, and what is kept of what it saved."""
    device = manager.backend.device
    kept: list[Tensor] = []
    weight = nn.Parameter(torch.randn(6, 6).to(device))
    manager.init_model_chunk_offload_handler(None, None, 1)
    return chain(torch.ones(4, 6).to(device).requires_grad_(), weight, kept), kept


@pytest.mark.field("F35")
@on_backends
def test_who_holds_what_was_offloaded(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="pp_offload"),
        use_backend(make_backend(kind), config=CONFIG) as manager,
    ):
        y, kept = one_chain(manager)
        (message,) = manager.verify()
        assert "group 'core'" in message
        assert "96 bytes" in message and "(4, 6)" in message
        assert "a list of 1" in message
        assert [r.getMessage() for r in caplog.records] == [message]
        assert manager.verify() == [], "said once"
        y.sum().backward()


@pytest.mark.field("F35")
@on_backends
def test_without_a_second_reference_every_byte_is_free(kind: str) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        y, kept = one_chain(manager)
        freed = weakref.ref(kept.pop().untyped_storage())
        assert manager.verify() == []
        assert freed() is None
        assert manager.statistics().bytes_offloaded == 2 * 96
        y.sum().backward()


@pytest.mark.field("F35")
@on_backends
def test_a_variable_is_named_with_its_function(kind: str) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        manager.init_model_chunk_offload_handler(None, None, 1)
        device = manager.backend.device
        x = torch.ones(4, 6).to(device).requires_grad_()
        held = x * 1
        with off_interface(True, held, "core"):
            y = held.sin()
        y = off_interface.group_commit(y, name="core")
        (message,) = manager.verify()
        assert "the variable 'held' of test_a_variable" in message
        assert "test_second_references.py" in message
        y.sum().backward()


@pytest.mark.field("F36")
@on_backends
def test_a_leaf_stays_and_is_reported(kind: str) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        device = manager.backend.device
        manager.init_model_chunk_offload_handler(None, None, 1)

        def of_a_leaf() -> Tensor:
            leaf = torch.ones(4, 6).to(device).requires_grad_()
            with off_interface(True, leaf, "core"):
                y = leaf.sin()
            return off_interface.group_commit(y, name="core")

        y = of_a_leaf()
        (message,) = manager.verify()
        assert "group 'core'" in message and "leaf" in message
        y.sum().backward()


@pytest.mark.field("F36")
@on_backends
def test_inputs_of_groups_are_gone_after_backward(kind: str) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        device = manager.backend.device
        weight = nn.Parameter(torch.randn(6, 6).to(device))
        manager.init_model_chunk_offload_handler(None, None, 1)
        x = torch.ones(4, 6).to(device).requires_grad_()
        inputs: list[weakref.ref[torch.UntypedStorage]] = []

        def layer(h: Tensor) -> Tensor:
            inputs.append(weakref.ref(h.untyped_storage()))
            return chain(h, weight, [])

        y = layer(layer(x * 1) * 1)
        y.sum().backward()
        del y
        manager.backend.synchronize()
        manager.statistics()
        assert [ref() for ref in inputs] == [None, None]


@pytest.mark.parametrize("tiers", [("host",), ("disk",)])
@on_backends
def test_verify_changes_no_bit(kind: str, tiers: tuple[str, ...], tmp_path: Path) -> None:
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        verify=True,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
    )
    with use_backend(make_backend(kind), config=config) as manager:
        device = str(manager.backend.device)
        on, off = make_model(device=device), make_model(groups=(), device=device)
        for step in range(3):
            inputs = [x.to(device) for x in batches(4, step=step)]
            expected = run_step(off, inputs, in_flight=2, offload=False)
            assert same_bits(run_step(on, inputs, in_flight=2), expected)
        assert manager.statistics().bytes_offloaded > 0
        assert_idle(manager)


@on_backends
def test_verify_catches_bytes_that_changed_on_the_host(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CONFIG, max_in_flight_bytes=0)  # or a source is used itself
    with use_backend(make_backend(kind), config=config) as manager:
        on_host: list[Tensor] = []
        copy = manager.backend.copy

        def noted(stream: Any, targets: list[Tensor], sources: list[Tensor], label: str) -> None:
            on_host.extend(targets)
            copy(stream, targets, sources, label)

        with monkeypatch.context() as patch:
            patch.setattr(manager.backend, "copy", noted)
            y, _ = one_chain(manager)
        manager.backend.synchronize()
        for tensor in on_host:
            tensor.view(torch.uint8).bitwise_xor_(1)
        with pytest.raises(VerifyError, match="group 'core'"):
            y.sum().backward()


def test_what_found_no_room_is_not_said_to_have_left(caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=0, verify=True)
    with use_backend(make_backend("late"), config=config) as manager:
        y, _ = one_chain(manager)
        assert manager.verify() == []
        y.sum().backward()
        assert manager.statistics().bytes_offloaded == 0
    assert "find no room" in caplog.text and "still on the device" not in caplog.text


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_what_the_log_keeps_of_a_group_without_room_holds_no_tensor(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a handler does that sends records later, or shows them."""
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=0)
    with use_backend(make_backend(kind), config=config) as manager:
        y, kept = one_chain(manager)
        storage = weakref.ref(kept.pop().untyped_storage())
        y.sum().backward()
        del y
    assert "find no room" in caplog.records[0].getMessage()
    assert storage() is None


def test_without_verify_nothing_is_watched() -> None:
    with use_backend(make_backend("cpu")) as manager:
        y, kept = one_chain(manager)
        assert manager.verify() == [] and kept
        y.sum().backward()
