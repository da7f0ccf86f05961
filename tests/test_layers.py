"""Imports go one way, and a few things happen in one place only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest
from helpers.sources import FILES, RANK, TREES, dotted

MOST_LINES = {
    "_activations": 250,
    "_checkpoint": 950,
    "_common": 1050,
    "_core": 4150,
    "_groups": 3000,
    "_hooks": 400,
    "_megatron": 1150,
    "_memory": 1300,
    "_slices": 1350,
    "backends": 700,
    "cli": 1050,
    "compat": 100,
    "integrations": 1000,
    "plan": 2500,
    "simulate": 2150,
    "testing": 750,
    "trace": 1150,
}
"""Ceilings, in steps of 50 lines. A change that needs a higher one says why."""

FACADES = {"fine_grained_activation_offload", "compat.megatron", ""}
"""They give names to the user and hold no logic, so importing anything is their work."""

ASKS_FOR_THE_MANAGER = {
    "_megatron.interface",
    "_megatron.manager",
    "_megatron.main",
    "pipelining",
    "modules",
    "summary",
    "trace.recorder",
}

ORDERS_COPIES = {
    *("backends", "testing", "simulate", "plan"),
    "_core.in_flight",
    "_core.mover",
    "_core.observers",
    "_megatron.chunk",
    "_slices.plain_copies",
}
"""And the folders of backends: of devices, the simulated, the virtual, and that of numbers."""

ONE_JOB = [
    ("_core.engine", "Engine"),
    ("_core.mover", "Mover"),
    ("_groups.manager", "Manager"),
    ("_groups.chunk", "Chunk"),
    ("_core.group", "Group"),
    ("_groups.offloader", "Offloader"),
]

NAMES_CUDA = {"_megatron.main"}


def imported(name: str) -> Iterator[str]:
    """Modules of ours that ``name`` imports anywhere, also inside functions."""
    for node in ast.walk(TREES[name]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            base = node.module or ""
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            names = [m for m in submodules if m.removeprefix("pp_offload.") in FILES] or [base]
        for module in names:
            if module.split(".")[0] == "pp_offload":
                yield module.removeprefix("pp_offload").removeprefix(".")


def calls(tree: ast.AST) -> Iterator[str]:
    return (dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def names_of(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are read or imported, outside annotations too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (module + alias.name for alias in node.names)


def room(name: str) -> str:
    """The folder of a module, or the module beside the folders."""
    return name.partition(".")[0]


def test_every_row_names_what_exists() -> None:
    assert set(RANK) == {room(name) for name in FILES}


@pytest.mark.parametrize(("folder", "most"), MOST_LINES.items())
def test_a_folder_is_within_its_budget_of_lines(folder: str, most: int) -> None:
    files = [path for name, path in FILES.items() if room(name) == folder]
    assert sum(len(path.read_text().splitlines()) for path in files) <= most


def test_the_package_is_within_its_budget_of_files() -> None:
    assert len(FILES) <= 130


def test_a_folder_imports_from_below() -> None:
    """And from itself."""
    for name in set(FILES):
        for other in set(imported(name)):
            is_below = RANK[room(other)] < RANK[room(name)]
            assert is_below or room(other) == room(name), f"{name} imports {other}"


def test_no_module_is_in_a_cycle() -> None:
    graph = {name: set(imported(name)) - {name} for name in FILES}
    TopologicalSorter(graph).prepare()


def test_nobody_imports_who_only_listens() -> None:
    """But the command line, which nobody imports at all."""
    for name in set(FILES) - FACADES:
        rooms = {room(other) for other in imported(name)} - {room(name)}
        listens = {"summary", "trace"} if room(name) != "cli" else set()
        assert not rooms & (listens | {"cli"}), name


COPIES = {"record_event", "wait_event", "wait_stream", "record_stream"}


@pytest.mark.parametrize(
    ("names", "allowed"),
    [({"get_instance"}, ASKS_FOR_THE_MANAGER), (COPIES, ORDERS_COPIES)],
    ids=["only the surface asks for the current manager", "few order copies"],
)
def test_some_functions_are_called_in_few_places(names: set[str], allowed: set[str]) -> None:
    for name, tree in TREES.items():
        last = {call.split(".")[-1] for call in calls(tree)}
        assert not last & names or {name, room(name)} & allowed, name


def test_cuda_is_named_in_one_place() -> None:
    for name, tree in TREES.items():
        uses = [used for used in names_of(tree) if f"{used}.".startswith("torch.cuda.")]
        assert name in NAMES_CUDA or not uses, f"{name}: {uses}"


def test_only_the_function_whose_name_says_so_prints() -> None:
    for name, tree in TREES.items():
        may_print = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "print_offload_summary_table"
        ]
        allowed = sum(list(calls(node)).count("print") for node in may_print)
        assert list(calls(tree)).count("print") == allowed, name


def public_methods(node: ast.ClassDef) -> set[str]:
    """Properties among them."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return {name for name in names if not name.startswith("_")}


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields, and what any method assigns to ``self``."""
    fields = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
    stored = (item for item in ast.walk(node) if isinstance(item, ast.Attribute))
    names = (dotted(item).split(".") for item in stored if isinstance(item.ctx, ast.Store))
    return fields | {parts[1] for parts in names if parts[0] == "self" and len(parts) == 2}


def test_a_class_of_the_core_has_one_job() -> None:
    """What only users of the reference call is in a subclass, above."""
    for module, name in ONE_JOB:
        classes = (node for node in TREES[module].body if isinstance(node, ast.ClassDef))
        node = next(node for node in classes if node.name == name)
        assert len(attributes(node)) <= 12, f"{name}: {sorted(attributes(node))}"
        assert len(public_methods(node)) <= 15, f"{name}: {sorted(public_methods(node))}"


def test_no_file_is_without_a_docstring() -> None:
    assert not [name for name, tree in TREES.items() if not ast.get_docstring(tree)]
