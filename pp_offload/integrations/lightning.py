"""Offload in the Trainer of Lightning, as a callback around the module's ``training_step``.

trainer = Trainer(callbacks=[ActivationOffload({"mlp": "model.layers.*.mlp"})])
"""

from __future__ import annotations

from typing import Any

from pp_offload._common.undo import UndoStack
from pp_offload._core.statistics import OffloadStatistics
from pp_offload.config import OffloadConfig
from pp_offload.integrations.forwards import Figures, ForwardOffload, check_choice, offload_of
from pp_offload.modules import Patterns

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


class ActivationOffload(Callback):
    """Callback that offloads tensors that training steps save for backward.

    Args:
        groups: Group name to patterns of module names, as of
            :func:`pp_offload.offload_modules`; None for all activations but the output head's.
        config: Options of the engine; those of the current manager, or the defaults, when None.
        log: Whether ``offload/bytes_offloaded`` and the like are logged for each step of the
            optimizer; see :mod:`pp_offload.integrations.forwards`.
        options: Without groups, those of
            :func:`pp_offload.get_lora_act_offloading_ctx_manager`, such as ``head``.

    Raises:
        ValueError: Options are given together with groups; when training starts, also if one is
            invalid, a pattern matches nothing, or the head does not exist.
        TypeError: ``config`` is no :class:`OffloadConfig`; when training starts, also if an option
            is unknown.
    """

    def __init__(
        self,
        groups: Patterns | None = None,
        config: OffloadConfig | None = None,
        *,
        log: bool = True,
        **options: Any,
    ) -> None:
        check_choice(groups, config, options)
        self._wanted = (groups, config, options)
        self._logs = log
        self._offload: ForwardOffload | None = None
        self._figures: Figures | None = None
        self._last_step = 0
        self._undo = UndoStack()

    def statistics(self) -> OffloadStatistics | None:
        """Bytes moved in the last training, and bytes in use; None before the first training."""
        return None if self._offload is None else self._offload.statistics()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the offload of the module, which a strategy may have wrapped and sharded."""
        self._undo.close()
        self._offload = offload = offload_of(pl_module, *self._wanted)
        self._figures, self._last_step = Figures(offload.statistics), trainer.global_step

        def training_step(inner: Any, *args: Any, **kwargs: Any) -> Any:
            with offload.forward(trainer.global_step):
                return inner(*args, **kwargs)

        self._undo.callback(offload.close)
        self._undo.wrap(pl_module, "training_step", training_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the bytes that were moved, if the optimizer has made a step."""
        if self._logs and self._figures and trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            figures = {k: float(v) for k, v in self._figures.since_last().items()}
            pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._undo.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the offload: Lightning calls no other hook."""
        self.on_train_end(trainer, pl_module)
