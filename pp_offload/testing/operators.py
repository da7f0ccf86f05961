"""What compute operators read and write, told to the race detector.

A dispatch mode sees every operator below autograd, in forward and backward alike. The operator's
schema says which arguments it writes. Views are not looked at: they touch no byte.

    with Watch(timeline, backend.current_stream):
        ...  # raises RaceError at the first unordered access
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pp_offload.testing.streams import SimulatedStream, Timeline

_METADATA_ONLY = (
    *("empty", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
)


class Watch(TorchDispatchMode):
    """Checks every operator that runs inside, and at the end what was freed.

    Args:
        timeline: Its detector is told.
        live: The compute stream an operator runs on, asked each time.
    """

    def __init__(self, timeline: Timeline, live: Callable[[], SimulatedStream]) -> None:
        super().__init__()
        self._timeline = timeline
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        self._check_operands(func, args, kwargs)
        outputs = func(*args, **kwargs)
        self._see_outputs(outputs)
        return outputs

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._timeline.detector.raise_fault()

    def _check_operands(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._timeline.enter()
        detector, clock = self._timeline.detector, self._live().clock
        operands = list(_operands(func, args, kwargs))
        for tensor, _ in operands:
            detector.see(tensor, clock, is_host=False)  # made before this operator
        clock.advance(detector.host)
        for tensor, kind in operands:
            detector.access(clock, tensor, kind, str(func))

    def _see_outputs(self, outputs: Any) -> None:
        """Remember which stream made which storage."""
        for tensor in _tensors_in(outputs):
            self._timeline.detector.see(tensor, self._live().clock, is_host=False)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator only makes another view, or turns its argument into one."""
    if torch.Tag.inplace_view in func.tags:
        return True
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _parameters(func: Any) -> tuple[tuple[str, str], ...]:
    """Name of each parameter of an operator, and what is done to it: ``read`` or ``write``."""
    aliases = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return tuple((name, "write" if alias and alias.is_write else "read") for name, alias in aliases)


def _operands(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, str]]:
    """Tensors whose bytes an operator touches, and what it does to them."""
    if func._schema.name.split("::")[-1].startswith(_METADATA_ONLY):
        return
    for index, (name, kind) in enumerate(_parameters(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        for tensor in _tensors_in(value):
            yield tensor, kind


def _tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors in an argument or output that have bytes the detector can follow."""
    values = value if isinstance(value, list | tuple) else (value,)
    return (one for one in values if isinstance(one, Tensor) and _has_bytes(one))


def _has_bytes(tensor: Tensor) -> bool:
    """Whether it is an ordinary CPU tensor; sparse, meta and fake ones are not."""
    if tensor.layout is not torch.strided:
        return False
    try:
        return tensor.untyped_storage().device.type == "cpu"
    except (NotImplementedError, RuntimeError):
        return False
