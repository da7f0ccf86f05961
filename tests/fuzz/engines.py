"""What a program calls: the offload engine, nothing, or a witness of what autograd could object to.

with Offload(program) as engine:
    engine.reset()
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from conftest import make_backend
from programs import Options, Program
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._mode_utils import no_dispatch
from toy import assert_no_hooks

from pp_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from pp_offload import (
    OffloadActivations,
    OffloadConfig,
    OffloadStatistics,
    use_backend,
)
from pp_offload import (
    fine_grained_offloading_group_start as group_start,
)
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._core.keys import ChunkKey
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.split_backward import BackwardPass, SplitBackward
from pp_offload.errors import GroupStateError
from pp_offload.simulate import VirtualBackend
from pp_offload.testing import SimulatedBackend

if TYPE_CHECKING:
    from typing_extensions import Self

Where = tuple[int, int]
"""A step and an operation in it."""


class Plain:
    """The program without offload."""

    where: Where = (0, 0)

    def __init__(self, program: Program) -> None:
        self.program = program
        is_real = program.backend in ("cuda", "emulated")
        self.device = torch.device(program.backend if is_real else "cpu")

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def reset(self) -> None:
        """A step begins."""

    def begin(self, stage: int, min_numel: int) -> None:
        """A forward begins."""

    def forward(self) -> AbstractContextManager[object]:
        """Around a forward."""
        return nullcontext()

    def chunk(self) -> ChunkKey | None:
        """What the forward that just ran belongs to."""
        return None

    def part(self, chunk: ChunkKey | None, part: BackwardPass) -> AbstractContextManager[object]:
        """Around a part of its backward."""
        return nullcontext()

    def scope(self, name: str, is_function: bool, x: Tensor) -> AbstractContextManager[object]:
        """What a group's body runs in."""
        return nullcontext()

    def commit(self, name: str, is_delayed: bool, released: Sequence[Tensor]) -> None:
        """A group is committed."""

    def recompute(self, stops: bool) -> Callable[..., Tensor]:
        """A checkpoint of ours whose inputs leave."""
        return Recompute(early_stop=stops)

    def flush(self) -> None:
        """Delayed commits are done."""

    def switch(self, is_on: bool) -> None:
        """Offload is enabled or disabled."""

    def in_region(self) -> AbstractContextManager[object]:
        """Around a region that is computed again, each time."""
        return nullcontext()

    def mark(self, tensor: Tensor) -> None:
        """A tensor is not to be offloaded."""

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        """Another compute stream, ordered with the others on entering and leaving."""
        return nullcontext()

    def change(self, tensor: Tensor, how: Callable[[Tensor], object]) -> None:
        """Change a tensor in place."""
        how(tensor)

    def synchronize(self) -> None:
        """All copies are finished."""

    def check_left(self, is_empty: bool) -> None:
        """Nothing is left; ``is_empty`` says that no graph is."""


