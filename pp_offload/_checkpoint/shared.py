"""Checkpoints that belong to no model: calls with equal options share one engine.

A function that is called per layer has nowhere to keep streams and host memory, and layers that are
wrapped one by one shall come back ahead of each other's backward. So what was made for some options
stays for the process, and is found by them.

    recompute = checkpoint_function(offload_inputs=True)
    assert recompute is checkpoint_function(offload_inputs=True)
    y = recompute(layer, x, mask=mask)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.options import FullACParams, SelectiveOpACParams
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.backends import Backend, check_backend


def make_recompute(
    params: FullACParams,
    backend: Backend | None = None,
    kind: Callable[..., Recompute] = Recompute,
) -> Recompute:
    """What runs functions as ``params`` say.

    Raises:
        TypeError: ``backend`` is none.
    """
    if backend is not None:
        check_backend(backend)
    policy = params.policy()
    stash = None
    if params.offload_inputs or (policy is not None and policy.offload):
        stash = ActivationStash(
            "checkpoints", params.config, min_offload_size=params.min_offload_size, backend=backend
        )
    return kind(
        stash,
        policy=policy,
        offload_inputs=params.offload_inputs,
        use_reentrant=params.use_reentrant,
        preserve_rng_state=params.preserve_rng_state,
        determinism_check=params.determinism_check,
        early_stop=params.early_stop,
    )


class SharedRecompute(Recompute):
    """One that is found by its options, in another process too.

    Attributes:
        params: Those options.
    """

    params: FullACParams

    def __reduce__(self) -> Any:
        if _default_for(self.params) is not self:  # it has a backend of its own
            return super().__reduce__()
        return _default_for, (self.params,)


def checkpoint_function(*, backend: Backend | None = None, **options: Any) -> Recompute:
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
    return _shared_for(params_of(options), backend)


def params_of(options: dict[str, Any]) -> FullACParams:
    """The record of these options: by operator, if one is about operators."""
    is_by_operator = any(one.name in options for one in fields(SelectiveOpACParams)[_NUM_FULL:])
    return (SelectiveOpACParams if is_by_operator else FullACParams)(**options)


_NUM_FULL = len(fields(FullACParams))

_lock = threading.Lock()
_Made = list[tuple[FullACParams, SharedRecompute]]
_of_default: _Made = []
"""Few, so a search costs less than a key: options may hold mappings."""

_of_slotted: dict[int, _Made] = {}
"""By id of a backend, which its engines hold."""

_ATTRIBUTE = "_pp_offload_checkpoints"


def _made_for(backend: Backend | None) -> _Made:
    """What there is for a backend.

    An engine holds its backend, so a table would keep both for good, even one with weak keys. As an
    attribute of the backend they are a cycle, which goes when nobody else has the backend.
    """
    if backend is None:
        return _of_default
    if not hasattr(backend, "__dict__"):  # one with slots: it stays
        return _of_slotted.setdefault(id(backend), [])
    made: _Made = vars(backend).setdefault(_ATTRIBUTE, [])  # not setattr: it may be frozen
    return made


def _shared_for(params: FullACParams, backend: Backend | None) -> SharedRecompute:
    if backend is not None:
        check_backend(backend)
    with _lock:
        known_ones = _made_for(backend)
        for known, recompute in known_ones:
            if type(known) is type(params) and known == params:
                return recompute
        made = make_recompute(params, backend, SharedRecompute)
        assert isinstance(made, SharedRecompute)
        made.params = params
        known_ones.append((params, made))
        return made


def _default_for(params: FullACParams) -> SharedRecompute:
    return _shared_for(params, None)
