"""Faults inside the package: one statement or expression of a named function is replaced.

The edit is made in the syntax tree when the module is imported, so no file is written.

    install(EDITS["changed tensors are not noticed"])     # before the module is imported
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Edit:
    """A fault of one function."""

    module: str
    """Where the function is, such as ``pp_offload.errors``."""

    function: str
    """Its qualified name, such as ``Class.method``."""

    old: str
    """A statement or an expression that is there exactly once."""

    new: str
    """What comes in its place; ``pass`` to remove a statement."""

    why: str
    """What goes wrong."""

    tests: tuple[str, ...] = ("tests/core",)
    """Files or folders of which a test has to fail."""


class DoesNotApplyError(Exception):
    """The function is not there, or what is to be replaced is not there exactly once."""


EDITS: dict[str, Edit] = {
    "changed tensors are not noticed": Edit(
        "pp_offload._transfer.ticket",
        "SavedActivation.unpack",
        "held._version != self.version",
        "False",
        "a tensor that was changed between save and copy gives wrong gradients",
        ("tests/core/test_payloads.py",),
    ),
    "host bytes may be read at once": Edit(
        "pp_offload._transfer.copies",
        "Copies._h2d_waits_for_offloaded",
        "self.backend.h2d.wait_event(seen)",
        "pass",
        "a host buffer is read before it was written",
        ("tests/core/test_order.py",),
    ),
}
"""By name. An edit that does not apply any more is renewed or goes with what it was in."""


class _Replace(ast.NodeTransformer):
    """Replaces every node that equals ``old``."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new, self.count = ast.dump(old), new, 0

    def visit(self, node: ast.AST) -> Any:
        if ast.dump(node) == self.old:
            self.count += 1
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def _parsed(text: str) -> ast.AST:
    """A statement, or the expression that it is made of."""
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def edited(edit: Edit, source: str) -> ast.Module:
    """The module with the fault.

    Raises:
        DoesNotApplyError: Its function is not there, or its old text is not there exactly once.
    """
    tree = ast.parse(source)
    scope: Sequence[ast.AST] = tree.body
    node: Any = None
    for name in edit.function.split("."):
        named = [n for n in scope if getattr(n, "name", None) == name]
        if not named:
            raise DoesNotApplyError(f"{edit.module} has no {edit.function}")
        node = named[-1]
        scope = node.body
    old, new = _parsed(edit.old), _parsed(edit.new)
    if isinstance(new, ast.stmt) and isinstance(old, ast.expr):
        old = ast.Expr(old)
    replace = _Replace(old, new)
    replace.visit(node)
    if replace.count != 1:
        raise DoesNotApplyError(
            f"{edit.old!r} is {replace.count} times in {edit.module}.{edit.function}, expected once"
        )
    return ast.fix_missing_locations(tree)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the module with the fault; no bytecode of it is read or written."""

    def __init__(self, edit: Edit, path: str) -> None:
        super().__init__(edit.module, path)
        self.edit = edit

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        return compile(edited(self.edit, source), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of an edit."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.edit.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _Loader(self.edit, spec.origin)
        return spec


def install(edit: Edit) -> None:
    """Make the edit when its module is imported, which is now.

    Raises:
        DoesNotApplyError: There is no such module, function or text.
    """
    if edit.module in sys.modules:
        raise DoesNotApplyError(f"{edit.module} is imported already")
    sys.meta_path.insert(0, _Finder(edit))
    try:
        importlib.import_module(edit.module)
    except ModuleNotFoundError as error:
        raise DoesNotApplyError(str(error)) from error
