"""Work of a pipeline's stages on a virtual device: modules that run, or fixed times.

work = Modules(stages, example=tokens, loss_fn=loss_fn)  # on meta, in the order of the pipeline
work = Times(forward_s=1.0, input_s=1.0, weight_s=1.0)   # closed forms
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pp_offload._common.torch_private import prepare_stage
from pp_offload._megatron.manager import use_backend
from pp_offload.checkpointing import is_recomputed, recompute_layers
from pp_offload.modules import Patterns, matching
from pp_offload.pipelining import attach
from pp_offload.simulate.costs import tensors_in
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import check_number
from pp_offload.simulate.schedules import PipelineOrder


class RankWork:
    """Work of a rank, whose manager is in use during each call. This class does nothing."""

    def begin_step(self) -> None:
        """Begin a step."""

    def forward(self, stage: int, microbatch: int) -> int:
        """Run a forward, and return the bytes sent to the next stage."""
        return 0

    def backward(self, kind: str, stage: int, microbatch: int) -> int:
        """Run a backward, or a part of it; return the bytes sent to the stage before."""
        return 0

    def reduce(self, stage: int) -> None:
        """End the backwards of a stage."""

    def update(self) -> None:
        """Update the parameters at the end of a step."""

    def close(self) -> None:
        """Release all resources: there is no further step."""


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # of a rank


class Work:
    """Work of all ranks."""

    optimizer: MakeOptimizer | None = None

    def layers_of(self, stage: int) -> list[str]:
        """Return the names of the modules of a stage that a plan may recompute."""
        return []

    def recomputing(self, names: Mapping[int, Collection[str]]) -> AbstractContextManager[None]:
        """Have backward recompute modules as a whole inside, given their names by stage."""
        return nullcontext()

    def prepare(self, order: PipelineOrder, backend: VirtualBackend) -> None:
        """Prepare the work, once, on a device whose times do not count."""

    def on(self, order: PipelineOrder, rank: int, backend: VirtualBackend) -> RankWork:
        """Make the work of a rank, whose manager is in use."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Times(Work):
    """Work of stages with fixed times in seconds, the same for all stages.

    A backward in one part takes the time of both parts.

    Raises:
        ValueError: A time is no number of at least 0.
    """

    forward_s: float
    input_s: float
    weight_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, may_be_zero=True)

    def on(self, order: PipelineOrder, rank: int, backend: VirtualBackend) -> RankWork:
        return _TimedWork(self, backend.compute.launch)


@dataclass
class _TimedWork(RankWork):
    """Work of a rank that launches fixed times, with messages without bytes."""

    times: Times
    launch: Callable[[float], float]

    def forward(self, stage: int, microbatch: int) -> int:
        self.launch(self.times.forward_s)
        return 0

    def backward(self, kind: str, stage: int, microbatch: int) -> int:
        input_s, weight_s = self.times.input_s, self.times.weight_s
        times = {"BACKWARD_INPUT": input_s, "BACKWARD_WEIGHT": weight_s}
        self.launch(times.get(kind, input_s + weight_s))
        return 0


