"""Faults inside the package: one statement or expression of a named function is replaced.

The edit is made in the syntax tree when the module is imported, so no file is written.

    install(EDITS["sources are not kept"])     # before the module is imported
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


BATCH = "pp_offload._core.batch"
COLLECT = "pp_offload._core.payloads"
ENGINE = "pp_offload._core.engine"
IN_FLIGHT = "pp_offload._core.in_flight"
MOVER = "pp_offload._core.mover"
RECIPES = "pp_offload._core.recipes"
SEARCH = "pp_offload._core.search"
POOL = "pp_offload._memory.host_pool"
SAVED = "pp_offload._core.saved"
SHARED = "pp_offload._core.shared"

BOUNDS = ("tests/core/test_core_bounds.py",)
ORDER = ("tests/core/test_order.py",)
PAYLOADS = ("tests/core/test_payloads.py",)
AGAIN = ("tests/core/test_recipes.py",)
SHARING = ("tests/core/test_sharing.py",)
THREADS = ("tests/core/test_threads.py",)

EDITS: dict[str, Edit] = {
    "a recipe has the eps of another norm": Edit(
        RECIPES,
        "Recipes.proved",
        "_with_eps(term, proof)",
        "_with_eps(term, EPS[0])",
        "its node does not tell it, and gradients are wrong",
        AGAIN,
    ),
    "a part that a recipe needs keeps all it is a part of": Edit(
        ENGINE,
        "Engine.keep",
        "payloads.stay_apart()",
        "pass",
        "what stays below a limit takes more than was foreseen, and the part is of another dtype",
        AGAIN,
    ),
    "a recipe that was refused is used": Edit(
        RECIPES,
        "Recipes.proved",
        "proof is _REFUSED",
        "False",
        "it gives other bits",
        AGAIN,
    ),
    "an eps is known by a tensor of zeros": Edit(
        RECIPES,
        "Recipes._try",
        "any([self._gives(other, tensor, walk) for other in others])",
        "False",
        "of zeros every norm gives the same, and the first eps is wrong for other tensors",
        AGAIN,
    ),
    "a recipe gives the same bytes in another order": Edit(
        RECIPES,
        "Recipes._gives",
        "Geometry.of(seen) != Geometry.of(tensor)",
        "False",
        "a tensor of zeros does not say how others lie in memory",
        AGAIN,
    ),
    "an input of a recipe was changed": Edit(
        SEARCH,
        "Walk._leaf",
        "tensor._version != packed.version",
        "False",
        "what it computes is not what was saved",
        AGAIN,
    ),
    "a recipe counts a use too few": Edit(
        RECIPES,
        "Recipe.__init__",
        "self._uses = self._left = uses",
        "self._uses = self._left = uses - 1",
        "it is computed twice",
        AGAIN,
    ),
    "a cast loses the wrong half": Edit(
        SEARCH,
        "_narrowed",
        "flat.view(torch.int16)[1::2]",
        "flat.view(torch.int16)[0::2]",
        "a float32 that was bfloat16 cannot be had from it, and is copied whole",
        AGAIN,
    ),
    "a recipe has the parameter that was at the same address": Edit(
        RECIPES,
        "Recipes._copied",
        "of is None or of() is not storage",
        "of is None",
        "within a step a freed parameter's values are used for another",
        AGAIN,
    ),
    "a node is held by what it saves": Edit(
        RECIPES,
        "maker_of",
        "operator.saves_output",
        "False",
        "a graph that is dropped before the commit is never freed",
        AGAIN,
    ),
    "a change of a saved tensor is not noticed": Edit(
        SAVED,
        "Saved.unpack",
        "tensor._version != self.version",
        "False",
        "a tensor changed between save and commit gives wrong gradients",
        PAYLOADS,
    ),
    "a change of what stays is not noticed": Edit(
        SAVED,
        "Resident.unpack",
        "tensor._version != self.version",
        "False",
        "a tensor that never leaves was changed, and gives wrong gradients",
        PAYLOADS,
    ),
    "a change of a wrapper is not noticed": Edit(
        SAVED,
        "Wrapped.unpack",
        "self.witness._version != self.version",
        "False",
        "the wrapper alone counts it, and gradients are wrong",
        PAYLOADS,
    ),
    "what was changed before the commit leaves": Edit(
        COLLECT,
        "by_storage",
        "saved is None or (tensor := saved.tensor) is None or tensor._version != saved.version",
        "saved is None or (tensor := saved.tensor) is None",
        "its bytes are not those that were saved",
        PAYLOADS,
    ),
    "a change of a source is not noticed": Edit(
        BATCH,
        "Leaving.changed",
        "tensor._version != version",
        "False",
        "the copy ran behind the change and has its bytes",
        PAYLOADS,
    ),
    "a source that moved is not noticed": Edit(
        BATCH,
        "Leaving.changed",
        "now != before",
        "False",
        "its owner emptied it, and the copy has the bytes of another",
        PAYLOADS,
    ),
    "changes are forgotten at let-go": Edit(
        IN_FLIGHT,
        "InFlight.let_go_first",
        "batch.changed |= leaving.changed()",
        "pass",
        "a source changed while its copy was queued, and the copy is used",
        PAYLOADS,
    ),
    "a changed source is taken back": Edit(
        MOVER,
        "Mover.take_back",
        "batch.changed |= leaving.changed()",
        "pass",
        "the change is in the gradients",
        PAYLOADS,
    ),
    "a changed payload comes with its neighbour": Edit(
        MOVER,
        "Mover.deliver",
        "not batch.changed",
        "True",
        "it came in the copy of one that was not changed",
        PAYLOADS,
    ),
    "what came for another stream is handed out": Edit(
        MOVER,
        "Mover.deliver",
        "reload.stream == live",
        "True",
        "this stream has not waited for the copy",
        ORDER,
    ),
    "what came for another stream is waited for": Edit(
        MOVER,
        "Mover._bring",
        "reload.stream != live",
        "False",
        "the other one may use the memory again while this one reads it",
        ORDER,
    ),
    "compute does not wait for a reload": Edit(
        MOVER,
        "Mover._bring",
        "self._wait(live.wait_event, event)",
        "pass",
        "a tensor is used before it is back",
        PAYLOADS,
    ),
    "a copy is shared by all versions": Edit(
        SHARED,
        "_is_same",
        "member.version != first.version or member.wrapper is not None",
        "False",
        "an alias changed the storage behind the first copy",
        SHARING,
    ),
    "equal counts of two aliases are one version": Edit(
        SHARED,
        "_is_same",
        "first.version and member.origin is not first.origin",
        "False",
        "each counts alone, and they saved different bytes",
        SHARING,
    ),
    "changes by whoever saved first do not count": Edit(
        SHARED,
        "_is_same",
        "not any([counter._version for counter in copy.counters])",
        "True",
        "the alias that is saved next has not seen them",
        SHARING,
    ),
    "a wrapper shares what its part left": Edit(
        SHARED,
        "_is_same",
        "member.wrapper is not None",
        "False",
        "the wrapper was changed, which its part has not counted",
        SHARING,
    ),
    "a part shares what its wrapper left": Edit(
        SHARED,
        "SharedCopies.add",
        "member.wrapper is not None",
        "False",
        "the wrapper was changed, which its part has not counted",
        SHARING,
    ),
    "uses by other groups are not counted": Edit(
        BATCH,
        "Batch.use_again",
        "back.left[index] += num",
        "pass",
        "the payload is dropped after the first group and comes twice",
        SHARING,
    ),
    "a shared copy has one shape for all": Edit(
        SHARED,
        "restored_from",
        "shape != tensor.shape or dtype != tensor.dtype or not tensor.is_contiguous()",
        "False",
        "a group gets back the view that another saved",
        SHARING,
    ),
    "what a backward changed is used again": Edit(
        MOVER,
        "Mover._use",
        "before not in (-1, version)",
        "False",
        "the second reader gets the changed bytes",
        PAYLOADS,
    ),
    "used bytes fill the window": Edit(
        MOVER,
        "Mover.deliver",
        "self.arrived.unused_bytes -= back.sizes[index]",
        "pass",
        "nothing more is prefetched, and accounts are wrong",
        PAYLOADS,
    ),
    "reloads do not count in the window": Edit(
        MOVER,
        "Mover._copy_back",
        "self.arrived.unused_bytes += nbytes",
        "pass",
        "everything comes back at once, and accounts are wrong",
        PAYLOADS,
    ),
    "sources are not kept": Edit(
        MOVER,
        "Mover.offload",
        "self.in_flight.add(leaving)",
        "pass",
        "their memory is used again while the copy reads it",
        PAYLOADS,
    ),
    "sources are let go at the next poll": Edit(
        IN_FLIGHT,
        "InFlight.poll",
        "queue and queue[0].offloaded.query()",
        "queue",
        "their memory is used again while the copy reads it",
        PAYLOADS,
    ),
    "h2d does not wait for the offload": Edit(
        MOVER,
        "Mover._copy_back",
        "h2d.wait_event(batch.offloaded)",
        "pass",
        "a host buffer is read before it was written",
        ORDER,
    ),
    "what came for another stream is not given up": Edit(
        MOVER,
        "Mover._reload_now",
        "self.arrived.give_up(batch.back, live)",
        "pass",
        "this stream takes it though nothing orders the two",
        ORDER,
    ),
    "sources above the bound go without a wait": Edit(
        MOVER,
        "Mover._wait_for_oldest",
        "self._wait(streams.wait, event)",
        "pass",
        "their memory is used again while the copy reads it",
        ORDER,
    ),
    "no bound on what is in flight": Edit(
        ENGINE,
        "Engine.send",
        "mover.keep_bounded(group.counts.copied_bytes)",
        "pass",
        "the device keeps all sources until their copies are done",
        BOUNDS,
    ),
    "unused memory is dropped under its copy": Edit(
        MOVER,
        "Arrived.put_away",
        "self.abandoned.append((tensor, reload.event))",
        "pass",
        "it is used again while the copy writes it",
        ORDER,
    ),
    "nothing keeps what a dead batch brought": Edit(
        MOVER,
        "Mover.offload",
        "arrived.backs.add(batch.back)",
        "pass",
        "its memory is used again while the copy writes it; accounts are wrong",
        BOUNDS,
    ),
    "unused bytes stay charged when put away": Edit(
        MOVER,
        "Arrived.put_away",
        "self.unused_bytes -= back.sizes[index]",
        "pass",
        "the window never empties, and accounts are wrong",
        PAYLOADS,
    ),
    "host memory is given on without its last use": Edit(
        POOL,
        "HostPool._collect",
        "host.waits_for, host.last_use = (host.last_use,), None",
        "host.waits_for, host.last_use = (), None",
        "a former owner's reload still reads it",
        ORDER,
    ),
    "a reload is no use of host memory": Edit(
        MOVER,
        "Mover._copy_back",
        "batch.place.last_use = event",
        "pass",
        "the next owner writes while it reads",
        ORDER,
    ),
    "former owners of host memory are not waited for": Edit(
        MOVER,
        "Mover.offload",
        "d2h.wait_event(event)",
        "pass",
        "their reloads still read it",
        ORDER,
    ),
    "only the live stream waits at the bound": Edit(
        MOVER,
        "Mover._wait_for_oldest",
        "self._wait(streams.wait, event)",
        "self.current_stream().wait_event(event)",
        "the source belongs to another stream, which uses it again",
        ORDER,
    ),
    "d2h does not wait for side streams": Edit(
        MOVER,
        "Mover.offload",
        "d2h.wait_event(side.record_event())",
        "pass",
        "a tensor is copied before it was computed",
        ORDER,
    ),
    "a forked process uses the graphs of its parent": Edit(
        MOVER,
        "_after_fork",
        "mover.current_stream = forked",
        "pass",
        "their copies never end there",
        THREADS,
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
