"""Offload in the pipelines of torchtitan, whose trainer stays as it is.

    # my_offload.py, which --experimental.custom_import=my_offload imports
    spec = get_train_spec("llama3")
    register_train_spec("llama3", with_offload(spec, {"mlp": "layers.*.feed_forward"}))

A spec of torchtitan names the function that cuts a model into stages, has them checkpointed,
compiled and sharded, and makes a schedule of them. What that function returns is attached, so
groups are marked on what trains. Parameters may be on meta then, as torchtitan has them: every step
looks at what they are. Nothing of torchtitan is imported here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pp_offload._common.checks import said
from pp_offload.config import OffloadConfig, check_config
from pp_offload.modules import Patterns, check_patterns
from pp_offload.pipelining import attach

Spec = TypeVar("Spec")

PIPELINING = "pipelining_fn"
"""The field of a spec; what it holds returns the schedule first."""


def with_offload(
    spec: Spec, groups: Patterns | None = None, config: OffloadConfig | None = None
) -> Spec:
    """A spec whose pipelines offload, and which is ``spec`` otherwise.

    Args:
        spec: A ``TrainSpec`` of torchtitan 0.2, or a ``ModelSpec`` of later ones.
        groups: As of :func:`pp_offload.attach`. Names are those of the whole model: a stage keeps
            them. None if the model marks its groups itself.
        config: Options; those of the current manager when None.

    Raises:
        TypeError: ``spec`` is no such spec, ``groups`` no mapping of names to patterns, or
            ``config`` no :class:`OffloadConfig`.
        ValueError: The model of the spec has no pipeline.
    """
    fields = dataclasses.fields(spec) if _is_record(spec) else ()  # type: ignore[arg-type]
    if PIPELINING not in [field.name for field in fields]:
        raise TypeError(
            f"spec is {said(spec)}, expected a spec of torchtitan, such as "
            "torchtitan.protocols.train_spec.get_train_spec('llama3'); "
            "pip install 'pp_offload[titan]' if it is not there"
        )
    inner = getattr(spec, PIPELINING)
    if inner is None:
        raise ValueError(
            f"the {PIPELINING} of the {type(spec).__name__} is None, so its model has no pipeline; "
            "use OffloadActivations for activations of a model on one device"
        )
    if groups is not None:
        check_patterns(groups)
    if config is not None:
        check_config(config)
    return dataclasses.replace(spec, **{PIPELINING: _attaching(inner, groups, config)})  # type: ignore


def _is_record(spec: object) -> bool:
    return dataclasses.is_dataclass(spec) and not isinstance(spec, type)


def _attaching(
    inner: Callable[..., Any], groups: Patterns | None, config: OffloadConfig | None
) -> Callable[..., Any]:
    @functools.wraps(inner)
    def pipelining_fn(*args: Any, **kwargs: Any) -> Any:
        made = inner(*args, **kwargs)
        attach(made[0], groups, config)
        return made

    return pipelining_fn
