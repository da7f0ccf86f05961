"""Checkpoints that belong to no model: calls with equal options share one engine.

A function that is called per layer has nowhere to keep streams and host memory, and the inputs of
layers that are wrapped separately shall come back ahead of each other's backward. So the engine for
some options stays for the process, and is found by these options.

    recompute = checkpoint_function(offload_inputs=True)
    assert recompute is checkpoint_function(offload_inputs=True)
    y = recompute(layer, x, mask=mask)
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.options import FullACParams, SelectiveOpACParams
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.backends import Backend, check_backend

ATTRIBUTE = "_pp_offload_checkpoints"
"""Of a backend: its engines. An engine holds its backend, so a table of ours would keep both for
good; as an attribute of the backend they are a cycle, which goes when nobody else has the backend.
"""

OP_OPTIONS = {option.name for option in fields(SelectiveOpACParams)} - {
    option.name for option in fields(FullACParams)
}

_lock = threading.Lock()
_of_default: list[SharedRecompute] = []
"""Engines of the default backend. Few, so a search costs less than a key: options may hold
mappings.
"""


class SharedRecompute(Recompute):
    """The object that runs functions under a checkpoint with some options.

    Args:
        params: The options.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Attributes:
        params: See above.

    Raises:
        TypeError: ``backend`` is no backend.
    """

    def __init__(self, params: FullACParams, backend: Backend | None = None) -> None:
        if backend is not None:
            check_backend(backend)
        self.params = params
        policy = params.policy()
        stash = None
        if params.offload_inputs or (policy is not None and policy.offload):
            size = params.min_offload_size
            stash = ActivationStash(
                "checkpoints", params.config, min_offload_size=size, backend=backend
            )
        super().__init__(
            stash,
            policy=policy,
            offload_inputs=params.offload_inputs,
            use_reentrant=params.use_reentrant,
            preserve_rng_state=params.preserve_rng_state,
            determinism_check=params.determinism_check,
            early_stop=params.early_stop,
        )

    def __reduce__(self) -> Any:
        if self not in _of_default:  # it is a model's, or has a backend of its own
            return super().__reduce__()
        return _shared_for, (self.params,)


def checkpoint_function(*, backend: Backend | None = None, **options: Any) -> SharedRecompute:
    """The function that runs others under a checkpoint with these options.

    For whatever takes such a function: ``f(function, *args, **kwargs)`` returns what ``function``
    does, which runs again in backward.

    Args:
        backend: Device to work on; the accelerator where there is one, else the CPU. Make one
            once: each has an engine of its own, for as long as it is there.
        options: Those of :class:`FullACParams`, or of :class:`SelectiveOpACParams` where operators
            are named.

    Returns:
        The same object for equal options and the same backend. It has ``counts`` of what was done
        so far, and, where anything is offloaded, ``stash.statistics()``.

    Raises:
        ValueError: A value cannot be right, or an option does not exist; the message names near
            ones.
        TypeError: ``backend`` is no backend.
    """
    kind = SelectiveOpACParams if OP_OPTIONS & options.keys() else FullACParams
    return _shared_for(kind(**options), backend)


def _shared_for(params: FullACParams, backend: Backend | None = None) -> SharedRecompute:
    if backend is None:
        engines = _of_default
    else:
        check_backend(backend)
        engines = vars(backend).setdefault(ATTRIBUTE, [])  # not setattr: it may be frozen
    with _lock:
        for engine in engines:
            if type(engine.params) is type(params) and engine.params == params:
                return engine
        engines.append(SharedRecompute(params, backend))
        return engines[-1]
