"""Transformer Engine's own switch of offload, on while hooks of ours are in place.

    is_on = turn_on()
    ...                   # a forward whose saved tensors go through our hooks
    turn_off(is_on)

NOTE [ Transformer Engine ]
    TE's FP8 layers save a quantized copy of the weight with every microbatch. They mark the copy,
    by an attribute in ``MARKS`` of ``_core/eligibility.py``, only while TE's own offload is on.
    Only then do they hold the parameter for fused gradients, since hooks return a plain tensor in
    its place. The switch is a variable of the process; each generation of TE's offload has another.

Source: Transformer Engine ``pytorch/cpu_offload.py`` and ``cpu_offload_v1.py``; Megatron-LM
``PipelineOffloadManager.__enter__``.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

SWITCHES = {
    "transformer_engine.pytorch.cpu_offload": ("CPUOffloadEnabled", "OFFLOAD_SYNCHRONIZER"),
    "transformer_engine.pytorch.cpu_offload_v1": ("CPUOffloadEnabled",),
}
"""Variables by module; each is off while it is False or None."""

_lock = threading.Lock()
_before: list[tuple[ModuleType, str, Any]] = []
_num_on = 0


def turn_on() -> bool:
    """Turn the switch on; return False if Transformer Engine is not loaded."""
    global _num_on
    if "transformer_engine" not in sys.modules:
        return False
    with _lock:
        _num_on += 1
        for name, variables in SWITCHES.items():
            module = sys.modules.get(name)
            for variable in variables:
                value = getattr(module, variable, True)
                if module is not None and not value:
                    _before.append((module, variable, value))
                    setattr(module, variable, True)
    return True


def turn_off(is_on: bool) -> None:
    """Restore the switch when its last user has turned it off."""
    global _num_on
    if not is_on:
        return
    with _lock:
        _num_on -= 1
        while not _num_on and _before:
            setattr(*_before.pop())
