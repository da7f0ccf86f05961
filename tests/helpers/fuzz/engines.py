"""What a program calls: nothing, groups, or ``OffloadActivations``.

with offload(program) as engine:
    engine.reset()
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from conftest import make_backend
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from helpers.fuzz.programs import Options, Program
from helpers.sessions import assert_no_hooks, in_use
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    OffloadStatistics,
    use_backend,
)
from pp_offload._groups.offloader import Offloader
from pp_offload.testing import SimulatedBackend

if TYPE_CHECKING:
    from typing_extensions import Self

REMATERIALIZE = "cheap"


class Plain:
    """The program without offload."""

    def __init__(self, program: Program) -> None:
        self.program = program
        is_real = program.backend in ("cuda", "emulated")
        self.device = torch.device(program.backend if is_real else "cpu")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def reset(self) -> None:
        """A step begins."""

    def begin(self, stage: int) -> None:
        """A forward begins."""

    def forward(self) -> AbstractContextManager[object]:
        """Around a forward."""
        return nullcontext()

    def scope(self, name: str, x: Tensor) -> AbstractContextManager[object]:
        """What a group's body runs in."""
        return nullcontext()

    def commit(self, name: str, is_delayed: bool, released: Sequence[Tensor]) -> None:
        """A group is committed."""

    def call(self, what: str) -> None:
        """See ``Call``."""

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        """Another compute stream, ordered with the others on entering and leaving."""
        return nullcontext()

    def change(self, tensor: Tensor, how: Callable[[Tensor], object]) -> None:
        """Change a tensor in place."""
        how(tensor)

    def check_left(self, is_empty: bool) -> None:
        """Nothing is left; ``is_empty`` says that no graph is."""


class Offload(Plain):
    """What all engines that offload have to do."""

    offloader: Offloader
    statistics: Callable[[], OffloadStatistics]

    def __enter__(self) -> Self:
        self.backend: Any = make_backend(self.program.backend, self.program.seed)
        self.device = self.backend.device
        self._stack = ExitStack()
        self._stack.enter_context(quiet())
        if self.program.options.is_fine:
            self._stack.enter_context(fine_thresholds())
        self._streams = {0: self.backend.current_stream()}
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.__exit__(*args)  # type: ignore[arg-type]

    @contextmanager
    def on_stream(self, number: int) -> Iterator[object]:
        backend, streams = self.backend, self._streams
        if number == 0 or not hasattr(backend, "new_stream"):
            yield
            return
        if number not in streams:
            streams[number] = backend.new_stream(f"side {number}")
        main, side = streams[0], streams[number]
        side.wait_stream(main)
        try:
            with backend.stream(side):
                yield
        finally:
            main.wait_stream(side)

    def change(self, tensor: Tensor, how: Callable[[Tensor], object]) -> None:
        # The simulated device would report the race itself; here the engine alone must notice.
        with no_dispatch() if isinstance(self.backend, SimulatedBackend) else nullcontext():
            how(tensor)

    def call(self, what: str) -> None:
        if what == "synchronize":
            self.synchronize()

    def synchronize(self) -> None:
        mover = self.offloader.engine.mover
        for _ in range(2):  # to the host, and from there to the disk
            self.backend.synchronize()
            while queue := mover.in_flight.queue:
                queue[0].offloaded.synchronize()
                with mover.lock:
                    mover.poll()
            self.statistics()

    def check_left(self, is_empty: bool) -> None:
        assert_no_hooks()
        if is_empty and any(in_use(self).values()):
            self.synchronize()
            forget_failed_backward(self.device)
            gc.collect()
            assert not any(in_use(self).values()), f"in use without a graph: {in_use(self)}"

    def finish(self) -> OffloadStatistics:
        """The program is over: no byte is on the way."""
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
        self._context = OffloadActivations(
            min_offload_size=1,
            max_fwd_stash_size=options.stash,
            config=config_of(options),
            backend=self.backend,
        )
        self.offloader = self._context.stash._offloader
        self.statistics = self._context.statistics
        return self

    def forward(self) -> AbstractContextManager[object]:
        return self._context


class OffloadGroups(Offload):
    """What is saved in groups."""

    def __enter__(self) -> Self:
        super().__enter__()
        config = config_of(self.program.options)
        self.manager = self._stack.enter_context(use_backend(self.backend, config=config))
        self.offloader = self.manager.offloader
        self.statistics = self.manager.statistics
        return self

    def reset(self) -> None:
        try:
            off_interface.reset()
        except GroupStateError as error:  # a program may leave groups open; the step has begun
            if "never committed" not in str(error):
                raise

    def begin(self, stage: int) -> None:
        off_interface.init_chunk_handler(len(self.program.stages), stage, 1)

    def scope(self, name: str, x: Tensor) -> AbstractContextManager[object]:
        return off_interface(True, x, name)

    def commit(self, name: str, is_delayed: bool, released: Sequence[Tensor]) -> None:
        off_interface.group_commit((), name, released, is_delayed)

    def call(self, what: str) -> None:
        super().call(what)
        if what == "flush":
            self.manager.flush_delayed_groups()
        elif what == "enable":
            self.manager.enable_offload()
        elif what == "disable":
            self.manager.disable_offload()


def offload(program: Program) -> Offload:
    """The engine that the program is to run on."""
    return (OffloadGroups if program.options.stash is None else OffloadAll)(program)


def config_of(options: Options) -> OffloadConfig:
    """The engine's options."""
    stays: dict[str, Any] = {"device_limit_bytes": options.device_limit_bytes}
    if options.device_limit_bytes is None:
        stays["activation_offload_fraction"] = options.activation_offload_fraction
    return OffloadConfig(
        **stays,
        min_offloaded_tensor_size=1,
        prefetch_bytes=options.prefetch_bytes,
        max_in_flight_bytes=options.max_in_flight_bytes,
        host_budget_bytes=options.host_budget_bytes,
        tiers=options.tiers,
        verify=options.verify,
        rematerialize=REMATERIALIZE,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of the engine are not logged."""
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
    """Where a backward raised, autograd's queue holds the rest of its graph until the next."""
    torch.ones((), requires_grad=True, device=device).backward()
