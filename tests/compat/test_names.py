"""Names of the reference, as introduced and of Megatron-LM's main, with parameters and defaults."""

from __future__ import annotations

import re
import sys
from typing import Any

import megatron_main as main
import pytest
import torch
from helpers import reference
from helpers.docs import PAGES
from helpers.reference import is_ours, kind_of, parameters

import pp_offload
from pp_offload import CpuBackend, fine_grained_activation_offload, use_backend
from pp_offload.compat import megatron

MODULES = {pp_offload: reference, fine_grained_activation_offload: reference, megatron: main}
FUNCTIONS = [
    *((pp_offload, name, taken) for name, taken in reference.FUNCTIONS.items()),
    *((megatron, name, taken) for name, taken in main.FUNCTIONS.items()),
]
CLASSES = [
    *((pp_offload, name, methods) for name, methods in reference.CLASSES.items()),
    *((megatron, name, methods) for name, methods in main.CLASSES.items()),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_lists_its_names(module: Any) -> None:
    table = MODULES[module]
    names = {*table.FUNCTIONS, *table.CLASSES, "DEBUG", "DEBUG_RANK"}
    assert names <= set(module.__all__)
    assert (module.DEBUG, module.DEBUG_RANK) == (False, 0)
    if module is megatron:
        assert names == set(module.__all__)
    else:
        assert all(getattr(module, name) is getattr(pp_offload, name) for name in names)


@pytest.mark.parametrize(("module", "name", "expected"), FUNCTIONS)
def test_a_function_has_their_parameters(module: Any, name: str, expected: list[str]) -> None:
    assert parameters(getattr(module, name)) == expected


@pytest.mark.parametrize(("module", "name", "methods"), CLASSES)
def test_a_method_has_their_kind_and_parameters(
    module: Any, name: str, methods: dict[str, tuple[str, list[str]]]
) -> None:
    owner = getattr(module, name)
    for method, (kind, expected) in methods.items():
        assert is_ours(owner, method), f"{method} is torch's or Python's, or missing"
        assert kind_of(owner, method) == kind, method
        member = getattr(owner, method)
        taken = parameters(member.fget if kind == "property" else member)
        if module is megatron and f"{name}.{method}" in main.OURS_TAKES_MORE:
            bare = [text.partition("=")[0] for text in taken]
            assert bare[: len(expected)] == [text.partition("=")[0] for text in expected]
            assert all("=" in text for text in taken if text != "self")
        else:
            assert taken == expected, method


@pytest.mark.parametrize("module", [pp_offload, megatron], ids=lambda module: module.__name__)
def test_the_identity_functions_are_autograd_functions(module: Any) -> None:
    names = [name for name in MODULES[module].CLASSES if name.endswith("Function")]
    assert all(issubclass(getattr(module, name), torch.autograd.Function) for name in names)


def test_the_documentation_names_what_there_is() -> None:
    texts = re.findall(r"^- (.*(?:\n  .*)*)", PAGES["megatron"].split("## Names")[1], re.M)
    parts = [text.partition(": ") for text in texts]
    rows = [(name, what) for names, _, what in parts for name in re.findall("`(.+?)`", names)]
    listed = {f"{owner}.{name}" if owner else name for owner, name in main.names()}
    assert rows and main.OURS_TAKES_MORE <= listed
    assert ".. automodule:: pp_offload.compat.megatron\n   :members:" in PAGES["api"]
    for name, what in rows:
        assert (name in listed) is not what.startswith("not here"), name


def test_the_documented_line_puts_it_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Megatron is imported, which need not be installed for this."""
    (code,) = re.findall(r"```python\n(.*?sys\.modules.*?)```", PAGES["megatron"], re.DOTALL)
    code += (
        "from megatron.core.pipeline_parallel.fine_grained_activation_offload import (\n"
        "    FineGrainedActivationOffloadingInterface as off_interface,\n"
        ")\n"
        "import pp_offload.compat.megatron as ours\n"
        "assert off_interface is ours.FineGrainedActivationOffloadingInterface\n"
    )
    monkeypatch.setitem(sys.modules, megatron.THEIRS, None)
    exec(code, {})


def test_one_manager_has_two_faces() -> None:
    """Each makes chunks and groups with its own names."""
    with use_backend(CpuBackend()) as manager:
        face = megatron.PipelineOffloadManager.get_instance()
        assert face is megatron.PipelineOffloadManager.get_instance()
        assert pp_offload.PipelineOffloadManager.get_instance() is manager
        face.disable_offload()
        assert not manager.offloader.engine.is_enabled
        face.enable_offload()
        manager.configure(pp_offload.OffloadConfig(prefetch_bytes=4096))
        assert face.config is manager.config
        assert face.offloader is manager.offloader
        assert face.backend is manager.backend
        face.init_model_chunk_offload_handler(0, 1, 0, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is megatron.ChunkOffloadHandler
        assert type(chunk.on_group_start_forward("mlp")) is megatron.OffloadTensorGroup
        manager.init_model_chunk_offload_handler(None, None, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is pp_offload.ChunkOffloadHandler
        group = chunk.on_group_start_forward("mlp")
        assert chunk.find_group_with_name("mlp") is group
        assert manager.front_backward_chunk("mlp") is not None
    assert face.backend is pp_offload.PipelineOffloadManager.get_instance().backend, "of now"
