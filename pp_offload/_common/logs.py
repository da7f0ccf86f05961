"""Loggers of this package. Each line names the package, and the rank if there are several.

logger = logger_of(__name__)
logger.warning("group '%s' never ran", name)  # pp_offload [rank 3]: group 'mlp' never ran
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # takes no type argument before Python 3.11


class _RankLogger(_Adapter):
    """Logger whose lines begin with the package, and with the rank under ``torch.distributed``."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        has_rank = dist.is_available() and dist.is_initialized()
        rank = f" [rank {dist.get_rank()}]" if has_rank else ""
        return f"pp_offload{rank}: {msg}", kwargs


def logger_of(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Make the logger of a module."""
    return _RankLogger(logging.getLogger(name), {})
