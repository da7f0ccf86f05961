"""Private names of torch stand in one file; attributes and operators are on the torch installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sources import TREES, dotted
from torch import nn

from pp_offload._common import torch_private

pytestmark = pytest.mark.smoke

HERE = "_common.torch_private"

ATTRIBUTES: dict[Callable[[], Any], str] = {
    lambda: torch.ones(1): """_backward_hooks _base _fix_weakref _is_zerotensor
        _post_accumulate_grad_hooks _use_count _version""",
    lambda: torch.ones(1).untyped_storage(): "_cdata",
    lambda: torch.ones(1, requires_grad=True).exp().grad_fn: """_input_metadata _sequence_nr
        _set_sequence_nr _raw_saved_result""",
    lambda: torch.ones(1, requires_grad=True).expand(2).grad_fn: "_saved_self_sym_sizes",
    lambda: torch.ops.aten.mm.default: "_overloadpacket _schema",
    lambda: torch.library.Library("aten", "IMPL"): "_destroy",
    lambda: nn.Linear(1, 1): """_apply _backward_hooks _backward_pre_hooks _buffers
        _compiled_call_impl _forward_hooks _forward_pre_hooks _modules _non_persistent_buffers_set
        _parameters""",
    lambda: torch_private.ScaleCopies(torch.ones(1)): "_per_device_tensors",
    lambda: torch_private.CheckpointWrapper(nn.Linear(1, 1)): "_checkpoint_wrapped_module",
}
"""Private attributes of objects that can be made in one process."""

SOURCES = {
    "distributed/pipelining/schedules.py": "_n_microbatches _stage _stages _load_csv",
    "distributed/pipelining/stage.py": "_prepare_backward_infra _prepare_forward_infra",
    "distributed/fsdp/fully_sharded_data_parallel.py": "_fsdp_wrapped_module",
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py": "RegisterPostBackwardFunction",
    "_dynamo/eval_frame.py": "_orig_mod",
    "autograd/function.py": "_forward_cls",
}
"""Private attributes of other objects, which are looked for in the source of torch."""

ATTENTION = "_scaled_dot_product"
OPERATORS = [
    *("_grouped_mm", "_to_copy", "_unsafe_view", f"{ATTENTION}_attention_math"),
    *(f"{ATTENTION}_{kind}_attention" for kind in ("efficient", "flash")),
    *(f"{ATTENTION}_{kind}_attention_backward" for kind in ("efficient", "flash")),
]

NOT_IN_ALL = {"_inference_mode", "_recomputation_hook", "_c10d_functional"}
"""Names that the package does without where torch lacks them."""

OF_OTHERS = {"_can_checkpoint_with_cache", "_current_frames", "_getframe", "_replace"}
"""Names of transformers, ``sys`` and named tuples."""

LISTED = {name for names in (*ATTRIBUTES.values(), *SOURCES.values()) for name in names.split()}


def test_attributes_and_operators_are_there() -> None:
    for make, names in ATTRIBUTES.items():
        example = make()
        assert not [name for name in names.split() if not hasattr(example, name)], example
    for path, names in SOURCES.items():
        source = (Path(torch.__file__).parent / path).read_text()
        assert not [name for name in names.split() if not re.search(rf"\b{name}\b", source)], path
    assert not [name for name in OPERATORS if not hasattr(torch.ops.aten, name)]


def defined() -> Iterator[str]:
    """Names that the package gives: of functions, classes, variables, attributes and slots."""
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if dotted(node.value) == "self" else ""


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


def test_private_names_of_torch_stand_in_one_file() -> None:
    """Functions and classes are used there alone; attributes and operators are listed here."""
    allowed = LISTED | {*OPERATORS} | NOT_IN_ALL | OF_OTHERS | {*defined()}
    for file, tree in TREES.items():
        for name, of in names_used(tree):
            is_private = name.startswith("_") and not name.endswith("__")
            if file == HERE or not is_private or re.match(r"pp_offload(\.|$)", of):
                continue
            if of.startswith("torch.") and not of.startswith("torch.ops"):
                raise AssertionError(f"{file} uses {of}: import it in {HERE}")
            assert name in allowed and of != "torch", f"{file} uses {of}.{name}: list it here"