class Modules(Work):
    """Work of a model's stages on ``meta``, run by PyTorch's own ``PipelineStage``.

    Args:
        stages: Stages in the order of the pipeline. Each takes the output of the stage before.
        example: Input of the first stage for a microbatch: a tensor, or several.
        loss_fn: Loss of the last stage's output for a microbatch.
        groups: Module name patterns by group name, as for :func:`pp_offload.attach`; None if the
            modules mark their groups themselves.
        layers: Pattern of the names of modules that a plan may recompute, such as
            ``"layers.*"``; None to recompute nothing.
        optimizer: Makes the optimizer of a rank, from the parameters of its stages that require
            grad: ``lambda parameters: torch.optim.AdamW(parameters)``. It ends each step of the
            rank, and its state exists from the end of the first step on. None for no optimizer.

    Raises:
        ValueError: A parameter is not on ``meta``, or no stage has a module for ``layers``.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        example: Tensor | tuple[Tensor, ...],
        loss_fn: Callable[[Any], Tensor],
        groups: Patterns | None = None,
        layers: str | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        for index, stage in enumerate(stages):
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                if not tensor.is_meta:
                    raise ValueError(
                        f"{name} of stages[{index}] is on {tensor.device}, expected meta; build "
                        'the modules with device="meta", or under torch.device("meta")'
                    )
        self.stages, self.loss_fn, self.groups = list(stages), loss_fn, groups
        self.layers, self.optimizer = layers, optimizer
        if layers is not None and not any(map(self.layers_of, range(len(stages)))):
            raise ValueError(
                f"layers is {layers!r}, which fits no name of a module in any stage; expected a "
                "pattern of names as in named_modules(), with * for one part"
            )
        # Inputs of each stage, and outputs of the last stage; filled in by prepare().
        self.samples = [example if isinstance(example, tuple) else (example,)]

    def layers_of(self, stage: int) -> list[str]:
        return [] if self.layers is None else matching(self.stages[stage], self.layers)

    @contextmanager
    def recomputing(self, names: Mapping[int, Collection[str]]) -> Iterator[None]:
        with ExitStack() as stack:
            for stage, layers in names.items():
                module = self.stages[stage]
                # Those of an earlier recompute_layers stay as they are.
                new_names = [name for name in layers if not is_recomputed(module, name)]
                stack.enter_context(recompute_layers(module, new_names))
            yield

    def prepare(self, order: PipelineOrder, backend: VirtualBackend) -> None:
        if len(self.stages) != order.num_stages:
            raise ValueError(
                f"there are {len(self.stages)} modules for {order.num_stages} stages, expected one "
                "for each"
            )
        del self.samples[1:]
        with use_backend(backend), torch.no_grad():
            for stage in self.stages:
                stage.zero_grad()
                outputs = map(torch.empty_like, tensors_in(stage(*self.samples[-1])))
                self.samples.append(tuple(x.requires_grad_(x.is_floating_point()) for x in outputs))

    def on(self, order: PipelineOrder, rank: int, backend: VirtualBackend) -> RankWork:
        for stage in order.stages_of(rank):
            module = self.stages[stage]
            for tensor in (*module.parameters(), *module.buffers()):  # allocated before first use
                backend.memory.see(tensor.untyped_storage())
        return _ModuleWork(self, order, rank)


class _ModuleWork(RankWork):
    """Work of a rank on PyTorch's stages, without its messages."""

    def __init__(self, work: Modules, order: PipelineOrder, rank: int) -> None:
        self._work, self._num_microbatches = work, order.num_microbatches
        self._losses: dict[int, Tensor] = {}
        self._inputs: list[tuple[Tensor, ...]] = []
        self._stages: dict[int, PipelineStage] = {}
        num_stages, meta = order.num_stages, torch.device("meta")
        with _process_group():
            for index in order.stages_of(rank):
                module, (inputs, outputs) = work.stages[index], work.samples[index : index + 2]
                stage = PipelineStage(module, index, num_stages, meta, inputs, outputs)
                stage.group_rank, stage.group_size = rank, order.num_ranks
                self._stages[index] = stage
        schedule = order.schedule_of(list(self._stages.values()))
        for stage in self._stages.values():
            prepare_stage(stage, order.num_microbatches)
        modules = [stage.submod for stage in self._stages.values()]
        self._optimizer = None if work.optimizer is None else _optimizer(work.optimizer, modules)
        self._attached = attach(schedule, work.groups)  # last: nothing detaches after a failure

    def begin_step(self) -> None:
        self._clear()
        if any(stage.is_first for stage in self._stages.values()):
            for _ in range(self._num_microbatches):
                samples = self._work.samples[0]
                new = [torch.empty_like(x).requires_grad_(x.requires_grad) for x in samples]
                self._inputs.append(tuple(new))
        self._attached.begin_step()

    def forward(self, stage: int, microbatch: int) -> int:
        runner = self._stages[stage]
        args = self._inputs[microbatch] if runner.is_first else ()
        outputs = runner.forward_one_chunk(microbatch, args, save_forward_output=False)
        if runner.is_last:
            self._losses[microbatch] = self._work.loss_fn(outputs)
        if stage + 1 in self._stages:
            self._stages[stage + 1].set_local_fwd_input(runner.fwd_cache[microbatch][0], microbatch)
        return sum(tensor.nbytes for tensor in tensors_in(outputs))

    def backward(self, kind: str, stage: int, microbatch: int) -> int:
        runner = self._stages[stage]
        if kind == "BACKWARD_WEIGHT":
            runner.backward_weight_one_chunk(microbatch)
            return 0
        is_full = kind == "FULL_BACKWARD"
        loss = self._losses.get(microbatch)
        runner.backward_one_chunk(microbatch, loss=loss, full_backward=is_full)
        if runner.is_first:
            return 0
        gradients = runner.get_local_bwd_output(microbatch)
        if stage - 1 in self._stages:
            self._stages[stage - 1].set_local_bwd_input(gradients, microbatch)
        return sum(tensor.nbytes for tensor in tensors_in(gradients))

    def reduce(self, stage: int) -> None:
        self._stages[stage].perform_reduce_grad(self._num_microbatches)

    def update(self) -> None:
        if self._optimizer is None:
            return
        try:
            self._optimizer.step()
        except (AssertionError, RuntimeError, TypeError) as failure:
            raise ValueError(
                f"the optimizer is {type(self._optimizer).__name__}, expected one that can run "
                "without data, on meta and without a closure, such as torch.optim.AdamW without "
                "fused and capturable; take that, or none and leave room for it below the limit: "
                f"{type(failure).__name__}: {failure}"
            ) from failure

    def close(self) -> None:
        self._attached.detach()
        self._optimizer = None
        self._clear()

    def _clear(self) -> None:
        """Drop the last step, as a schedule and an optimizer do between steps."""
        self._losses.clear()
        self._inputs.clear()
        for stage in self._stages.values():
            stage.clear_runtime_states()
            stage.submod.zero_grad()


def _optimizer(make: MakeOptimizer, modules: Sequence[nn.Module]) -> torch.optim.Optimizer | None:
    """Make the optimizer of a rank; None if the rank has nothing to train."""
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return None
    optimizer = make(trained)
    # The default of an accelerator, where an operator updates many parameters.
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


@contextmanager
def _process_group() -> Iterator[None]:
    """Provide the process group that a stage needs. It sends nothing."""
    if dist.is_initialized():
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.excepthook = hook  # PyTorch replaced it to prefix tracebacks with a rank
    try:
        yield
    finally:
        dist.destroy_process_group()
