"""Imports go one way, and a few things happen in one place only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pp_offload

ROOT = Path(pp_offload.__file__).parent

LAYERS = [
    {"errors"},
    {"checks"},
    {"processes"},
    {"workers"},
    {"config", "backends.base", "backends.happens_before"},
    {"backends.simulated_copies"},
    {"backends.simulated_streams"},
    {"backends.simulated_watch"},
    {"backends.accelerator", "backends.cpu", "backends.graph_safe", "backends.simulated"},
    {"backends"},
    {"wrappers"},
    {
        "tensors",
        "homes",
        "policy",
        "slices",
        "microbatches",
        "tiers",
        "tiers.arena",
        "tiers.budget",
        "tiers.checksum",
        "tiers.loans",
        "tiers.unfinished",
    },
    {"tiers.slabs", "tiers.pool", "tiers.disk"},
    {"tiers.buffers"},
    {"tiers.bins"},
    {"tiers.host", "tiers.numa", "tiers.room"},
    {"ticket"},
    {"flights", "landings"},
    {"transfer"},
    {"disk_transfer", "plain_copies", "verify"},
    {"disk_direct", "disk_staged"},
    {"chain"},
    {"saved"},
    {"payload", "copies", "checkpoint_regions"},
    {"hook_scopes"},
    {"group"},
    {"prefetch", "release", "split"},
    {"chunk_queue"},
    {"services"},
    {"chunk"},
    {"activity"},
    {"step", "statistics"},
    {"manager"},
    {"forked"},
    {"functions", "cuda_graph", "stash", "left_out"},
    {"buffers", "random_state"},
    {"selective"},
    {"recompute", "checkpoint_options"},
    {"slice_cache", "slice_nodes"},
    {"slice_saved"},
    {"slice_layers"},
    {"activations", "checkpointing", "params"},
    {"heads"},
    {"trainer"},
    {"interface"},
    {"modules", "report", "session"},
    {"pipelining", "testing", "testing.field", "testing.fuzz"},
    {"testing.__main__"},
    {"fine_grained_activation_offload"},
    {""},
]
"""Lowest first. A module imports from lower layers, or from its own without a cycle."""

RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

FACADES = {"fine_grained_activation_offload", ""}
"""They give names to the user and hold no logic, so importing anything is their work."""

ASKS_FOR_THE_MANAGER = {
    "interface",
    "cuda_graph",
    "pipelining",
    "modules",
    "report",
    "session",
    "compat",
}

NAMES_CUDA = {"cuda_graph"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(name: str) -> Iterator[str]:
    """Modules of ours that ``name`` imports anywhere, also inside functions."""
    for node in ast.walk(TREES[name]):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            base = node.module or ""
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            found = [m for m in submodules if m.removeprefix("pp_offload.") in FILES] or [base]
        for module in found:
            if module.split(".")[0] == "pp_offload":
                yield module.removeprefix("pp_offload").removeprefix(".")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def calls(tree: ast.AST) -> Iterator[str]:
    return (dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def uses_of_cuda(tree: ast.AST) -> set[str]:
    """The longest dotted names below ``torch.cuda``, outside annotations too."""
    names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    below = {name for name in names if name.startswith("torch.cuda.")}
    aliases = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if "torch.cuda" in (alias.name, f"{getattr(node, 'module', None)}.{alias.name}")
        or (getattr(node, "module", None) or "").startswith("torch.cuda")
        or alias.name.startswith("torch.cuda")
    }
    return below | aliases


@pytest.mark.parametrize("name", FILES)
def test_every_module_has_a_layer(name: str) -> None:
    assert name in RANK, f"{FILES[name]} is in no layer; add it where it belongs"


def test_every_layer_names_modules_that_exist() -> None:
    assert set(RANK) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_module_imports_from_below(name: str) -> None:
    above = [other for other in imported(name) if RANK[other] > RANK[name]]
    assert not above, f"{name} imports {above}, which stand above it"


def test_no_module_is_in_a_cycle() -> None:
    graph = {name: set(imported(name)) - {name} for name in FILES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(set(FILES) - FACADES))
def test_nobody_imports_who_only_listens(name: str) -> None:
    assert not {"report", "trace"} & set(imported(name))


@pytest.mark.parametrize("name", FILES)
def test_only_the_surface_asks_for_the_current_manager(name: str) -> None:
    asks = any(call.split(".")[-1] == "get_instance" for call in calls(TREES[name]))
    assert not asks or name in ASKS_FOR_THE_MANAGER


@pytest.mark.parametrize("name", FILES)
def test_cuda_is_named_in_one_place(name: str) -> None:
    assert name in NAMES_CUDA or not uses_of_cuda(TREES[name])


@pytest.mark.parametrize("name", FILES)
def test_only_the_function_whose_name_says_so_prints(name: str) -> None:
    tree = TREES[name]
    may_print = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "print_offload_summary_table"
    ]
    allowed = sum(list(calls(node)).count("print") for node in may_print)
    assert list(calls(tree)).count("print") == allowed


@pytest.mark.parametrize("name", FILES)
def test_events_are_recorded_and_waited_for_in_few_places(name: str) -> None:
    if name.startswith("backends") or name in ("transfer", "flights", "landings", "cuda_graph"):
        return
    last = {call.split(".")[-1] for call in calls(TREES[name])}
    assert not last & {"record_event", "wait_event", "wait_stream", "record_stream"}


def test_the_package_imports_no_compiler() -> None:
    """It would take seconds."""
    code = "import sys, pp_offload; sys.exit('torch._dynamo' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_without_a_docstring(name: str) -> None:
    assert ast.get_docstring(TREES[name])
