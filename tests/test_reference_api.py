"""Every name of the reference is here, with its parameters, their order and their defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.reference import CLASSES, FUNCTIONS, is_ours, kind_of, parameters

import pp_offload
from pp_offload import fine_grained_activation_offload

MODULES = [pp_offload, fine_grained_activation_offload]

DATA = {"DEBUG": False, "DEBUG_RANK": 0}


AUTOGRAD_FUNCTIONS = [name for name in CLASSES if name.endswith("Function")]
METHODS = [(cls, name) for cls, methods in CLASSES.items() for name in methods]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", [*DATA, *FUNCTIONS, *CLASSES])
def test_a_name_is_importable_from_the_package_and_the_module(module: Any, name: str) -> None:
    assert hasattr(module, name)
    assert name in module.__all__
    assert getattr(module, name) is getattr(pp_offload, name)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_what_a_module_lists_is_there(module: Any) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_data_have_the_values_of_the_reference() -> None:
    assert {name: getattr(pp_offload, name) for name in DATA} == DATA
    assert pp_offload.PipelineOffloadManager.OFFLOAD_MGR is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_parameters_of_the_reference(name: str) -> None:
    assert parameters(getattr(pp_offload, name)) == FUNCTIONS[name]


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_a_method_has_the_kind_and_parameters_of_the_reference(owner: str, name: str) -> None:
    cls = getattr(pp_offload, owner)
    kind, expected = CLASSES[owner][name]
    assert is_ours(cls, name), f"{owner}.{name} is torch's or Python's, or missing"
    assert kind_of(cls, name) == kind
    member = inspect.getattr_static(cls, name).fget if kind == "property" else getattr(cls, name)
    assert parameters(member) == expected


@pytest.mark.parametrize("name", AUTOGRAD_FUNCTIONS)
def test_the_identity_functions_are_autograd_functions(name: str) -> None:
    assert issubclass(getattr(pp_offload, name), torch.autograd.Function)


def test_our_own_parameters_are_keyword_only_with_defaults() -> None:
    with pytest.raises(TypeError):
        pp_offload.PipelineOffloadManager(None)  # type: ignore[misc]
    with pytest.raises(TypeError):
        pp_offload.OffloadTensorGroup("name", None)  # type: ignore[misc]


def test_a_manager_makes_chunks_and_groups_of_the_reference() -> None:
    with pp_offload.use_backend(pp_offload.CpuBackend()) as manager:
        assert type(manager) is pp_offload.PipelineOffloadManager
        manager.init_model_chunk_offload_handler(None, None, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is pp_offload.ChunkOffloadHandler
        x = pp_offload.fine_grained_offloading_group_start(torch.ones(2), "mlp")
        pp_offload.fine_grained_offloading_group_commit(x, "mlp")
        assert type(chunk.find_group_with_name("mlp")) is pp_offload.OffloadTensorGroup
        assert manager.front_backward_chunk("mlp") is chunk