class Offload(Plain):
    """What an engine that offloads has to do, whoever tells it what."""

    offloader: Offloader
    statistics: Callable[[], OffloadStatistics]

    def __enter__(self) -> Self:
        program = self.program
        self.backend = make_backend(program.backend, program.seed)
        self.device = self.backend.device
        self._stack = ExitStack()
        self._stack.enter_context(quiet())
        if program.options.is_fine:
            self._stack.enter_context(fine_thresholds())
        self._streams = {0: self.backend.current_stream()}
        self._inputs = ActivationStash(
            "inputs", config_of(program.options), min_offload_size=1, backend=self.backend
        )
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.__exit__(*args)  # type: ignore[arg-type]

    @contextmanager
    def on_stream(self, number: int) -> Iterator[object]:
        backend, streams = self.backend, self._streams
        if number == 0 or not isinstance(backend, SimulatedBackend | VirtualBackend):
            yield
            return
        if number not in streams:
            streams[number] = backend.new_stream(f"side {number}")
        main, side = streams[0], streams[number]
        side.wait_stream(main)  # type: ignore[attr-defined]
        try:
            with backend.stream(side):  # type: ignore[arg-type]
                yield
        finally:
            main.wait_stream(side)  # type: ignore[attr-defined]

    def change(self, tensor: Tensor, how: Callable[[Tensor], object]) -> None:
        # The simulated device would report the race itself; here the engine alone must notice.
        with no_dispatch() if isinstance(self.backend, SimulatedBackend) else nullcontext():
            how(tensor)

    def recompute(self, stops: bool) -> Callable[..., Tensor]:
        return Recompute(self._inputs, early_stop=stops)

    def in_use(self) -> dict[str, int]:
        """What is held of forwards; nothing if no graph is alive."""
        inputs = {f"{n} of inputs": k for n, k in in_use(self._inputs.statistics()).items()}
        return in_use(self.statistics()) | inputs

    def synchronize(self) -> None:
        engines = self.offloader.engine, self._inputs._offloader.engine
        for _ in range(2):  # to the host, and from there to the disk
            self.backend.synchronize()
            for engine in engines:
                while queue := engine.mover.in_flight.queue:
                    queue[0].offloaded.synchronize()
                    with engine.mover.lock:
                        engine.mover.poll()
            self.statistics()
            self._inputs.statistics()

    def check_left(self, is_empty: bool) -> None:
        assert_no_hooks()
        if not is_empty:
            return
        if self.in_use():
            self.synchronize()
            forget_failed_backward(self.device)
            gc.collect()
            left = self.in_use()
            assert not left, f"in use though no graph is alive: {left}"

    def finish(self) -> OffloadStatistics:
        """The program is over: not a byte is on the way."""
        self.reset()
        self.synchronize()
        self.check_left(True)
        statistics = self.statistics()
        assert statistics.bytes_in_flight == 0, f"{statistics.bytes_in_flight} bytes in flight"
        return statistics


class OffloadAll(Offload):
    """Everything that is saved in a forward."""

    def __enter__(self) -> Self:
        super().__enter__()
        options = self.program.options
        assert options.stash is not None
        self._stack.enter_context(self.backend.activate())
        self._offload = OffloadActivations(
            min_offload_size=1,
            max_fwd_stash_size=options.stash,
            config=config_of(options),
            backend=self.backend,
        )
        self.offloader = self._offload.stash._offloader
        self.statistics = self._offload.statistics
        return self

    def forward(self) -> AbstractContextManager[object]:
        return self._offload


class OffloadGroups(Offload):
    """What is saved in groups."""

    def __enter__(self) -> Self:
        super().__enter__()
        program = self.program
        self.manager = self._stack.enter_context(
            use_backend(self.backend, config=config_of(program.options))
        )
        self.offloader = self.manager.offloader
        self.statistics = self.manager.statistics
        self.manager.step.pipeline_rank = program.options.pipeline_rank
        if program.options.split_backward is not None:
            is_keeping = program.options.split_backward == "keep"
            keys = frozenset(
                ChunkKey(stage, m) for stage in range(len(program.stages)) for m in range(20)
            )
            split = SplitBackward(keys, is_keeping=is_keeping)
            self.offloader.follow_parts(split)
        return self

    def reset(self) -> None:
        try:
            off_interface.reset()
        except GroupStateError as error:  # a program may leave groups open; the step has begun
            if "never committed" not in str(error):
                raise

    def chunk(self) -> ChunkKey | None:
        current = self.manager.cur_forward_chunk()
        return None if current is None else current.key

    def part(self, chunk: ChunkKey | None, part: BackwardPass) -> AbstractContextManager[object]:
        is_told = self.manager.offloader.split is not None and chunk is not None
        return self.manager.backward_pass(chunk, part) if is_told else nullcontext()

    def begin(self, stage: int, min_numel: int) -> None:
        off_interface.init_chunk_handler(len(self.program.stages), stage, min_numel)

    @contextmanager
    def scope(self, name: str, is_function: bool, x: Tensor) -> Iterator[object]:
        if not is_function:
            with off_interface(True, x, name):
                yield
            return
        group_start(x, name)
        with off_interface.get_context(True):
            yield

    def commit(self, name: str, is_delayed: bool, released: Sequence[Tensor]) -> None:
        off_interface.group_commit((), name, released, is_delayed)

    def flush(self) -> None:
        self.manager.flush_delayed_groups()

    def switch(self, is_on: bool) -> None:
        if is_on:
            self.manager.enable_offload()
        else:
            self.manager.disable_offload()

    def mark(self, tensor: Tensor) -> None:
        off_interface.mark_not_offloadable(tensor)


