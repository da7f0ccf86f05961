"""OffloadConfig: frozen, by keyword, and wrong as a whole."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from pp_offload import ConfigError, OffloadConfig, OffloadError

FIELDS = [
    "min_offloaded_tensor_size",
    "delta_offload_bytes_across_pp_ranks",
    "activation_offload_fraction",
    "max_in_flight_bytes",
    "prefetch_bytes",
]


def test_it_has_the_options_of_the_engine() -> None:
    names = [field.name for field in dataclasses.fields(OffloadConfig)]
    assert names[: len(FIELDS)] == FIELDS


def test_defaults_offload_all_groups_of_large_tensors() -> None:
    config = OffloadConfig()
    assert config.min_offloaded_tensor_size == 1024 * 1024
    assert config.delta_offload_bytes_across_pp_ranks == 0
    assert config.activation_offload_fraction == 1.0
    assert config.max_in_flight_bytes == "auto"
    assert config.prefetch_bytes == "auto"


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().prefetch_bytes = 1  # type: ignore[misc]


def test_it_takes_keywords_only() -> None:
    with pytest.raises(TypeError, match=r"given 1 without a name.*write OffloadConfig\(name=value"):
        OffloadConfig(1)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"given the dict .*or OffloadConfig\(\*\*options\)"):
        OffloadConfig({"prefetch_bytes": 1})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("host_budget", "host_budget_bytes"),
        ("prefetch_mib", "prefetch_bytes"),
        ("tier", "tiers"),
        ("min_offload_size", "min_offloaded_tensor_size"),
        ("disk_directory", "disk_dir"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_near_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(**{name: 1})
    assert isinstance(error.value, TypeError)  # as Python's own
    message = rf"no option {name} \(did you mean {meant}\?\); expected some of .*{meant}"
    assert re.search(message, str(error.value))


def test_an_option_like_no_other_has_no_near_one() -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(xyz=1)  # type: ignore[call-arg]
    assert "no option xyz; expected some of min_offloaded_tensor_size, " in str(error.value)


def test_unknown_options_and_wrong_values_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(host_budget=1, disk_directory=0, prefetch_bytes=-5, verify="yes")  # type: ignore[call-arg, arg-type]
    for word in ("host_budget_bytes?", "disk_dir?", "prefetch_bytes is -5", "verify is 'yes'"):
        assert word in str(error.value)


def test_it_is_a_plain_dataclass_all_the_same() -> None:
    config = OffloadConfig(prefetch_bytes=7)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, verify=True).prefetch_bytes == 7
    assert list(inspect.signature(OffloadConfig).parameters)[: len(FIELDS)] == FIELDS


def test_equal_options_make_equal_configs() -> None:
    assert OffloadConfig(prefetch_bytes=7) == OffloadConfig(prefetch_bytes=7)
    assert OffloadConfig(prefetch_bytes=7) != OffloadConfig(prefetch_bytes=8)
    assert len({OffloadConfig(), OffloadConfig()}) == 1


@pytest.mark.parametrize("name", [n for n in FIELDS if n != "activation_offload_fraction"])
@pytest.mark.parametrize("value", [0, 1, 2**40])
def test_a_count_may_be_zero_or_more(name: str, value: int) -> None:
    assert getattr(OffloadConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", [n for n in FIELDS if n != "activation_offload_fraction"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True, math.nan])
def test_a_wrong_count_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(**{name: value})
    message = str(error.value)
    assert name in message
    assert repr(value) in message
    assert "expected" in message


@pytest.mark.parametrize("value", [0, 0.0, 0.25, 1, 1.0])
def test_a_fraction_is_from_zero_to_one(value: float) -> None:
    assert OffloadConfig(activation_offload_fraction=value).activation_offload_fraction == value


@pytest.mark.parametrize("value", [-0.1, 1.01, math.nan, math.inf, "half", None, True])
def test_a_wrong_fraction_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigError, match="activation_offload_fraction") as error:
        OffloadConfig(activation_offload_fraction=value)
    assert repr(value) in str(error.value)


def test_all_violations_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(
            min_offloaded_tensor_size=-1,
            delta_offload_bytes_across_pp_ranks=-2,
            activation_offload_fraction=3.0,
            max_in_flight_bytes=-4,
            prefetch_bytes=-5,
        )
    assert all(name in str(error.value) for name in FIELDS)


@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")])
def test_a_chain_of_tiers(tiers: tuple[str, ...]) -> None:
    assert OffloadConfig(tiers=tiers).tiers == tiers


@pytest.mark.parametrize(
    "tiers", [(), "disk", ["disk"], ("disk", "host"), ("host", "host"), ("tape",), None]
)
def test_another_chain_is_an_error(tiers: Any) -> None:
    with pytest.raises(ConfigError, match="tiers is") as error:
        OffloadConfig(tiers=tiers)
    assert repr(tiers) in str(error.value)
    assert "('host', 'disk')" in str(error.value)


def test_a_directory_without_a_disk_tier_is_an_error() -> None:
    with pytest.raises(ConfigError, match="disk_dir is '/scratch'.*add \"disk\""):
        OffloadConfig(disk_dir="/scratch")


@pytest.mark.parametrize("wrong", [7, "", b"/scratch", True, ["/scratch"], "/scr\0atch"])
def test_a_directory_that_is_no_path_is_an_error(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="disk_dir is .*expected a path"):
        OffloadConfig(tiers=("disk",), disk_dir=wrong)


def test_a_nul_byte_in_a_directory_is_said() -> None:
    with pytest.raises(ConfigError, match="with a NUL byte inside"):
        OffloadConfig(tiers=("disk",), disk_dir=Path("/scr\0atch"))


def test_violations_of_the_chain_are_in_the_same_error() -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(tiers=("tape",), disk_dir=7, host_budget_bytes=-1)  # type: ignore[arg-type]
    assert all(name in str(error.value) for name in ("tiers", "disk_dir", "host_budget"))


def test_the_error_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, OffloadError)


def test_every_field_has_a_docstring() -> None:
    import ast

    body = ast.parse(inspect.getsource(OffloadConfig)).body[0].body  # type: ignore[attr-defined]
    for before, after in zip(body, body[1:], strict=False):
        if isinstance(before, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
