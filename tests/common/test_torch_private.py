"""Private names of torch: each is there on the torch installed, and each stands in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layers import ROOT, TREES, dotted
from torch import nn

from pp_offload._common import torch_private

pytestmark = pytest.mark.smoke

HERE = "_common.torch_private"

OF_OTHERS = {"_can_checkpoint_with_cache", "_current_frames", "_getframe", "_replace"}
"""Of transformers, ``sys`` and named tuples."""

OURS = re.compile(r"pp_offload(\.|$)")


EXAMPLES: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.ones(1),
    "UntypedStorage": lambda: torch.ones(1).untyped_storage(),
    "Node": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "ExpandBackward0": lambda: torch.ones(1, requires_grad=True).expand(2).grad_fn,
    "ExpBackward0": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "OpOverload": lambda: torch.ops.aten.mm.default,
    "Library": lambda: torch.library.Library("aten", "IMPL"),
    "Module": lambda: nn.Linear(1, 1),
    "CheckpointWrapper": lambda: torch_private.CheckpointWrapper(nn.Linear(1, 1)),
    "RNNBase": lambda: nn.LSTM(1, 1),
}
"""An object of each class that can be made in one process."""

SOURCES = {
    "PipelineScheduleSingle": "distributed/pipelining/schedules.py",
    "PipelineScheduleMulti": "distributed/pipelining/schedules.py",
    "_PipelineScheduleRuntime": "distributed/pipelining/schedules.py",
    "PipelineStage": "distributed/pipelining/stage.py",
    "FullyShardedDataParallel": "distributed/fsdp/fully_sharded_data_parallel.py",
    "OptimizedModule": "_dynamo/eval_frame.py",
}
"""The file of torch that has each other class: an object would take a process group or a compiler,
so its attributes are looked for in the source.
"""


@pytest.mark.parametrize("path", torch_private.FUNCTIONS)
def test_a_name_is_there(path: str) -> None:
    if path not in torch_private.ONLY_IN:
        torch_private.look_up(path)


@pytest.mark.parametrize("kind", torch_private.ATTRIBUTES)
def test_attributes_are_there(kind: str) -> None:
    names = {
        name
        for name in torch_private.ATTRIBUTES[kind]
        if f"{kind}.{name}" not in torch_private.ONLY_IN
    }
    if kind in EXAMPLES:
        example = EXAMPLES[kind]()
        missing = {name for name in names if not hasattr(example, name)}
    else:
        source = (Path(torch.__file__).parent / SOURCES[kind]).read_text()
        assert f"class {kind}(" in source
        missing = {name for name in names if not re.search(rf"\b{name}\b", source)}
    assert not missing, f"{kind} of torch {torch.__version__}"


@pytest.mark.parametrize("path", torch_private.OPERATORS)
def test_an_operator_is_there(path: str) -> None:
    torch_private.look_up(f"torch.ops.{path}")


def test_what_is_only_in_some_is_in_a_table() -> None:
    names = {f"{kind}.{name}" for kind, all_ in torch_private.ATTRIBUTES.items() for name in all_}
    listed = {*torch_private.FUNCTIONS, *names}
    assert set(torch_private.ONLY_IN) <= listed


def test_a_missing_name_is_said_with_the_versions_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch, "_neg_view")
    assert list(torch_private.missing()) == ["torch._neg_view"]
    said = torch_private.complaint(AttributeError("one of them"))
    assert f"torch {torch.__version__} lacks torch._neg_view" in said
    assert "2.10 or later" in said


def test_nothing_is_missing() -> None:
    assert not list(torch_private.missing())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined() -> set[str]:
    """Names that the package gives: of functions, classes, variables, attributes and slots."""
    found: set[str] = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if dotted(node.value) == "self" else "")
    return found


ASK = {"delattr", "getattr", "hasattr", "setattr"}


def names_used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Private names that a file asks an object for, and of what; imports as dotted paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, dotted(node.value)
        elif isinstance(node, ast.Call) and dotted(node.func) in ASK and len(node.args) > 1:
            if isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value), dotted(node.args[0])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((part, alias.name) for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                yield from ((part, path) for part in path.split("."))


LISTED = {name for names in torch_private.ATTRIBUTES.values() for name in names}
OPERATORS = {part for path in torch_private.OPERATORS for part in path.split(".")}


def test_private_names_of_torch_stand_in_one_file() -> None:
    """Functions and classes are used there alone; attributes and operators are listed there."""
    ours = defined()
    for file, tree in TREES.items():
        for name, of in names_used(tree):
            if file == HERE or not is_private(name) or OURS.match(of):
                continue
            if of.startswith("torch.") and not of.startswith("torch.ops"):
                raise AssertionError(f"{file} uses {of}: import it in {HERE}")
            is_known = name in LISTED | OPERATORS | OF_OTHERS or name in ours
            assert is_known and of != "torch", f"{file} uses {of}.{name}: list it in {HERE}"


def test_every_name_listed_is_used() -> None:
    text = "\n".join(
        path.read_text() for path in Path(ROOT).rglob("*.py") if path.stem != "torch_private"
    )
    own = Path(torch_private.__file__).read_text()
    for name in (*LISTED, *(path.split(".")[1] for path in torch_private.OPERATORS)):
        assert re.search(rf"\b{name}\b", text) or own.count(name) > 1, name
    for path in torch_private.FUNCTIONS:
        name = path.rpartition(".")[2]
        assert re.search(rf"\b{name}\b", text) or len(re.findall(rf"\b{name}\b", own)) > 1, name


def test_a_node_tells_what_a_pack_hook_returned() -> None:
    """Recipes find by it what an operator was given."""
    packed: list[object] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        y = torch.nn.functional.silu(torch.ones(3, requires_grad=True) * 1)
    assert y.grad_fn._raw_saved_self.data is packed[0]  # type: ignore[union-attr]
