"""Offload in the Trainer of Lightning, as a callback.

    trainer = Trainer(callbacks=[ActivationOffload()])                           # all activations
    trainer = Trainer(callbacks=[ActivationOffload({"mlp": "model.layers.*.mlp"})])      # groups

While the module trains, its ``training_step`` runs in an offload; sanity checks, validation, tests
and prediction do not. The callback acts after strategies have wrapped and sharded the module. Each
step of the optimizer logs what it moved through the module's own ``log``.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn import Module

from pp_offload._common.checks import check_flag
from pp_offload._core.statistics import OffloadStatistics
from pp_offload.config import OffloadConfig
from pp_offload.integrations.figures import Figures
from pp_offload.integrations.forwards import ForwardOffload, check_choice, offload_of
from pp_offload.modules import Patterns, check_patterns

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError as missing:
        raise ImportError(
            "neither lightning nor pytorch_lightning is installed; "
            "pip install 'pp_offload[lightning]'"
        ) from missing

WRAPPED = "training_step"


class ActivationOffload(Callback):
    """Callback that offloads tensors that training steps save for backward.

    Args:
        groups: Group name to patterns of module names, as of
            :func:`pp_offload.offload_modules`; None for all activations but the output head's.
        config: Options of the engine; those of the current manager, or the defaults, when None.
        log: Whether ``offload/bytes_offloaded`` and the like are logged for each step of the
            optimizer; see :mod:`pp_offload.integrations.figures`.
        options: Without groups, those of
            :func:`pp_offload.get_lora_act_offloading_ctx_manager`, such as ``head``.

    Raises:
        ValueError: An option is unknown, cannot be right, or goes with no groups; when training
            starts, also of a pattern that matches nothing, or a head that is not there.
        TypeError: ``groups`` is no mapping, or ``config`` no :class:`OffloadConfig`.
    """

    def __init__(
        self,
        groups: Patterns | None = None,
        config: OffloadConfig | None = None,
        *,
        log: bool = True,
        **options: Any,
    ) -> None:
        if groups is not None:
            check_patterns(groups)
        check_choice(groups, config, options)
        check_flag("log", log)
        self._wanted = (groups, config, options)
        self._logs = log
        self._running: _Running | None = None
        self._offload: ForwardOffload | None = None

    def statistics(self) -> OffloadStatistics | None:
        """Bytes moved in the last training, and in use; None before the first training."""
        return None if self._offload is None else self._offload.statistics()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the offload of the module, which a strategy may have wrapped."""
        self._close()
        self._offload = offload_of(pl_module, *self._wanted)
        self._running = _Running(trainer, pl_module, self._offload)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the bytes that were moved, if the optimizer has made a step."""
        if self._logs and self._running is not None and self._running.has_stepped():
            figures = {k: float(v) for k, v in self._running.figures.since_last().items()}
            pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the offload."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the offload: Lightning calls no other hook."""
        self._close()

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


class _Running:
    """Offload of a training.

    Attributes:
        figures: Figures of the offload, for logs.
    """

    def __init__(self, trainer: Any, module: Module, offload: ForwardOffload) -> None:
        self._offload = offload
        self.figures = Figures(offload.statistics)
        self._trainer = trainer
        self._module = module
        self._seen = trainer.global_step
        self._own = module.__dict__.get(WRAPPED)
        inner = getattr(module, WRAPPED)

        @functools.wraps(inner)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with offload.forward(trainer.global_step):
                return inner(*args, **kwargs)

        module.__dict__[WRAPPED] = training_step

    def has_stepped(self) -> bool:
        """Whether the optimizer made a step since the last call."""
        before, self._seen = self._seen, self._trainer.global_step
        return before != self._seen

    def close(self) -> None:
        """Restore the module."""
        self._module.__dict__.pop(WRAPPED, None)
        if self._own is not None:
            self._module.__dict__[WRAPPED] = self._own
        self._offload.close()
