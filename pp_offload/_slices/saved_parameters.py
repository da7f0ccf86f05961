"""What a forward through slices leaves for its backward: references to parameters, not copies.

While a slice runs, a saved tensor that lies on the memory of one of its parameters becomes a
reference: which parameter, which view of it, at which version. So nothing keeps a slice on the
device between forward and backward, and backward brings each slice once, in reverse order and ahead
of its use. Other saved tensors go to the hooks that were entered before, if any.

    run = SlicedRun(slices, cache)
    pack = run.pack(index, tensors)  # the hook while the layers of this slice compute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.torch_private import neg_view, never_compiled, top_hooks
from pp_offload._core.saved import Resident, modified
from pp_offload._core.tensors import Geometry, flat_bytes
from pp_offload._hooks.regions import Chaining, is_in_backward
from pp_offload._memory.storages import has_storage
from pp_offload._slices.cache import Slice, SliceCache, stamp
from pp_offload.errors import OffloadError


class Unpacks(Protocol):
    """What a pack hook returns."""

    @never_compiled
    def unpack(self) -> Tensor:
        """The tensor as it was saved."""
        ...


class SlicedRun:
    """One forward through all slices, and its backwards.

    Args:
        slices: In the order of the forward; those without parameters are never asked for. Where
            the order is not known before, see :meth:`add`.
        cache: Brings them to the device.
    """

    def __init__(self, slices: Sequence[Slice], cache: SliceCache) -> None:
        self.slices = list(slices)
        self.cache = cache
        self._wanted: set[int] = set()
        cache.serve(self, self.slices)

    def add(self, slice_: Slice) -> int:
        """Append a slice that the forward has come to; its index."""
        self.slices.append(slice_)
        return len(self.slices) - 1

    def bring(self, index: int) -> list[Tensor]:
        """The parameters of a slice in forward; those of the next slice are prefetched."""
        loaded = self.cache.use(self.slices[index])
        following = next((one for one in self.slices[index + 1 :] if one.parameters), None)
        if following is not None:
            self.cache.prefetch(following)
        return loaded.pending.tensors

    def want(self, index: int) -> None:
        """Note that backward, if there is one, will ask for this slice."""
        self._wanted.add(index)

    def bring_back(self, index: int, parameter: int | None = None) -> list[Tensor]:
        """The parameters of a slice in backward; those of slices before are prefetched."""
        loaded = self.cache.use(self.slices[index], parameter)
        if is_in_backward():
            self.cache.drop_after_backward()
            before = (self.slices[i] for i in reversed(range(index)) if i in self._wanted)
            self.cache.prefetch(*islice(before, self.cache.num_coming))
        return loaded.pending.tensors

    def pack(self, index: int, tensors: Sequence[Tensor]) -> Chaining:
        """A hook for what the layers of a slice save, whose parameters are ``tensors``."""
        places = {one.untyped_storage()._cdata: i for i, one in enumerate(tensors) if one.numel()}
        outer = top_hooks(False)

        @never_compiled
        def pack(tensor: Tensor) -> Unpacks:
            if has_storage(tensor):
                place = places.get(tensor.untyped_storage()._cdata)
                if place is not None:
                    self.want(index)
                    return ParameterReference(self, index, place, tensor)
            return Resident(tensor) if outer is None else Chained(tensor, *outer)

        chaining = Chaining(pack)
        chaining.outer = None if outer is None else outer[0]
        return chaining


class ParameterReference:
    """A saved tensor that is a parameter of a slice, or a view of one."""

    __slots__ = ("_geometry", "_index", "_is_conj", "_is_neg", "_parameter", "_run", "_stamp")

    def __init__(self, run: SlicedRun, index: int, parameter: int, tensor: Tensor) -> None:
        self._run = run
        self._index = index
        self._parameter = parameter
        self._geometry = Geometry.of(tensor)
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()
        self._stamp = stamp(run.slices[index].parameters[parameter])

    @never_compiled
    def unpack(self) -> Tensor:
        """This view of the parameter, on the device.

        Raises:
            SavedTensorModifiedError: The parameter was changed in place since the forward.
            OffloadError: Its memory was exchanged.
        """
        slice_ = self._run.slices[self._index]
        parameter = slice_.parameters[self._parameter]
        check_unchanged(parameter, self._stamp, slice_.label)
        tensor = self._run.bring_back(self._index, self._parameter)[self._parameter]
        if tensor.dtype != self._geometry.dtype:
            tensor = flat_bytes(tensor)
        view = self._geometry.on_storage_of(tensor)
        view = neg_view(view) if self._is_neg else view
        return view.conj() if self._is_conj else view


def check_unchanged(parameter: Parameter, then: tuple[int, int], label: str) -> None:
    """Raise if a parameter is not what it was at a forward.

    Raises:
        SavedTensorModifiedError: It was changed in place.
        OffloadError: Its memory was exchanged.
    """
    if parameter._version != then[0]:
        raise modified(parameter, then[0], label)
    if stamp(parameter) != then:
        raise OffloadError(
            f"a parameter of {label}, of shape {tuple(parameter.shape)}, was given other memory "
            "through .data between a forward and its backward; expected that before or after both"
        )


class Chained:
    """Another saved tensor, as the hooks around the model packed it."""

    __slots__ = ("_packed", "_unpack")

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._packed = pack(tensor)
        self._unpack = unpack

    @never_compiled
    def unpack(self) -> Tensor:
        """What those hooks unpack it to."""
        return self._unpack(self._packed)
