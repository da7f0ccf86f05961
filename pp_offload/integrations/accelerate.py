"""Offload in a loop with an ``Accelerator`` of Hugging Face, of which this imports nothing.

    offload = ActivationOffload(accelerator, model)  # after prepare
    with accelerator.accumulate(model):
        with offload:
            loss = model(batch)

The accelerator tells which microbatch is the last of a step; groups learn from steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module

from pp_offload._core.statistics import moved_text
from pp_offload.config import OffloadConfig
from pp_offload.integrations.forwards import Figures, offload_of
from pp_offload.modules import Patterns


class ActivationOffload:
    """Context for each training forward of a model, which offloads tensors saved for backward.

    ``statistics()`` returns bytes moved and in use, and ``figures()`` bytes moved since its last
    call, for ``accelerator.log``. ``close()`` removes groups from the model.

    Args:
        accelerator: An ``accelerate.Accelerator``.
        model: The model that ``prepare`` of the accelerator returned.
        groups: Group name to patterns of module names, as of
            :func:`pp_offload.offload_modules`; None for all activations but the output head's.
        config: Options of the engine; those of the current manager, or the defaults, when None.
        options: Without groups, those of
            :func:`pp_offload.get_lora_act_offloading_ctx_manager`, such as ``head``.

    Raises:
        ValueError: A pattern matches nothing, or an option is invalid, or given with groups.
        TypeError: An option is unknown, ``model`` is no module, ``groups`` no mapping, or
            ``config`` no :class:`OffloadConfig`.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Module,
        groups: Patterns | None = None,
        config: OffloadConfig | None = None,
        **options: Any,
    ) -> None:
        self._accelerator = accelerator
        self._forward, self.statistics, self.close = offload_of(model, groups, config, options)
        self.figures = Figures(self.statistics).since_last
        self._entered: list[ExitStack] = []
        self._step, self._was_last = 0, True

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {moved_text(self.statistics())}>"

    def __enter__(self) -> ActivationOffload:
        """Begin the forward of a microbatch."""
        stack = ExitStack()
        if torch.is_grad_enabled():
            self._step += self._was_last
            self._was_last = self._accelerator.sync_gradients
            stack.enter_context(self._forward(self._step))
        self._entered.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        """End the forward."""
        self._entered.pop().__exit__(*error)
