"""What a user can choose, in one frozen record that is checked as a whole.

OffloadConfig(host_budget_bytes=64 * 2**30)
OffloadConfig.from_dict({"host_budget_bytes": "64GiB"})
OffloadConfig.from_toml("train.toml", "offload")
OffloadConfig.from_env()                                 # PP_OFFLOAD_HOST_BUDGET_BYTES=64GiB
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from pp_offload._common.checks import (
    check_kind,
    count_problem,
    flag_problem,
    said,
    takes_options_by_name,
)
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.option_sources import UNITS, parse_size, read_env, read_table
from pp_offload.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


TIERS = ["host", "disk"]
"""The names of all tiers. :func:`add_tier_name` adds one."""

SPLIT_BACKWARD = ("reload", "keep")
"""What may happen between the two parts of a backward."""

REMATERIALIZE = ("cheap", "none")
"""What may be computed again."""


AUTO = "auto"
"""Chosen by the engine."""

COUNTS = (
    "min_offloaded_tensor_size",
    "delta_offload_bytes_across_pp_ranks",
    "max_in_flight_bytes",
    "prefetch_bytes",
    "device_limit_bytes",
    "host_budget_bytes",
)
"""Options that are integers of at least zero."""

UNIT_OF_NAME = {"min_offloaded_tensor_size": "elements"}
"""Units of those of them whose names do not end with theirs."""

AUTO_COUNTS = ("max_in_flight_bytes", "prefetch_bytes", "device_limit_bytes")
"""Those of them that may be :data:`AUTO`."""

OPTIONAL_COUNTS = ("device_limit_bytes", "host_budget_bytes")
"""Those of them that may be None."""

WHAT_STAYS = ("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks")
"""Options that say it where neither a plan nor a limit does."""

ENV_PREFIX = "PP_OFFLOAD_"
"""Of the environment variables that :meth:`OffloadConfig.from_env` reads."""


@takes_options_by_name
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of the engine.

    Raises:
        ConfigError: One error that lists every violation, options that do not exist among them.
    """

    min_offloaded_tensor_size: int = 1024 * 1024
    """Tensors with fewer elements stay on the device. In elements, as in the reference: the default
    is 4 MiB of float32. ``min_offload_size`` of contexts and checkpoints is in bytes.

    Where a step offloads nothing of a group for that reason, one warning says so.
    """

    delta_offload_bytes_across_pp_ranks: int = 0
    """Pipeline rank r keeps at least r times this many bytes on its device, from the second step
    on.
    """

    activation_offload_fraction: float = 1.0
    """Of the groups of a chunk that may be offloaded, the share that is, 0 to 1, from the second
    step on. A share of their number, not of their bytes.

    The last ones in forward order stay, for backward uses them first.
    """

    max_in_flight_bytes: int | Literal["auto"] = "auto"
    """Device bytes that may wait for their copy. Over it compute waits for the oldest copies, but
    never for those of the group that was offloaded last, unless this is 0: then for all.

    ``"auto"`` means twice the largest group, at least 512 MiB, in the first steps. Where the device
    has a clock and ``tiers`` is ``("host",)``, complete steps of a manager are timed, from one
    ``reset()`` to the next, which an attached schedule calls. Their times say how little is enough
    for compute never to wait, as far as the link to the host permits and the device has room: 512
    MiB or more. One line in the log says what was chosen.

    This also limits the host bytes on the way to and from the disk.
    """

    prefetch_bytes: int | Literal["auto"] = "auto"
    """Device bytes that may be reloaded ahead of their use. One tensor may always be so, however
    large.

    ``"auto"`` means twice the largest group, at least 256 KiB, until times say how little is
    enough, as for ``max_in_flight_bytes``.
    """

    plan: OffloadPlan | str | os.PathLike[str] | None = None
    """Which groups stay, from the first step on: a plan that `pp-offload plan` has written, or one
    of :func:`pp_offload.plan.choose`, which also says what of ``max_in_flight_bytes`` and
    ``prefetch_bytes`` is ``"auto"`` here. In place of ``activation_offload_fraction`` and
    ``delta_offload_bytes_across_pp_ranks``.

    A group that a plan does not know, or that has other bytes than there, leaves, with one line in
    the log; then the engine chooses bounds by itself.
    """

    device_limit_bytes: int | str | None = "auto"
    """Device bytes that tensors may take together, also as a size such as ``"60GiB"``. As many
    groups stay as it has room for, as the first steps show it, each rank on its own: as they were
    saved, or without what ``rematerialize`` computes again; the rest leaves. ``"auto"`` means the
    memory of the device, less what others hold and the gaps of PyTorch's allocator. None means no
    limit: all groups leave, as they do on a CPU. A plan, an ``activation_offload_fraction`` below 1
    and ``delta_offload_bytes_across_pp_ranks`` say themselves what stays: with them it is
    ``"auto"`` or None, and there is no limit.

    A limit that is kept by having groups leave, not by refusing memory: where the device needs more
    although all leave, one warning says how much.
    """

    rematerialize: str = "cheap"
    """``"cheap"``: what cheap operators, such as norms and activation functions, made of saved
    tensors is not copied, but computed again from them, where they give the same bits. ``"none"``:
    all is copied.
    """

    split_backward: str = "reload"
    """For schedules whose backward comes in two parts, gradients of inputs first: what both parts
    use is given up in between and reloaded (``"reload"``), or stays on the device (``"keep"``).
    """

    host_budget_bytes: int | None = None
    """Host bytes that all managers of this process may take together. None means this rank's part
    of 80 % of what the kernel and the cgroups would still give.

    Over it a group goes to the next tier, or stays on the device, with one warning.
    """

    tiers: tuple[str, ...] = ("host",)
    """Where offloaded bytes go: ``("host",)``, ``("disk",)``, or ``("host", "disk")``, where the
    disk takes what is over the host budget.

    The disk needs some host memory to pass through, pinned behind an accelerator. Where the device
    is the host, only the disk frees memory.
    """

    disk_dir: str | os.PathLike[str] | None = None
    """Directory of the disk tier's file, one per rank. None means that of temporary files. Made if
    it is not there.

    Put it on a real disk: on a file system in memory nothing is saved. The file has no name and
    mode 0600. It is gone with the process and those forked from it, however they end.
    """

    verify: bool = False
    """Compare what comes back with what left, and log which offloaded storages are still on the
    device and who holds them. Slow.
    """

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Options as a file has them: bytes also as sizes, such as ``"8GiB"``, tuples as lists.

        Args:
            options: By name.

        Raises:
            ConfigError: It lists every violation.
            TypeError: ``options`` is no mapping.
        """
        check_kind("options", options, Mapping, "options by name")
        return cls(**{str(name): _as_option(name, value) for name, value in options.items()})

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], table: str = "") -> Self:
        """Options of a TOML file, as :meth:`from_dict` takes them.

        Args:
            path: Of the file.
            table: The table that holds them, as its header names it: ``"offload"``, or
                ``"tool.pp_offload"``. The whole file if empty.

        Raises:
            ConfigError: There is no such table, the file is no TOML, or an option is wrong.
            OSError: The file cannot be read.
        """
        options = read_table(path, table)
        try:
            return cls.from_dict(options)
        except ConfigError as failure:
            raise type(failure)(f"in {os.fspath(path)}: {failure}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Options of the environment: ``PP_OFFLOAD_`` and the name in capitals.

        ``PP_OFFLOAD_TIERS=host,disk``, ``PP_OFFLOAD_PREFETCH_BYTES=2GiB``, ``PP_OFFLOAD_VERIFY=1``.
        Nothing reads them unless this is called.

        Args:
            environ: The variables; those of the process when None.

        Raises:
            ConfigError: It lists every violation, and variables that are no option.
        """
        texts = read_env(ENV_PREFIX, os.environ if environ is None else environ)
        try:
            return cls.from_dict({name: _of_text(name, text) for name, text in texts.items()})
        except ConfigError as failure:
            raise type(failure)(f"in variables {ENV_PREFIX}...: {failure}") from None

    def to_dict(self) -> dict[str, Any]:
        """All options as JSON can hold them; :meth:`from_dict` makes an equal record of them."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        found["tiers"] = list(self.tiers)
        found["plan"] = self.plan.to_dict() if isinstance(self.plan, OffloadPlan) else self.plan
        found["disk_dir"] = None if self.disk_dir is None else os.fspath(self.disk_dir)
        return found

    @property
    def offload_plan(self) -> OffloadPlan | None:
        """The option ``plan``, whose file is read when the record is made."""
        return self.plan if isinstance(self.plan, OffloadPlan) else None

    @property
    def limit(self) -> int | str | None:
        """The option ``device_limit_bytes``; None where other options say what stays."""
        says_what_stays = self.plan is not None or _has_no_defaults(self, WHAT_STAYS)
        return None if says_what_stays else self.device_limit_bytes

    def __post_init__(self) -> None:
        self._read_limit()
        problems = [*self._read_plan(), *self._violations()]
        if problems:
            raise ConfigError("OffloadConfig is invalid: " + "; ".join(problems))

    def _read_plan(self) -> Iterator[str]:
        plan = self.plan
        if plan is None or isinstance(plan, OffloadPlan):
            return
        if plan == AUTO:
            yield f"plan is {AUTO!r}, which is gone: write device_limit_bytes={AUTO!r}, or a number"
            return
        if not isinstance(plan, str | os.PathLike):
            yield (f"plan is {said(plan)}, expected an OffloadPlan, the path of its file, or None")
            return
        try:
            object.__setattr__(self, "plan", OffloadPlan.load(plan))
        except (OSError, ConfigError) as failure:
            yield f"plan cannot be read: {failure}"

    def _read_limit(self) -> None:
        limit = self.device_limit_bytes
        if isinstance(limit, str) and limit != AUTO and (nbytes := parse_size(limit)) is not None:
            object.__setattr__(self, "device_limit_bytes", nbytes)

    def _violations(self) -> Iterator[str]:
        for name in COUNTS:
            value = getattr(self, name)
            problem = count_problem(name, value, unit=UNIT_OF_NAME.get(name, "bytes"))
            if value is None and name in OPTIONAL_COUNTS:
                continue
            if name in AUTO_COUNTS and (isinstance(value, str) and value == AUTO):
                continue
            if problem:
                yield problem + _also(name, value)
        if not _is_fraction(self.activation_offload_fraction):
            fraction = said(self.activation_offload_fraction)
            yield f"activation_offload_fraction is {fraction}, expected 0 to 1"
        ways = [] if self.plan is None else ["plan"]
        if isinstance(self.device_limit_bytes, int):
            ways.append("device_limit_bytes")
        if _has_no_defaults(self, WHAT_STAYS):
            ways.append(" or ".join(WHAT_STAYS))
        if len(ways) > 1:
            yield f"{' and '.join(ways)} are given, expected one way to say what stays"
        for name, values in (("split_backward", SPLIT_BACKWARD), ("rematerialize", REMATERIALIZE)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in values:
                expected = " or ".join(map(repr, values))
                yield f"{name} is {said(value)}, expected {expected}"
        if problem := flag_problem("verify", self.verify):
            yield problem
        if not isinstance(self.tiers, tuple) or self.tiers not in _chains():
            yield (
                f"tiers is {said(self.tiers)}, expected one of {', '.join(map(repr, _chains()))}: "
                f"a tuple, the host before the {' or the '.join(TIERS[1:])}"
            )
        if self.disk_dir is not None:
            yield from self._violations_of_directory(self.disk_dir)

    def _violations_of_directory(self, given: object) -> Iterator[str]:
        path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        if not isinstance(path, str) or not path:
            yield f"disk_dir is {said(given)}, expected a path, or None"
        elif "\0" in path:
            yield f"disk_dir is {said(path)}, with a NUL byte inside, expected a path without"
        elif self.tiers in _chains() and "disk" not in self.tiers:
            yield (
                f"disk_dir is {path!r}, but tiers is {self.tiers!r}; add "
                '"disk" to tiers, or leave disk_dir out'
            )


def _as_option(name: object, value: Any) -> Any:
    """A value of a file as the record has it. What is wrong stays, for the record to say so."""
    if isinstance(value, list):
        return tuple(value)
    if name == "plan" and isinstance(value, Mapping):
        return OffloadPlan.from_dict(value)
    if isinstance(value, str) and name in COUNTS and name != "min_offloaded_tensor_size":
        nbytes = parse_size(value)
        return value if nbytes is None else nbytes
    return value


def _of_text(name: str, text: str) -> Any:
    """The value of an environment variable. What is wrong stays, for the record to say so."""
    if name == "tiers":
        return tuple([part.strip() for part in text.split(",")])
    if name == "verify":
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    if name == "min_offloaded_tensor_size" and text.isdecimal():
        return int(text)
    if name == "activation_offload_fraction":
        with suppress(ValueError):
            return float(text)
    return text


def _also(name: str, value: object) -> str:
    """What else is expected of a count, for the end of a message."""
    auto = f", or {AUTO!r}" if name in AUTO_COUNTS else ""
    if not isinstance(value, str) or name == "min_offloaded_tensor_size":
        return auto
    return f"{auto}; bytes of a file or the environment may have a unit: {', '.join(UNITS)}"


def add_tier_name(name: str) -> None:
    """From now on the options may name this tier, which ``_core/tiers.py`` can make.

    This module lies below that one, so it knows tiers by name alone.
    """
    if name not in TIERS:
        TIERS.append(name)


def _chains() -> list[tuple[str, ...]]:
    """Each tier alone, or behind the host."""
    return [*((name,) for name in TIERS), *(("host", name) for name in TIERS if name != "host")]


def _has_no_defaults(config: OffloadConfig, names: tuple[str, ...]) -> bool:
    defaults = {one.name: one.default for one in fields(config)}
    return any(getattr(config, name) != defaults[name] for name in names)


def _is_fraction(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1  # type: ignore[operator]


def without_plan(config: OffloadConfig) -> OffloadConfig:
    """The same options, without a plan and a limit, which is kept by making one."""
    return replace(config, plan=None, device_limit_bytes=None)


def check_config(config: object) -> None:
    """Check options that must be given.

    Raises:
        TypeError: They are no :class:`OffloadConfig`.
    """
    advice = "write OffloadConfig(**options)" if isinstance(config, dict) else ""
    if config is None:
        advice = "write OffloadConfig() for the defaults"
    check_kind("config", config, OffloadConfig, "an OffloadConfig", advice)


def config_or_default(config: OffloadConfig | None) -> OffloadConfig:
    """``config`` itself, or the defaults for None.

    Raises:
        TypeError: They are no :class:`OffloadConfig`.
    """
    if config is None:
        return OffloadConfig()
    check_config(config)
    return config
