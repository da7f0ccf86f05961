"""Options of the engine, in a frozen record that is checked as a whole.

OffloadConfig(host_budget_bytes=64 * 2**30)
OffloadConfig.from_dict({"host_budget_bytes": "64GiB"})
OffloadConfig.from_env()                                 # PP_OFFLOAD_HOST_BUDGET_BYTES=64GiB
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from pp_offload._common.checks import (
    brief,
    check_kind,
    count_problem,
    flag_problem,
    takes_options_by_name,
)
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.text import UNITS, parse_size
from pp_offload.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


CHAINS = ("host",), ("disk",), ("host", "disk")  # values of ``tiers``
# Values of the options that take a word.
CHOICES = {"split_backward": ("reload", "keep"), "rematerialize": ("cheap", "none")}
AUTO = "auto"  # value of an option that the engine chooses
# Options that decide which groups stay, unless a plan or a limit does.
WHAT_STAYS = ("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks")
ENV_PREFIX = "PP_OFFLOAD_"  # of the variables that OffloadConfig.from_env() reads


@takes_options_by_name
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of the engine, by name.

    Args:
        min_offloaded_tensor_size: In elements, default 1024 * 1024 (4 MiB of float32). Tensors with
            fewer elements stay on the device. ``min_offload_size`` of contexts and checkpoints is
            in bytes.

            A warning names each group of which nothing is offloaded for this reason.
        delta_offload_bytes_across_pp_ranks: In bytes, default 0. Pipeline rank r keeps at least r
            times this many bytes on its device, from the second step on.
        activation_offload_fraction: A number from 0 to 1, default 1.0. Share of the groups of a
            chunk that is offloaded, from the second step on: of their number, not of their bytes.

            The last groups in forward order stay, because backward uses them first.
        max_in_flight_bytes: In bytes, default ``"auto"``. Limit on device bytes whose copy to the
            host has not ended. Above the limit, compute waits for the oldest copies. It does not
            wait for the copy of the last group, unless the limit is 0.

            ``"auto"`` begins with twice the largest group, at least 512 MiB. If the device has a
            clock and ``tiers`` is ``("host",)``, the engine then times steps, and chooses the
            fewest bytes, at least 512 MiB, with which compute never waits, as far as the link to
            the host and the memory of the device permit.

            The option also limits host bytes on the way to and from the disk.
        prefetch_bytes: In bytes, default ``"auto"``. Limit on device bytes that are reloaded before
            backward uses them. One tensor may always be reloaded early, however large.

            ``"auto"`` begins with twice the largest group, at least 256 KiB, and then follows the
            times of steps, as for ``max_in_flight_bytes``.
        plan: An ``OffloadPlan``, or the path of its file, default None. Says which groups stay on
            the device, from the first step on. ``pp-offload plan`` and
            :func:`pp_offload.plan.choose` make plans. The plan also sets ``max_in_flight_bytes``
            and ``prefetch_bytes`` where they are ``"auto"``. It replaces
            ``activation_offload_fraction`` and ``delta_offload_bytes_across_pp_ranks``.

            A group that is not in the plan, or has a different size, is offloaded, with one warning
            in the log; then the engine chooses both limits itself.
        device_limit_bytes: In bytes, or a size such as ``"60GiB"``, default ``"auto"``. Limit on
            the device bytes of all tensors together. Each rank measures its first steps, then keeps
            as many groups as fit below the limit, with or without the tensors that
            ``rematerialize`` computes again. ``"auto"`` is the memory of the device, less what
            other programs use and the gaps of PyTorch's allocator. None means no limit: all groups
            but the last of each name are offloaded, as on a CPU.

            A plan, an ``activation_offload_fraction`` below 1 and
            ``delta_offload_bytes_across_pp_ranks`` decide themselves which groups stay. With one of
            them there is no limit, and this option must be ``"auto"`` or None.

            The engine never refuses memory: if the device needs more although all groups are
            offloaded, one warning says how much.
        rematerialize: ``"cheap"`` or ``"none"``, default ``"cheap"``. With ``"cheap"``, a saved
            tensor that a cheap operator, such as a norm or an activation function, made of other
            saved tensors is not copied: backward computes it again, if that gives the same bits.
            ``"none"`` copies every saved tensor.
        split_backward: ``"reload"`` or ``"keep"``, default ``"reload"``. For schedules that split
            backward into gradients of inputs and, later, gradients of weights. Tensors that both
            parts use are freed in between and reloaded (``"reload"``), or stay on the device
            (``"keep"``).
        host_budget_bytes: In bytes, default None. Limit on host bytes of all managers of this
            process together. None is this rank's share of 80 % of the memory that the kernel and
            the cgroups still have.

            Above the limit a group goes to the next tier, or stays on the device, with one warning.
            First, idle engines return theirs, once.
        tiers: Where offloaded bytes go: ``("host",)``, the default, ``("disk",)``, or
            ``("host", "disk")``, where the disk takes what is above the host budget.

            Bytes pass through host memory on their way, pinned for an accelerator: with both tiers
            through an eighth of the budget, which has to hold the largest group. If the device is
            the host itself, only the disk frees memory.
        disk_dir: A path, default None. Directory of the disk tier's file, one per rank; created if
            missing. None is the directory of temporary files.

            Use a real disk: on a file system in memory nothing is saved. The file has no name and
            mode 0600. It vanishes with the process and its forks, however they end.
        verify: True or False, default False. Compares reloaded bytes with the offloaded bytes, and
            logs which offloaded storages are still on the device and who refers to them. Slow.

    Raises:
        ConfigError: One error that lists every violation.
        OptionError: An option does not exist.
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
        """Make options from a file's content.

        Args:
            options: Options by name. Bytes may be sizes (``"8GiB"``), tuples may be lists, and any
                value may be text, as in :meth:`from_env`.

        Raises:
            ConfigError: The error lists every violation.
            TypeError: ``options`` is no mapping.
        """
        check_kind("options", options, Mapping, "options by name")
        return cls(**{str(name): _converted(name, value) for name, value in options.items()})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Make options from environment variables: ``PP_OFFLOAD_`` and the name in capitals.

        ``PP_OFFLOAD_TIERS=host,disk``, ``PP_OFFLOAD_PREFETCH_BYTES=2GiB``, ``PP_OFFLOAD_VERIFY=1``.
        The variables have no effect unless this is called.

        Args:
            environ: Variables by name; those of the process when None.

        Raises:
            ConfigError: The error lists every violation.
        """
        texts = {
            name.removeprefix(ENV_PREFIX).lower(): text
            for name, text in (os.environ if environ is None else environ).items()
            if name.startswith(ENV_PREFIX)
        }
        try:
            return cls.from_dict(texts)
        except ConfigError as failure:
            raise type(failure)(f"in variables {ENV_PREFIX}...: {failure}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; :meth:`from_dict` makes an equal record of them."""
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
        """Limit on device bytes; None if other options decide which groups stay."""
        says_what_stays = self.plan is not None or self._says_what_stays()
        return None if says_what_stays else self.device_limit_bytes

    def _says_what_stays(self) -> bool:
        return any(getattr(self, name) != getattr(type(self), name) for name in WHAT_STAYS)

    def __post_init__(self) -> None:
        limit = self.device_limit_bytes
        if isinstance(limit, str) and (nbytes := parse_size(limit)) is not None:
            object.__setattr__(self, "device_limit_bytes", nbytes)
        if problems := [*self._read_plan(), *self._violations()]:
            raise ConfigError("OffloadConfig is invalid: " + "; ".join(problems))

    def _read_plan(self) -> Iterator[str]:
        if isinstance(self.plan, str | os.PathLike):
            try:
                object.__setattr__(self, "plan", OffloadPlan.load(self.plan))
            except (OSError, ConfigError) as failure:
                yield f"plan cannot be read: {failure}"
        elif not (self.plan is None or isinstance(self.plan, OffloadPlan)):
            yield f"plan is {brief(self.plan)}, expected an OffloadPlan, its file's path, or None"

    def _violations(self) -> Iterator[str]:
        for name, kind in COUNTS.items():
            value = getattr(self, name)
            is_text, may_be_auto = isinstance(value, str), getattr(type(self), name) == AUTO
            if (value is None and "None" in kind) or (is_text and value == AUTO and may_be_auto):
                continue
            if problem := count_problem(name, value, unit=_unit(name)):
                yield problem + (f", or {AUTO!r}" if may_be_auto else "")
                if is_text and _unit(name) == "bytes":
                    may = "" if name == "device_limit_bytes" else " of a file or the environment"
                    yield f"bytes{may} may have a unit: {', '.join(UNITS)}"
        fraction = self.activation_offload_fraction
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not is_number or not 0 <= fraction <= 1:
            yield f"activation_offload_fraction is {brief(fraction)}, expected 0 to 1"
        ways = {
            "plan": self.plan is not None,
            "device_limit_bytes": isinstance(self.device_limit_bytes, int),
            " or ".join(WHAT_STAYS): self._says_what_stays(),
        }
        if sum(ways.values()) > 1:
            given = " and ".join(name for name, is_given in ways.items() if is_given)
            yield f"{given} are given, expected one way to say what stays"
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                expected = " or ".join(map(repr, values))
                yield f"{name} is {brief(getattr(self, name))}, expected {expected}"
        if problem := flag_problem("verify", self.verify):
            yield problem
        if self.tiers not in CHAINS:
            yield (
                f"tiers is {brief(self.tiers)}, expected one of {', '.join(map(repr, CHAINS))}: "
                "a tuple, the host before the disk"
            )
        if self.disk_dir is None:
            return
        path = os.fspath(self.disk_dir) if isinstance(self.disk_dir, str | os.PathLike) else None
        if not isinstance(path, str) or not path:
            yield f"disk_dir is {brief(self.disk_dir)}, expected a path, or None"
        elif self.tiers in CHAINS and "disk" not in self.tiers:
            yield (
                f"disk_dir is {path!r}, but tiers is {self.tiers!r}; add "
                '"disk" to tiers, or leave disk_dir out'
            )


COUNTS = {
    each.name: str(each.type) for each in fields(OffloadConfig) if str(each.type).startswith("int")
}
"""Types of the options that are integers of at least zero."""


def _unit(name: str) -> str:
    return "bytes" if "bytes" in name else "elements"


def _converted(name: object, value: Any) -> Any:
    """Convert a value of a file or a variable. The record refuses a wrong value later."""
    if isinstance(value, list):
        return tuple(value)
    if name == "plan" and isinstance(value, Mapping):
        return OffloadPlan.from_dict(value)
    if not isinstance(value, str):
        return value
    if name == "tiers":
        return tuple([part.strip() for part in value.split(",")])
    if name == "verify":
        return {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    if name == "activation_offload_fraction":
        with suppress(ValueError):
            return float(value)
    if name in COUNTS and (_unit(str(name)) == "bytes" or value.isdecimal()):
        nbytes = parse_size(value)
        return value if nbytes is None else nbytes
    return value


def without_plan(config: OffloadConfig) -> OffloadConfig:
    """Copy the options without a plan and without a limit."""
    return replace(config, plan=None, device_limit_bytes=None)


def check_config(config: object) -> None:
    """Raise a TypeError unless ``config`` is an :class:`OffloadConfig`."""
    advice = "write OffloadConfig(**options)" if isinstance(config, dict) else ""
    if config is None:
        advice = "write OffloadConfig() for the defaults"
    check_kind("config", config, OffloadConfig, "an OffloadConfig", advice)


def config_or_default(config: OffloadConfig | None) -> OffloadConfig:
    """Return default options for None, else ``config``; raise a TypeError if that is no config."""
    if config is None:
        return OffloadConfig()
    check_config(config)
    return config
