"""Every name of Megatron-LM's main is in pp_offload.compat.megatron, with its parameters."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import megatron_main as main
import pytest
from helpers.docs import PAGES
from helpers.reference import is_ours, kind_of, parameters

import pp_offload
from pp_offload import CpuBackend, use_backend
from pp_offload.compat import megatron

METHODS = [(owner, name) for owner, name in main.names() if owner]


def without_defaults(taken: list[str]) -> list[str]:
    return [text.partition("=")[0] for text in taken]


def test_nothing_else_is_listed() -> None:
    listed = {*main.FUNCTIONS, *main.CLASSES, "DEBUG", "DEBUG_RANK"}
    assert set(megatron.__all__) == listed
    assert (megatron.DEBUG, megatron.DEBUG_RANK) == (False, 0)


@pytest.mark.parametrize("name", main.FUNCTIONS)
def test_a_function_has_their_parameters(name: str) -> None:
    assert parameters(getattr(megatron, name)) == main.FUNCTIONS[name]


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_a_method_has_their_kind_and_parameters(owner: str, name: str) -> None:
    cls = getattr(megatron, owner)
    kind, expected = main.CLASSES[owner][name]
    assert is_ours(cls, name)
    assert kind_of(cls, name) == kind
    member = inspect.getattr_static(cls, name).fget if kind == "property" else getattr(cls, name)
    taken = parameters(member)
    if f"{owner}.{name}" in main.OURS_TAKES_MORE:
        assert without_defaults(taken)[: len(expected)] == without_defaults(expected)
        assert all("=" in name for name in taken if name != "self")
    else:
        assert taken == expected


def test_the_documentation_names_what_there_is() -> None:
    texts = re.findall(r"^- (.*(?:\n  .*)*)", PAGES["megatron"].split("## Names")[1], re.M)
    parts = [text.partition(": ") for text in texts]
    rows = [(name, what) for names, _, what in parts for name in re.findall("`(.+?)`", names)]
    listed = {f"{owner}.{name}" if owner else name for owner, name in main.names()}
    assert rows and main.OURS_TAKES_MORE <= listed
    assert ".. automodule:: pp_offload.compat.megatron\n   :members:" in PAGES["api"]
    for name, what in rows:
        assert (name in listed) is not what.startswith("not here"), name


def test_the_documented_line_puts_it_in_their_place(tmp_path: Path) -> None:
    """Before Megatron is imported, which need not be installed for this."""
    (code,) = re.findall(r"```python\n(.*?sys\.modules.*?)```", PAGES["megatron"], re.DOTALL)
    code += (
        "from megatron.core.pipeline_parallel.fine_grained_activation_offload import (\n"
        "    FineGrainedActivationOffloadingInterface as off_interface,\n"
        ")\n"
        "import pp_offload.compat.megatron as ours\n"
        "assert off_interface is ours.FineGrainedActivationOffloadingInterface\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(pp_offload.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr


def test_one_manager_has_two_faces() -> None:
    with use_backend(CpuBackend()) as manager:
        face = megatron.PipelineOffloadManager.get_instance()
        assert face is megatron.PipelineOffloadManager.get_instance()
        assert pp_offload.PipelineOffloadManager.get_instance() is manager
        face.disable_offload()
        assert not manager.offloader.engine.is_enabled
        manager.configure(pp_offload.OffloadConfig(prefetch_bytes=4096))
        assert face.config is manager.config
        assert face.offloader is manager.offloader
        assert face.backend is manager.backend
    assert face.backend is pp_offload.PipelineOffloadManager.get_instance().backend, "of now"


def test_a_manager_makes_chunks_and_groups_with_their_names() -> None:
    with use_backend(CpuBackend()) as manager:
        megatron.PipelineOffloadManager.get_instance().init_model_chunk_offload_handler(0, 1, 0, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is megatron.ChunkOffloadHandler
        assert type(chunk.on_group_start_forward("mlp")) is megatron.OffloadTensorGroup
        manager.init_model_chunk_offload_handler(None, None, 1)
        assert type(manager.cur_forward_chunk()) is pp_offload.ChunkOffloadHandler
