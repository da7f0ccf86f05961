"""The manager of the process, as Megatron-LM's main calls it.

    manager = PipelineOffloadManager.get_instance()
    manager.init_model_chunk_offload_handler(pp_rank, vp_size, vp_stage)

NOTE [ Two faces of one manager ]
    Main has other parameters under the same names as the module when it was introduced, so one
    class cannot have both. There is one manager in a process all the same, whichever face is asked
    for it: ``attach``, ``configure``, ``use_backend`` and statistics are of that one. So a face is
    an object of the class below whose attributes are the manager's own. It is no copy: both have
    the same dictionary of attributes, and what one changes the other has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from pp_offload._common.checks import check_count, check_kind, checked_tensors, said
from pp_offload._groups.chunk import Chunk
from pp_offload._megatron import manager as introduced
from pp_offload._megatron.cuda_graph import graph_event, graph_stream
from pp_offload._megatron.main_chunk import ChunkOffloadHandler, check_most_in_flight

Hook = Callable[[str, Sequence[Tensor] | None], None]

_FACES: WeakKeyDictionary[introduced.PipelineOffloadManager, PipelineOffloadManager] = (
    WeakKeyDictionary()
)
"""By manager; a face goes with it."""


class PipelineOffloadManager(introduced.PipelineOffloadManager):
    """Coordinates the chunks of one process. See NOTE [ Two faces of one manager ].

    Args:
        config: Options; the defaults when not given.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Source: Megatron-LM ``PipelineOffloadManager``.
    """

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """The manager of this process, made when first asked for."""
        manager = introduced.PipelineOffloadManager.get_instance()
        if isinstance(manager, PipelineOffloadManager):
            return manager
        face = _FACES.get(manager)
        if face is None:
            face = cls.__new__(cls)
            face.__dict__ = manager.__dict__
            _FACES[manager] = face
        return face

    @classmethod
    def reset_instance(cls) -> None:
        """Drop the manager; the next :meth:`get_instance` makes a new one."""
        introduced.PipelineOffloadManager.reset_instance()

    # CUDA graphs

    @property
    def cuda_graph_stream(self) -> Any:
        """The stream to capture and launch graphs on."""
        return graph_stream(self)

    @property
    def cuda_graph_event(self) -> Any:
        """Recorded at the end of a captured forward and of a captured backward."""
        return graph_event(self)

    # Chunks

    def init_model_chunk_offload_handler(  # type: ignore[override]
        self,
        pp_rank: int | None,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int = 1024 * 1024,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: int | None = None,
    ) -> None:
        """Begin the forward of one microbatch on one model chunk.

        Args:
            pp_rank: Of the pipeline; None leaves it at what it was, which is 0 at first.
            vp_size: Number of virtual pipeline stages; None means 1.
            vp_stage: Which of them; None means 0.
            min_offloaded_tensor_size: Smaller tensors stay on the device. In elements.
            delta_offload_bytes_across_pp_ranks: In place of the option of this name.
            activation_offload_fraction: In place of the option of this name. 0 bytes and 1.0
                together are Megatron's defaults, and leave both options as they are.
            max_inflight_offloads: See :attr:`ChunkOffloadHandler.max_inflight_offloads`.

        Raises:
            ConfigError: An option has no value that is possible, or the manager has a plan, in
                place of which they would be.
            ValueError: ``vp_stage`` is outside ``vp_size``, or a number is negative or none.
        """
        if pp_rank is not None:
            check_count("pp_rank", pp_rank, unit="None leaves it as it is")
        check_most_in_flight(max_inflight_offloads)
        self._plan_with(delta_offload_bytes_across_pp_ranks, activation_offload_fraction)
        if pp_rank is not None:  # first, for the plan of this rank may begin here
            self.step.pipeline_rank = pp_rank
        self.begin_chunk(vp_size, vp_stage, min_offloaded_tensor_size)
        chunk = self.forward.chunk
        if isinstance(chunk, ChunkOffloadHandler):
            chunk.max_inflight_offloads = max_inflight_offloads

    def _plan_with(self, delta_bytes: int, fraction: float) -> None:
        """Plan by these from now on; asked for every microbatch, and changed by few."""
        own = self.step.options or self.config
        if own.delta_offload_bytes_across_pp_ranks == delta_bytes and (
            own.activation_offload_fraction == fraction
        ):
            return
        if delta_bytes == 0 and fraction == 1:
            self.step.options = None
            return
        self.step.options = replace(
            self.config,
            delta_offload_bytes_across_pp_ranks=delta_bytes,
            activation_offload_fraction=fraction,
        )

    def _new_chunk(self, smallest: int, vp_stage: int, microbatch: int | None) -> Chunk:
        return ChunkOffloadHandler(
            smallest, self._pool, wiring=self.wiring, vp_stage=vp_stage, microbatch=microbatch
        )

    # Steps

    def reset(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Close the last step and begin the next. Takes part in no collective.

        Args:
            process_group: Accepted for Megatron-LM, which gathers its summary there. Here that is a
                call of its own, ``print_offload_summary_table``.

        Raises:
            GroupStateError: See :meth:`pp_offload.PipelineOffloadManager.reset`.
            TypeError: ``process_group`` is none.
        """
        check_process_group(process_group)
        super().reset()

    def post_warmup_callback(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Derive the plan, and :attr:`offload_summary_bytes`, from the first complete step.

        Args:
            process_group: As for :meth:`reset`.
        """
        check_process_group(process_group)
        super().post_warmup_callback()

    # Switches

    def mark_not_offload(self, tensor: Tensor | None) -> None:
        """Keep ``tensor`` and every view of it on the device; None is ignored.

        Raises:
            TypeError: It is something else.
        """
        if tensor is not None:
            self.mark_not_offloadable(tensor)

    def enter_replay(self) -> None:
        """A graph is launched: from now on commits that may be delayed are. See :meth:`abort`."""
        self.graphs.is_in_replay = True

    def exit_replay(self) -> None:
        """From now on commits are done at once. Delayed ones wait for a flush or the next step."""
        self.graphs.is_in_replay = False

    # Delayed groups

    def push_offload_groups(  # type: ignore[override]
        self, group_hook: Hook, name: str, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """Queue a commit for :meth:`flush_delayed_groups`, which keeps no tensor alive.

        Raises:
            TypeError: ``group_hook`` cannot be called, ``name`` is no ``str``, or the tensors are
                no list of tensors.
        """
        if not callable(group_hook):
            raise TypeError(
                f"group_hook is {said(group_hook)}, expected a function of a name and tensors"
            )
        check_kind("name", name, str, "the name of a group")
        released = introduced.weakly(
            checked_tensors("forced_released_tensors", forced_released_tensors)
        )
        self.wiring.delayed.append(lambda: group_hook(name, released()))


def check_process_group(value: object) -> None:
    """Check a process group, or None.

    Raises:
        TypeError: It is neither.
    """
    if value is not None and dist.is_available():
        expected = "a process group of torch.distributed, or None"
        check_kind("process_group", value, dist.ProcessGroup, expected)
