"""Watch of the tensors that compute operators read and write, for the race detector.

A dispatch mode sees every operator below autograd, in forward and backward alike. The operator's
schema says which arguments it writes. Views are ignored: they touch no byte.

    with Watch(timeline, backend.current_stream):
        ...  # raises RaceError at the first unordered access
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from pp_offload._common.operators import Operator, operator
from pp_offload._common.torch_private import TorchDispatchMode
from pp_offload.testing.streams import SimulatedStream, Timeline


class Watch(TorchDispatchMode):
    """Check of every operator that runs inside, on the stream that ``live`` returns for it, and of
    all frees at the end.
    """

    def __init__(self, timeline: Timeline, live: Callable[[], SimulatedStream]) -> None:
        super().__init__()
        self._timeline = timeline
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = operator(func)
        if schema.is_view:
            return func(*args, **kwargs)
        self._check_operands(schema, args, kwargs)
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

    def _check_operands(
        self, schema: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._timeline.enter()
        detector, clock = self._timeline.detector, self._live().clock
        touched = [  # all made before this operator, which the clock does not know yet
            (detector.see(storage, clock, is_host=False), tensor, kind)
            for value, kind in schema.operands(args, kwargs)
            for tensor, storage in _with_bytes(value)
        ]
        clock.advance(detector.host)
        for history, tensor, kind in touched:
            detector.access(clock, history, tensor, kind, schema.label)

    def _see_outputs(self, outputs: Any) -> None:
        """Note which stream made each storage."""
        clock = self._live().clock
        for _, storage in _with_bytes(outputs):
            self._timeline.detector.see(storage, clock, is_host=False)


def _with_bytes(value: Any) -> list[tuple[Tensor, UntypedStorage]]:
    """List the tensors in an argument or output that have bytes the detector can follow."""
    if not isinstance(value, list | tuple):
        value = (value,)
    pairs = []
    for item in value:
        if isinstance(item, Tensor) and (storage := _host_storage(item)) is not None:
            pairs.append((item, storage))
    return pairs


def _host_storage(tensor: Tensor) -> UntypedStorage | None:
    """Return the storage of an ordinary CPU tensor; None for sparse, meta and fake tensors."""
    if tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage if storage.device.type == "cpu" else None
