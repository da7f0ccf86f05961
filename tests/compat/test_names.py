"""Names of the reference, as introduced and of Megatron-LM's main, with parameters and defaults."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from helpers.docs import PAGES
from signatures import MAIN, OURS_TAKES_MORE, REFERENCE, Table, signature

import pp_offload
from pp_offload import CpuBackend, fine_grained_activation_offload, use_backend
from pp_offload.compat import megatron

MODULES = {pp_offload: REFERENCE, fine_grained_activation_offload: REFERENCE, megatron: MAIN}
FORMS = [(pp_offload, REFERENCE), (megatron, MAIN)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_lists_its_names(module: Any) -> None:
    table = MODULES[module]
    names = {*table[""], *table, "DEBUG", "DEBUG_RANK"} - {""}
    assert names <= set(module.__all__)
    assert (module.DEBUG, module.DEBUG_RANK) == (False, 0)
    if module is megatron:
        assert names == set(module.__all__)
    else:
        assert all(getattr(module, name) is getattr(pp_offload, name) for name in names)
    functions = [name for name in table if name.endswith("Function")]
    assert all(issubclass(getattr(module, name), torch.autograd.Function) for name in functions)


def is_ours(owner: Any, name: str) -> bool:
    """Whether one of our classes defines it: torch's and Python's have such names, too."""
    classes = getattr(owner, "__mro__", [owner])
    ours = [cls for cls in classes if cls.__dict__.get("__module__", "").startswith("pp_offload")]
    return owner in (pp_offload, megatron) or any(name in vars(cls) for cls in ours)


@pytest.mark.parametrize(
    ("module", "table", "owner"),
    [(module, table, owner) for module, table in FORMS for owner in table],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kind_and_parameters_are_theirs(module: Any, table: Table, owner: str) -> None:
    place = getattr(module, owner) if owner else module
    for name, expected in table[owner].items():
        assert is_ours(place, name), f"{name} is torch's or Python's, or missing"
        got = signature(place, name)
        if module is megatron and f"{owner}.{name}" in OURS_TAKES_MORE:
            ours, theirs = got[1].split(", "), expected[1].split(", ")
            bare = [[text.partition("=")[0] for text in texts] for texts in (ours, theirs)]
            assert got[0] == expected[0] and all("=" in text for text in ours)
            assert bare[0][: len(bare[1])] == bare[1] or not expected[1]
        else:
            assert got == expected, name


def test_the_documentation_names_what_there_is() -> None:
    texts = re.findall(r"^- (.*(?:\n  .*)*)", PAGES["megatron"].split("## Names")[1], re.M)
    parts = [text.partition(": ") for text in texts]
    rows = [(name, what) for names, _, what in parts for name in re.findall("`(.+?)`", names)]
    listed = {f"{owner}.{name}".strip(".") for owner in MAIN for name in MAIN[owner]} | {*MAIN}
    assert rows and OURS_TAKES_MORE <= listed
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
        for name in ("config", "offloader", "backend"):
            assert getattr(face, name) is getattr(manager, name)
        face.init_model_chunk_offload_handler(0, 1, 0, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is megatron.ChunkOffloadHandler
        assert type(chunk.on_group_start_forward("mlp")) is megatron.OffloadTensorGroup
        manager.init_model_chunk_offload_handler(None, None, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is pp_offload.ChunkOffloadHandler
    assert face.backend is pp_offload.PipelineOffloadManager.get_instance().backend, "of now"
