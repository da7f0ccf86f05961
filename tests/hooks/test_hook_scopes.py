"""Scopes belong to their thread, and take off what they put on, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import assert_no_hooks
from torch.autograd.graph import saved_tensors_hooks

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadError,
    PipelineOffloadManager,
)
from pp_offload._core.saved import Resident
from pp_offload._hooks.hook_scopes import HookScope
from pp_offload._hooks.regions import all_packs, top_pack

WIDTH = 6


@pytest.fixture(autouse=True)
def no_hook_is_left_to_others() -> Iterator[None]:
    yield
    num_packs = len(all_packs())
    for _ in range(num_packs):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert not num_packs


def test_a_scope_takes_off_what_is_above_it_and_no_hooks_of_others() -> None:
    outer, inner = HookScope(), HookScope()
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        top = top_pack()
        outer.enter(partial(Resident), outer)
        inner.enter(partial(Resident), inner)
        for scope in (outer, inner, outer):
            scope.leave()
            assert top_pack() is top
        outer.enter(partial(Resident), outer)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        outer.leave()
        assert top_pack() is top
    assert_no_hooks()


@on_two_backends
def test_a_with_that_ends_on_another_thread(manager: PipelineOffloadManager) -> None:
    """As that of a generator that is collected there. No hook of that thread is popped."""

    def in_a_generator() -> Iterator[None]:
        with off_interface(True, torch.ones(1), "g"):
            yield

    manager.init_model_chunk_offload_handler(None, None, 1)
    generator = in_a_generator()
    next(generator)

    def elsewhere() -> int:
        with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            generator.close()
            return len(all_packs())

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(elsewhere).result() == 1
    assert len(all_packs()) == 1
    torch._C._autograd._pop_saved_tensors_default_hooks()


@on_two_backends
def test_what_was_entered_is_left_once(
    manager: PipelineOffloadManager, activations: OffloadActivations
) -> None:
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, torch.ones(3), "twice"):
        pass
    scope = off_interface(True, torch.ones(3), "twice")
    with scope, pytest.raises(GroupStateError, match="'twice' is entered again.*one object"):
        scope.__enter__()
    with pytest.raises(GroupStateError, match="did not enter.*with statement"):
        manager.__exit__(None, None, None)
    with pytest.raises(OffloadError, match="did not enter.*with statement"):
        activations.__exit__(None, None, None)
    assert_no_hooks()
