"""Offload in the pipelines of torchtitan.

    # my_offload.py, which --experimental.custom_import=my_offload imports
    spec = get_train_spec("llama3")
    register_train_spec("llama3", with_offload(spec, {"mlp": "layers.*.feed_forward"}))

A spec of torchtitan names the function that makes stages and their schedule, after checkpoints,
compile and sharding were applied. The schedule that the function returns is attached. Parameters
may still be on meta: every step looks at them anew. Nothing of torchtitan is imported here.
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
"""Field of a spec: a function whose first result is the schedule."""


def with_offload(
    spec: Spec, groups: Patterns | None = None, config: OffloadConfig | None = None
) -> Spec:
    """Copy a spec so that its pipelines offload.

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
