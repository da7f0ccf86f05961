"""Offload in torchtitan 0.3, from a config registry; torchtitan's trainer stays as it is.

    config.model_spec = with_offload(config.model_spec, {"mlp": "layers.*.feed_forward"})
    config.activation_checkpoint = OffloadAC.Config()  # or this, without a pipeline

``with_offload`` attaches the schedule that the spec's function makes. Parameters may be on the meta
device then: every step reads them anew.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch.nn import Module

from pp_offload._common.checks import check_kind
from pp_offload.checkpointing import CheckpointedModule, checkpoint_wrapper
from pp_offload.config import OffloadConfig
from pp_offload.errors import NotWhileCapturingError
from pp_offload.modules import Patterns
from pp_offload.pipelining import attach

try:
    import tyro
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.protocols.model_spec import ModelSpec
except ImportError as missing:
    raise ImportError(
        f"torchtitan 0.3 or later cannot be imported ({missing}); pip install 'pp_offload[titan]'"
    ) from missing


def with_offload(
    spec: ModelSpec, groups: Patterns | None = None, config: OffloadConfig | None = None
) -> ModelSpec:
    """Make a copy of ``spec`` whose pipelines offload.

    Args:
        spec: The ``model_spec`` of a ``Trainer.Config``.
        groups: Groups as of :func:`pp_offload.attach`, with names in the whole model: a stage keeps
            them. None if the model marks its groups itself.
        config: Options; those of the current manager when None.

    Raises:
        TypeError: ``spec`` is no ``ModelSpec``.
        ValueError: The model of the spec has no pipeline.
    """
    check_kind("spec", spec, ModelSpec, "the model_spec of a torchtitan.trainer.Trainer.Config")
    if spec.pipelining_fn is None:
        raise ValueError(
            f"pipelining_fn of {spec.name} is None, so this model has no pipeline; set "
            "activation_checkpoint to OffloadAC.Config() instead"
        )
    make_schedule, parallelize = spec.pipelining_fn, spec.parallelize_fn

    @functools.wraps(make_schedule)
    def pipelining_fn(*args: Any, **kwargs: Any) -> Any:
        result = make_schedule(*args, **kwargs)
        attach(result[0], groups, config)
        return result

    @functools.wraps(parallelize)
    def parallelize_fn(model: Module, *, parallel_dims: Any, **kwargs: Any) -> Any:
        if not parallel_dims.pp_enabled:
            warnings.warn(
                "with_offload offloads nothing, for pipeline_parallel_degree is 1; set "
                "activation_checkpoint to OffloadAC.Config() instead",
                stacklevel=2,
            )
        return parallelize(model, parallel_dims=parallel_dims, **kwargs)

    return dataclasses.replace(spec, pipelining_fn=pipelining_fn, parallelize_fn=parallelize_fn)


class OffloadAC(FullAC):
    """Recompute each block in backward, as ``FullAC`` does; offload the block's inputs to the host.

    Read statistics at any block: ``model.layers["0"].recompute.stash.statistics()``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """Options of ``FullAC``, without ``debug``, and of the offload."""

        min_offload_size: int = 1024
        """In bytes. Smaller tensors stay on the device."""

        offload: Annotated[OffloadConfig, tyro.conf.Suppress] = field(default_factory=OffloadConfig)
        """Tiers and limits on them. Set in a config registry, not on the command line."""

    def _wrap_block(self, module: Module, *, base_fqn: str | None = None) -> Module:
        if self.config.debug:
            raise ValueError("debug is True, which OffloadAC does not have; use FullAC to debug")
        block = checkpoint_wrapper(
            module,
            offload_inputs=True,
            min_offload_size=self.config.min_offload_size,
            config=self.config.offload,
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
        )
        block.register_forward_pre_hook(_refuse_capture)
        # torchtitan compiles the object in the block's place as one graph. An offloading
        # checkpoint cannot be in a graph, so it calls a compiled block.
        block.compile = module.compile  # type: ignore[method-assign]
        return block


def _refuse_capture(block: CheckpointedModule, inputs: Any) -> None:
    stash = block.recompute.stash
    if stash is not None and stash.backend.is_capturing:
        raise NotWhileCapturingError(
            "OffloadAC cannot be part of a captured CUDA graph; set "
            "config.training.disable_cuda_graphs = True, or --training.disable_cuda_graphs"
        )
