"""Options of the engine, in one frozen record that is checked as a whole.

OffloadConfig(host_budget_bytes=64 * 2**30)
OffloadConfig.from_dict({"host_budget_bytes": "64GiB"})
OffloadConfig.from_env()                                 # PP_OFFLOAD_HOST_BUDGET_BYTES=64GiB
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pp_offload._common.checks import (
    check_kind,
    count_problem,
    flag_problem,
    said,
    takes_options_by_name,
)
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.option_sources import UNITS, parse_size, read_env
from pp_offload.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


TIERS = ["host", "disk"]
"""Names of all tiers. :func:`add_tier_name` adds another."""

SPLIT_BACKWARD = ("reload", "keep")
REMATERIALIZE = ("cheap", "none")

AUTO = "auto"
"""Value of an option that the engine chooses."""

COUNTS = (
    "min_offloaded_tensor_size",
    "delta_offload_bytes_across_pp_ranks",
    "max_in_flight_bytes",
    "prefetch_bytes",
    "device_limit_bytes",
    "host_budget_bytes",
)
"""Options that are integers of at least zero; in bytes, but for :data:`UNIT_OF_NAME`."""

UNIT_OF_NAME = {"min_offloaded_tensor_size": "elements"}

AUTO_COUNTS = ("max_in_flight_bytes", "prefetch_bytes", "device_limit_bytes")
"""Counts that may be :data:`AUTO`."""

OPTIONAL_COUNTS = ("device_limit_bytes", "host_budget_bytes")
"""Counts that may be None."""

WHAT_STAYS = ("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks")
"""Options that say which groups stay, where neither a plan nor a limit does."""

ENV_PREFIX = "PP_OFFLOAD_"
"""Prefix of the variables that :meth:`OffloadConfig.from_env` reads."""


@takes_options_by_name
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of the engine, by name.

    Args:
        min_offloaded_tensor_size: In elements, default 1024 * 1024 (4 MiB of float32). Tensors with
            fewer elements stay on the device. ``min_offload_size`` of contexts and checkpoints is
            in bytes.

            Where a step offloads nothing of a group for that reason, one warning says so.
        delta_offload_bytes_across_pp_ranks: In bytes, default 0. Pipeline rank r keeps at least r
            times as many bytes on its device, from the second step on.
        activation_offload_fraction: A number from 0 to 1, default 1.0. The share of the groups of a
            chunk that is offloaded, from the second step on: of their number, not of their bytes.

            The last groups in forward order stay, because backward uses them first.
        max_in_flight_bytes: In bytes, default ``"auto"``. Device bytes that may wait for their
            copy. Above it compute waits for the oldest copies, but never for those of the group
            that was offloaded last, unless the option is 0: then for all.

            ``"auto"`` starts with twice the largest group, at least 512 MiB. Where the device has a
            clock and ``tiers`` is ``("host",)``, the steps of a manager are timed, from one
            ``reset()`` to the next (an attached schedule calls it). The times say how few bytes are
            enough for compute never to wait, at least 512 MiB, as far as the link to the host
            permits and the device has room. One line in the log says what was chosen.

            The option also limits the host bytes on the way to and from the disk.
        prefetch_bytes: In bytes, default ``"auto"``. Device bytes that may be reloaded ahead of
            their use; one tensor always may, however large.

            ``"auto"`` starts with twice the largest group, at least 256 KiB, and then follows the
            times of steps, as for ``max_in_flight_bytes``.
        plan: A plan or the path of its file, default None. Which groups stay, from the first step
            on: the file that `pp-offload plan` has written, or a plan of
            :func:`pp_offload.plan.choose`. The plan also sets ``max_in_flight_bytes`` and
            ``prefetch_bytes`` where they are ``"auto"`` here. It takes the place of
            ``activation_offload_fraction`` and ``delta_offload_bytes_across_pp_ranks``.

            A group that is not in the plan, or has other bytes than there, is offloaded, with one
            line in the log; then the engine chooses the bounds by itself.
        device_limit_bytes: In bytes, or a size such as ``"60GiB"``, default ``"auto"``. Device
            bytes that tensors may take together. Each rank keeps as many groups as the limit has
            room for, as its first steps show: as they were saved, or without what
            ``rematerialize`` computes again; the other groups are offloaded. ``"auto"`` is the
            memory of the device, less what others hold and the gaps of PyTorch's allocator. None is
            no limit: all groups are offloaded, as on a CPU. With a plan, an
            ``activation_offload_fraction`` below 1 or ``delta_offload_bytes_across_pp_ranks``,
            which say themselves what stays, the option must be ``"auto"`` or None, and there is no
            limit.

            The limit is kept by offloading groups, not by refusing memory: where the device needs
            more although all groups are offloaded, one warning says how much.
        rematerialize: ``"cheap"`` or ``"none"``, default ``"cheap"``. With ``"cheap"``, what cheap
            operators such as norms and activation functions made of saved tensors is not copied,
            but computed again from them, where they give the same bits. With ``"none"`` everything
            is copied.
        split_backward: ``"reload"`` or ``"keep"``, default ``"reload"``. For schedules whose
            backward comes in two parts, gradients of inputs first: what both parts use is freed in
            between and reloaded, or stays on the device.
        host_budget_bytes: In bytes, default None. Host bytes that all managers of this process may
            take together. None is this rank's part of 80 % of what the kernel and the cgroups would
            still give.

            Above it a group goes to the next tier, or stays on the device, with one warning.
        tiers: A tuple of names, default ``("host",)``. Where offloaded bytes go: ``("host",)``,
            ``("disk",)``, or ``("host", "disk")``, where the disk takes what is above the host
            budget.

            The disk needs some host memory to pass through, which is pinned for an accelerator.
            Where the device is the host, only the disk frees memory.
        disk_dir: A path, default None. Directory of the disk tier's file, one per rank; created if
            missing. None is the directory of temporary files.

            Use a real disk: on a file system in memory nothing is saved. The file has no name and
            mode 0600, and is gone with the process and its forks, however they end.
        verify: True or False, default False. Compare what comes back with what left, and log which
            offloaded storages are still on the device and who holds them. Slow.

    Raises:
        ConfigError: One error that lists every violation, and options that do not exist.
    """

    min_offloaded_tensor_size: int = 1024 * 1024
    delta_offload_bytes_across_pp_ranks: int = 0
    activation_offload_fraction: float = 1.0
    max_in_flight_bytes: int | Literal["auto"] = "auto"
    prefetch_bytes: int | Literal["auto"] = "auto"
    plan: OffloadPlan | str | os.PathLike[str] | None = None
    device_limit_bytes: int | str | None = "auto"
    rematerialize: str = "cheap"
    split_backward: str = "reload"
    host_budget_bytes: int | None = None
    tiers: tuple[str, ...] = ("host",)
    disk_dir: str | os.PathLike[str] | None = None
    verify: bool = False

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Make options of a file's content: bytes also as sizes (``"8GiB"``), tuples as lists.

        Args:
            options: Options by name.

        Raises:
            ConfigError: The error lists every violation.
            TypeError: ``options`` is no mapping.
        """
        check_kind("options", options, Mapping, "options by name")
        return cls(**{str(name): _as_option(name, value) for name, value in options.items()})

    @classmethod
    def from_toml(cls, path: object, table: str = "") -> NoReturn:
        """Removed: read the file with ``tomllib`` and give the table to :meth:`from_dict`.

        Raises:
            ConfigError: Always, with that advice.
        """
        of_table = "".join(f'["{name}"]' for name in table.split(".") if name)
        raise ConfigError(
            f"found from_toml({path!r}), expected from_dict: from_toml is gone; open the file as "
            f'"rb" and write OffloadConfig.from_dict(tomllib.load(file){of_table})'
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Make options of environment variables: ``PP_OFFLOAD_`` and the name in capitals.

        ``PP_OFFLOAD_TIERS=host,disk``, ``PP_OFFLOAD_PREFETCH_BYTES=2GiB``, ``PP_OFFLOAD_VERIFY=1``.
        The variables have no effect unless this is called.

        Args:
            environ: Variables by name; those of the process when None.

        Raises:
            ConfigError: The error lists every violation, and variables that are no option.
        """
        texts = read_env(ENV_PREFIX, os.environ if environ is None else environ)
        try:
            return cls.from_dict({name: _of_text(name, text) for name, text in texts.items()})
        except ConfigError as failure:
            raise type(failure)(f"in variables {ENV_PREFIX}...: {failure}") from None

    def to_dict(self) -> dict[str, Any]:
        """Make plain values that JSON can hold; :meth:`from_dict` makes an equal record of them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["tiers"] = list(self.tiers)
        values["plan"] = self.plan.to_dict() if isinstance(self.plan, OffloadPlan) else self.plan
        values["disk_dir"] = None if self.disk_dir is None else os.fspath(self.disk_dir)
        return values

    @property
    def offload_plan(self) -> OffloadPlan | None:
        """Plan of the option ``plan``; a file is read when the record is made."""
        return self.plan if isinstance(self.plan, OffloadPlan) else None

    @property
    def limit(self) -> int | str | None:
        """Limit on device bytes; None where other options say what stays."""
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
    """Convert a value of a file. A wrong value stays, and the record refuses it."""
    if isinstance(value, list):
        return tuple(value)
    if name == "plan" and isinstance(value, Mapping):
        return OffloadPlan.from_dict(value)
    if isinstance(value, str) and name in COUNTS and name not in UNIT_OF_NAME:
        nbytes = parse_size(value)
        return value if nbytes is None else nbytes
    return value


def _of_text(name: str, text: str) -> Any:
    """Convert the text of a variable. A wrong value stays, and the record refuses it."""
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
    """Say which other values a count may have, for the end of a message."""
    auto = f", or {AUTO!r}" if name in AUTO_COUNTS else ""
    if not isinstance(value, str) or name in UNIT_OF_NAME:
        return auto
    return f"{auto}; bytes of a file or the environment may have a unit: {', '.join(UNITS)}"


def add_tier_name(name: str) -> None:
    """Let the option ``tiers`` name another tier, which ``_core/tiers.py`` can make."""
    if name not in TIERS:
        TIERS.append(name)


def _chains() -> list[tuple[str, ...]]:
    """List each tier alone, and each tier behind the host."""
    return [*((name,) for name in TIERS), *(("host", name) for name in TIERS if name != "host")]


def _has_no_defaults(config: OffloadConfig, names: tuple[str, ...]) -> bool:
    defaults = {each.name: each.default for each in fields(config)}
    return any(getattr(config, name) != defaults[name] for name in names)


def _is_fraction(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1  # type: ignore[operator]


def without_plan(config: OffloadConfig) -> OffloadConfig:
    """Copy the options without a plan, and without a limit, which the engine keeps by a plan."""
    return replace(config, plan=None, device_limit_bytes=None)


def check_config(config: object) -> None:
    """Check that options are a config.

    Raises:
        TypeError: ``config`` is no :class:`OffloadConfig`.
    """
    advice = "write OffloadConfig(**options)" if isinstance(config, dict) else ""
    if config is None:
        advice = "write OffloadConfig() for the defaults"
    check_kind("config", config, OffloadConfig, "an OffloadConfig", advice)


def config_or_default(config: OffloadConfig | None) -> OffloadConfig:
    """Default options for None, else ``config`` itself.

    Raises:
        TypeError: ``config`` is no :class:`OffloadConfig`.
    """
    if config is None:
        return OffloadConfig()
    check_config(config)
    return config
