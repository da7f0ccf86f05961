"""Errors of pp_offload: what was found, what was expected, what to do.

Everything raised on purpose derives from :class:`OffloadError`, or is a plain ``ValueError``,
``TypeError`` or ``KeyError`` for an argument that cannot be right. A bare device error never
reaches the user.

NOTE [ Failures in the log ]
    A handler may keep what it is given: a queue, a test, a service for errors. An exception has the
    frames that it came through, and these have tensors, which would stay on the device. So the log
    is given ``str(failure)``.
"""


class OffloadError(RuntimeError):
    """Base of all errors this package raises."""


class ConfigError(OffloadError, ValueError):
    """An :class:`~pp_offload.OffloadConfig` is invalid; the message lists every violation."""


class OptionError(ConfigError, TypeError):
    """An option does not exist. Python's own error for unknown arguments is a ``TypeError``."""


class GroupStateError(OffloadError):
    """A group or chunk was asked to do what its state does not allow."""


class SavedTensorModifiedError(OffloadError):
    """A saved tensor was changed in place before its bytes were safe.

    Autograd raises a ``RuntimeError`` for the same program; this error is one, and names the group.
    """


class TierError(OffloadError):
    """A tier could not bring back its bytes. The next use tries again."""


class DiskTierError(TierError):
    """The disk tier could not write or read. Names the directory, the offset and the cause."""


class VerifyError(OffloadError):
    """Reloaded bytes differ from the offloaded bytes. Only ``verify=True`` compares them."""


class RaceError(OffloadError):
    """Two conflicting accesses on the simulated backend are not ordered by a wait."""


class CaptureError(OffloadError):
    """The simulated backend was asked for what CUDA forbids while a graph is captured."""


class NotWhileCapturingError(OffloadError, MemoryError):
    """Memory or a disk was needed that a graph, which is being captured, cannot use."""


class ClosedError(OffloadError):
    """A tier, stream or handle was used after it was closed."""


class ForkedError(OffloadError):
    """A forked process used an object of the process it was forked from."""
