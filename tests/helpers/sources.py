"""Files of the package and their syntax trees, and the rows in which its folders may import."""

from __future__ import annotations

import ast
from pathlib import Path

import pp_offload

ROOT = Path(pp_offload.__file__).parent

ROWS = [
    ("errors", "_common", "config"),
    ("_hooks",),
    ("backends",),
    ("_memory",),
    ("_core",),
    ("_groups",),
    ("_activations", "_checkpoint", "_slices", "_megatron"),
    ("checkpointing", "modules", "pipelining", "activations", "offload_model", "layers", "summary"),
    (
        "testing",
        "simulate",
        "plan",
        "integrations",
        "trace",
        "fine_grained_activation_offload",
        "compat",
    ),
    ("",),
    ("__main__", "cli"),
]
"""Folders, and the files beside them: lowest first, within a row too."""

RANK = {room: rank for rank, room in enumerate(room for row in ROWS for room in row)}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}

TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"
