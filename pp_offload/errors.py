"""Errors of pp_offload: what was found, what was expected, what to do.

Everything raised on purpose derives from :class:`OffloadError`, or is a plain ``ValueError`` for an
argument that cannot be right. A bare device error never reaches the user.

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
    """Options were given that do not exist. Python's own error for that is a ``TypeError``."""


class GroupStateError(OffloadError):
    """A group or chunk was asked to do what its state does not allow."""


class SavedTensorModifiedError(OffloadError):
    """A saved tensor was changed in place before its bytes were safe.

    Autograd raises a ``RuntimeError`` for the same program; so does this, and it names the group.
    """


class TierError(OffloadError):
    """A tier could not bring back what it was given. Asked for again, it is tried again."""


class DiskTierError(TierError):
    """The disk tier could not write or read; names the directory, the offset and the cause."""


class VerifyError(OffloadError):
    """With ``verify=True``: what came back is not what left."""


class RaceError(OffloadError):
    """The simulated backend saw two conflicting accesses that nothing orders."""


class CaptureError(OffloadError):
    """The simulated backend saw what CUDA forbids while a graph is captured."""


class NotWhileCapturingError(OffloadError, MemoryError):
    """While a graph is captured, memory or a disk was asked for that no graph can use."""


class ClosedError(OffloadError):
    """A tier, stream or handle was used after it was closed."""


class ForkedError(OffloadError):
    """A forked process asked for what belongs to the process it was forked from."""
