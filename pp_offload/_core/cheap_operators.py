"""Operators cheap enough to run again, and how to call each with what its node saved.

A *term* says how to compute a tensor: a :class:`Call` of a function on terms, a saved tensor, or a
constant. The :class:`Walk` of ``search.py`` makes one of a node in autograd's graph.

    SiluBackward0, saves ``self``             Call(silu, (self,))
    ToCopyBackward0, saves nothing, of a mul  Call(Tensor.to, (Call(mul, (a, b)), torch.bfloat16))
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pp_offload._common.torch_private import NODES, assert_async, fused_rms_norm
from pp_offload._core.geometry import Geometry, order_of
from pp_offload.errors import OffloadError

UNKNOWN: Any = object()  # stands for a term whose input was not saved: the tensor is copied


class Call(NamedTuple):
    """A tensor that ``function`` computes from ``args``: terms and constants."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    dtype: torch.dtype | None = None  # of the result; an operator in place gives another

    def with_leaves(self, leaf: Callable[[Any], Any]) -> Call:
        """Return this call with ``leaf(part)`` in place of each part that is no call."""
        parts = [a.with_leaves(leaf) if type(a) is Call else leaf(a) for a in self.args]
        return self._replace(args=tuple(parts))


class Guess(NamedTuple):
    """The ``eps`` of a norm, which its node does not save; once tried, it belongs to a weight."""

    weight: Any


class Eps(NamedTuple):
    """The ``eps`` of a norm."""

    value: float | None  # None for the function's own
    forget: Callable[[], None] | None = None  # if it is wrong by now; None while it is tried

    def check(self, computed: Tensor, saved: Tensor) -> None:
        """Compare reciprocal deviations, computed again and saved by the forward: a program may
        change ``eps``, and nothing else that the norm saves depends on it alone. Raises as
        :func:`require`.
        """
        if self.forget is None or saved.is_meta:
            return
        is_same = (computed.view(torch.uint8) == saved.view(torch.uint8)).all()
        require(is_same, EPS_HAS_CHANGED, self.forget)


def require(is_same: Tensor, message: str, forget: Callable[[], None]) -> None:
    """Raise an OffloadError unless ``is_same``, and ``forget`` what was proved; a GPU asserts."""
    if is_same.device.type != "cpu":
        assert_async(is_same, message)
    elif not is_same:
        forget()
        raise OffloadError(message)


EPS_HAS_CHANGED = (
    "the eps of a norm is not what an earlier step showed, so its output cannot be computed again; "
    "expected the same eps in each step, and a usual one: give each eps a norm of its own, or use "
    "OffloadConfig(rematerialize='none')"
)


class Number(NamedTuple):
    """A number, or a tuple of them, that the program passed; a proof serves any other as well."""

    value: Any


EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-4, 1e-3, None)  # tried for a guess, in this order
ALL: tuple[str, ...] = ()  # stands for all inputs of a node, none of which it saves
PARAMETER = "parameter"  # an unsaved input that is a norm's: unchanged within a forward
OPTIONAL = ("_raw_saved_weight", "_raw_saved_bias")  # inputs that may be None
OF_THE_OUTPUT = ("shape", "dtype", "index", "eps")  # attributes that a node does not save

NUMBERS = frozenset(
    f"_saved_{name}" for name in "alpha end eps exponent index split_size split_sizes start".split()
)
"""Attributes that may differ from step to step, such as the sizes of experts."""


class Operator(NamedTuple):
    """How to call the operator of a node: with the inputs, then with the attributes."""

    function: Callable[..., Tensor]
    inputs: tuple[str, ...] = ("",)  # names under which the node saves them; empty for an unsaved
    # Names of other saved values, or of the output; ``eps``, a :class:`Guess`, comes first of all.
    attributes: tuple[str, ...] = ()
    is_view: bool = False  # it computes nothing
    saves_output: bool = False


def _part(x: Tensor, sizes: Any, dim: int, index: int) -> Tensor:
    return x.split(sizes, dim)[index]


def _layer_norm(
    x: Tensor, weight: Any, bias: Any, rstd: Tensor, eps: Eps, shape: tuple[int, ...]
) -> Tensor:
    value = EPS[0] if eps.value is None else eps.value
    output, _, computed = torch.native_layer_norm(x, shape, weight, bias, value)
    eps.check(computed, rstd)
    return output


def _rms_norm(x: Tensor, weight: Any, rstd: Tensor, eps: Eps, shape: tuple[int, ...]) -> Tensor:
    output, computed = fused_rms_norm(x, shape, weight, eps.value)
    eps.check(computed, rstd)
    return output