class Witness(Plain):
    """Every tensor that would leave is copied at once, so that nothing can change it.

    Attributes:
        dirty: Operations that met a saved tensor that had been changed in place: there, and
            nowhere else, the engine may refuse to go on.
    """

    def __enter__(self) -> Witness:
        self.dirty: set[Where] = set()
        self._saved: list[weakref.ref[Snapshot]] = []
        self._is_on = True
        return self

    def reset(self) -> None:
        self._look()
        self._saved.clear()

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext() if self.program.options.stash is None else self._hooks()

    def scope(self, name: str, is_function: bool, x: Tensor) -> AbstractContextManager[object]:
        # A group that starts while offload is disabled leaves all to autograd, which may refuse.
        is_group = self.program.options.stash is None and self._is_on
        return self._hooks() if is_group else nullcontext()

    def switch(self, is_on: bool) -> None:
        self._is_on = is_on

    @contextmanager
    def in_region(self) -> Iterator[None]:
        """Groups leave all to the checkpoint."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def _hooks(self) -> AbstractContextManager[object]:
        if not torch.is_grad_enabled():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def recompute(self, stops: bool) -> Callable[..., Tensor]:
        inner = Recompute(early_stop=stops)

        def run(*args: Any) -> Tensor:
            with self._hooks():
                return inner(*args)

        return run

    def commit(self, name: str, is_delayed: bool, released: Sequence[Tensor]) -> None:
        self._look()

    def flush(self) -> None:
        self._look()

    def _look(self) -> None:
        for ref in self._saved:
            snapshot = ref()
            if snapshot is not None and snapshot.is_stale():
                self.dirty.add(self.where)

    def _pack(self, tensor: Tensor) -> Snapshot:
        snapshot = Snapshot(tensor)
        self._saved.append(weakref.ref(snapshot))
        return snapshot

    def _unpack(self, snapshot: Snapshot) -> Tensor:
        if snapshot.is_stale():
            self.dirty.add(self.where)
        return snapshot.copy


def offload(program: Program) -> Offload:
    """The engine that the program is to run on."""
    return (OffloadGroups if program.options.stash is None else OffloadAll)(program)


class Snapshot:
    """A tensor as it was saved, in memory of its own."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage().clone()
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, *geometry
        )
        self._alias = tensor.detach()
        self._version = tensor._version

    def is_stale(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self._alias._version != self._version


REMATERIALIZE = "cheap"


def config_of(options: Options) -> OffloadConfig:
    """The engine's options."""
    stays: dict[str, Any] = {"device_limit_bytes": options.device_limit_bytes}
    if options.device_limit_bytes is None:
        stays["activation_offload_fraction"] = options.activation_offload_fraction
        stays["delta_offload_bytes_across_pp_ranks"] = options.delta_offload_bytes_across_pp_ranks
    return OffloadConfig(
        **stays,
        min_offloaded_tensor_size=1,
        prefetch_bytes=options.prefetch_bytes,
        max_in_flight_bytes=options.max_in_flight_bytes,
        host_budget_bytes=options.host_budget_bytes,
        tiers=options.tiers,
        verify=options.verify,
        rematerialize=REMATERIALIZE,
        split_backward=options.split_backward or "reload",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """What the engine warns of is not looked at."""
    logger = logging.getLogger("pp_offload")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def fine_thresholds() -> Iterator[None]:
    """Tensors of a program are tiny; sizes that decide something become as small."""
    with (
        patch("pp_offload._core.window.SMALL_BYTES", 64),
        patch("pp_offload._core.bound.SMALL_BYTES", 64),
        patch("pp_offload._core.tensors.MAX_PADDING_BYTES", 8),
        patch("pp_offload._memory.host_pool.HostPool.min_slab_bytes", 1024),
    ):
        yield


def forget_failed_backward(device: torch.device) -> None:
    """Where a backward raised, autograd's queue holds what was left of its graph until the next."""
    torch.ones((), requires_grad=True, device=device).backward()


def in_use(statistics: OffloadStatistics) -> dict[str, int]:
    """What should be zero when no graph is alive, and is not."""
    names = (*("host_bytes_in_use", "disk_bytes_in_use", "live_tensors", "bytes_reloaded_unused"),)
    return {name: n for name in names if (n := getattr(statistics, name))}