def _dropped(x: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = 1 / (1 - p)
    if c_float(scale).value != c_float(1 / c_float(1 - p).value).value:
        raise RuntimeError("a kernel that divides in float32 scales by another number")
    return x * mask * scale


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    if rows.dtype in (torch.bool, torch.uint8):
        raise RuntimeError("the host would wait for their number")
    return torch.ops.aten.index(x, [rows])  # type: ignore[no-any-return]  # never a view


_NAMED = {
    # Operators that save their input
    "Gelu": Operator(lambda x, kind: F.gelu(x, approximate=kind), ("self",), ("approximate",)),
    "Silu": Operator(F.silu, ("self",)),
    "Mish": Operator(F.mish, ("self",)),
    "Hardswish": Operator(F.hardswish, ("self",)),
    "LeakyRelu": Operator(F.leaky_relu, ("self",), ("negative_slope",)),
    "Softplus": Operator(F.softplus, ("self",), ("beta", "threshold")),
    "Glu": Operator(F.glu, ("self",), ("dim",)),
    "Erf": Operator(torch.erf, ("self",)),
    "Mul": Operator(torch.mul, ("self", "other")),
    "Div": Operator(torch.div, ("self", "other")),
    "Pow": Operator(torch.pow, ("self",), ("exponent",)),
    "NativeLayerNorm": Operator(
        _layer_norm, ("input", "weight", "bias", "result2"), ("eps", "normalized_shape")
    ),
    "FusedRmsNorm": Operator(
        _rms_norm, ("input", "weight", "result1"), ("eps", "normalized_shape")
    ),
    "NativeGroupNorm": Operator(
        lambda x, weight, bias, groups, eps: F.group_norm(x, groups, weight, bias, eps),
        ("input", "weight", PARAMETER),
        ("group", "eps_"),
    ),
    "NativeDropout": Operator(_dropped, ("", "result1"), ("p",)),
    # Operators whose input another operator may have saved
    "Relu": Operator(torch.relu),
    "Sigmoid": Operator(torch.sigmoid),
    "Tanh": Operator(torch.tanh),
    "Exp": Operator(torch.exp),
    "Rsqrt": Operator(torch.rsqrt),
    "Softmax": Operator(torch.softmax, attributes=("dim", "dtype")),
    "LogSoftmax": Operator(torch.log_softmax, attributes=("dim", "dtype")),
    "Add": Operator(lambda x, y, alpha: torch.add(x, y, alpha=alpha), ("", ""), ("alpha",)),
    "Sub": Operator(lambda x, y, alpha: torch.sub(x, y, alpha=alpha), ("", ""), ("alpha",)),
    "Neg": Operator(torch.neg),
    "ToCopy": Operator(Tensor.to, attributes=("dtype",)),
    "Index": Operator(_rows, ("", "indices")),
    "IndexSelect": Operator(lambda x, at, dim: x.index_select(dim, at), ("", "index"), ("dim",)),
    "Clone": Operator(lambda x: x.clone(memory_format=torch.contiguous_format)),
    "Cat": Operator(lambda *args: torch.cat(args[:-1], args[-1]), ALL, ("dim",)),
    "Stack": Operator(lambda *args: torch.stack(args[:-1], args[-1]), ALL, ("dim",)),
    "Repeat": Operator(Tensor.repeat, attributes=("repeats",)),
    # Views
    "Alias": Operator(lambda x: x, is_view=True),
    "View": Operator(torch.reshape, attributes=("shape",), is_view=True),
    "UnsafeView": Operator(torch.reshape, attributes=("shape",), is_view=True),
    "ReshapeAlias": Operator(torch.reshape, attributes=("shape",), is_view=True),
    "Unsqueeze": Operator(torch.reshape, attributes=("shape",), is_view=True),
    "Expand": Operator(torch.broadcast_to, attributes=("shape",), is_view=True),
    "T": Operator(torch.t, is_view=True),
    "Transpose": Operator(torch.transpose, attributes=("dim0", "dim1"), is_view=True),
    "Permute": Operator(torch.permute, attributes=("dims",), is_view=True),
    "Select": Operator(torch.select, attributes=("dim", "index_"), is_view=True),
    "Slice": Operator(
        torch.ops.aten.slice.Tensor, attributes=("dim", "start", "end", "step"), is_view=True
    ),
    "Split": Operator(_part, attributes=("split_size", "dim", "index"), is_view=True),
    "SplitWithSizes": Operator(_part, attributes=("split_sizes", "dim", "index"), is_view=True),
    "Unbind": Operator(torch.select, attributes=("dim", "index"), is_view=True),
}


def _of_node(node: type, operator: Operator) -> Operator:
    inputs = [n if n in ("", PARAMETER) else f"_raw_saved_{n}" for n in operator.inputs]
    names = [n if n in OF_THE_OUTPUT else f"_saved_{n.rstrip('_')}" for n in operator.attributes]
    saves_output = hasattr(node, "_raw_saved_result")
    return Operator(operator.function, tuple(inputs), tuple(names), operator.is_view, saves_output)


OPERATORS = {
    node: _of_node(node, operator)
    for name, operator in _NAMED.items()
    if (node := NODES.get(f"{name}Backward0")) is not None
}
"""Operators by type of node; only nodes that torch makes for its own operators."""

IDENTITIES = frozenset(
    """megatron.core.tensor_parallel.mappings._CopyToModelParallelRegion
    torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction
    torch.nn.modules._functions.BackwardHookFunction""".split()
)
"""Functions whose outputs are views of all of their inputs; they act in backward alone."""


def behind(edge: tuple[Any, int]) -> tuple[Any, int]:
    """Return the edge by which the tensor came to functions that only hand it on, if to any."""
    node, index = edge
    function = getattr(node, "_forward_cls", None)
    if function is None or f"{function.__module__}.{function.__name__}" not in IDENTITIES:
        return edge
    return behind(node.next_functions[index])


def identity_of(node: Any) -> object:
    """Return an object for this node alone, as long as it lives. Numbers of nodes repeat on other
    threads, and Python objects of nodes come and go.
    """
    return node.metadata.setdefault("pp_offload", object())


class Made:
    """Replaces the node of an operator that saves its own output, which must not refer to it."""

    def __init__(self, node: Any, output: Tensor) -> None:
        self.kind, self.next_functions = type(node), node.next_functions
        self.shape, self.dtype = output.shape, output.dtype
        for name in OPERATORS[self.kind].attributes:
            if name not in OF_THE_OUTPUT:
                setattr(self, name, getattr(node, name))


CHEAP = frozenset([*OPERATORS, Made])
"""Types of nodes, or of their replacements, that may have a recipe."""

_TORCH_NODES = frozenset(NODES.values())


def maker_of(tensor: Tensor) -> tuple[Any, int, object] | None:
    """Return what made a tensor that an operator saves: the node, if it may run again; the index
    of the output; and the node's identity. None for nodes that are not torch's own, for what they
    save of themselves, and for a tensor that was changed in place. A node that saves its own output
    must not be held by that output, or neither is freed. So a :class:`Made` replaces such a node,
    and None a node that does not run again.
    """
    node, index = tensor.grad_fn, tensor.output_nr
    if node is None or tensor._version:
        return None  # a node does not have the value that a changed tensor had before
    if type(node) not in _TORCH_NODES:
        node, index = behind((node, index))
        if type(node) not in _TORCH_NODES:
            return None
    operator = OPERATORS.get(type(node))
    if operator is None:
        return None, index, identity_of(node)
    if index and not operator.is_view:
        return None  # statistics, or a mask, which the node saves
    return Made(node, tensor) if operator.saves_output else node, index, identity_of(node)


def operator_of(node: Any) -> Operator | None:
    """Return the operator of a node or of a :class:`Made`; None for one that is not cheap."""
    kind = type(node)
    return OPERATORS.get(node.kind if kind is Made else kind)


def viewed(output: Tensor, views: list[tuple[Any, int]]) -> Tensor:
    """Apply these view nodes to ``output``, the last node first; views compute nothing."""
    for node, index in reversed(views):
        values = [v.value if type(v) is Number else v for v in attributes_of(node, index)]
        output = OPERATORS[type(node)].function(output, *values)
    return output


def kind_of(part: Any) -> Any:
    """Return what a proof depends on, of a part of a term that is no tensor."""
    if type(part) is Geometry:
        return part.dtype, order_of(part.size, part.stride)
    if type(part) is Number:
        return type(part.value)
    return len(part) if type(part) is torch.Size else part


def attributes_of(node: Any, index: int) -> list[Any]:
    """Return the attributes of a node's operator, which is cheap."""
    operator: Any = operator_of(node)
    values: list[Any] = []
    for attribute in operator.attributes:
        if attribute == "index":
            values.append(Number(index))
        elif attribute == "shape":
            values.append(torch.Size(output_of(node, index).shape))
        elif attribute == "dtype":
            values.append(output_of(node, index).dtype)
        elif attribute != "eps":
            value = _signed(getattr(node, attribute))
            values.append(Number(value) if attribute in NUMBERS else value)
    return values


def output_of(node: Any, index: int) -> Any:
    """Return the metadata of a node's output: its shape and dtype."""
    return node if type(node) is Made else node._input_metadata[index]


def _signed(value: Any) -> Any:
    """Return ``value`` with its sign: torch gives -1 as 2 ** 64 - 1."""
    if isinstance(value, tuple):
        return tuple(map(_signed, value))
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value
