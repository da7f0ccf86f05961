"""OffloadConfig: frozen, by keyword, wrong as a whole; its options in dicts and the environment."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.docs import PAGES
from torch import nn

from pp_offload import (
    ConfigError,
    DiskTierError,
    OffloadActivations,
    OffloadConfig,
    OffloadError,
    OffloadModel,
    checkpoint_function,
)
from pp_offload._common.text import bytes_text, parse_size, size_text
from pp_offload.config import COUNTS
from pp_offload.errors import OptionError

NAMES = [field.name for field in dataclasses.fields(OffloadConfig)]

OTHERS: dict[str, tuple[Any, Any, str]] = {
    "min_offloaded_tensor_size": (17, 17, "17"),
    "delta_offload_bytes_across_pp_ranks": (3 * 2**20, "3MiB", "3MiB"),
    "activation_offload_fraction": (0.25, 0.25, "0.25"),
    "max_in_flight_bytes": (2**31, "2 GiB", "2 GiB"),
    "prefetch_bytes": (1500, 1500, "1.5kB"),
    "rematerialize": ("none", "none", "none"),
    "split_backward": ("keep", "keep", "keep"),
    "host_budget_bytes": (2**36, "64GiB", "64GiB"),
    "tiers": (("host", "disk"), ["host", "disk"], "host, disk"),
    "disk_dir": ("/scratch", "/scratch", "/scratch"),
    "verify": (True, True, "true"),
}
"""Another value than the default: in a program, in a file, and in a variable."""


def in_env(options: dict[str, str]) -> dict[str, str]:
    return {f"PP_OFFLOAD_{name.upper()}": text for name, text in options.items()}


def test_it_is_a_frozen_record_by_name() -> None:
    config = OffloadConfig(prefetch_bytes=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch_bytes = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert config != OffloadConfig() and len({OffloadConfig(), OffloadConfig()}) == 1
    with pytest.raises(TypeError, match=r"given 1 without a name.*write OffloadConfig\(name=value"):
        OffloadConfig(1)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"given the dict .*or OffloadConfig\(\*\*options\)"):
        OffloadConfig({"prefetch_bytes": 1})  # type: ignore[misc]


def test_help_says_unit_default_and_effect_of_each_option() -> None:
    """And the page of options has the same text."""
    doc = OffloadConfig.__doc__ or ""
    for name in NAMES:
        text = doc.split(f"\n        {name}: ")[1].split(".")[0]
        unit = "elements" if name == "min_offloaded_tensor_size" else "bytes"
        assert name not in COUNTS or unit in text, name
        assert "default" in text, name
        assert f"\n## {name}\n" in PAGES["options"]


VALUES: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, rf"{name} is {re.escape(repr(value))}, expected an integer of at least 0")
        for name in COUNTS
        for value in (-1, True, math.nan)
    ),
    *(
        ({"activation_offload_fraction": value}, f"fraction is {value!r}, expected 0 to 1")
        for value in (-0.1, 1.01, math.nan, "half", True)
    ),
    *(
        ({"tiers": value}, rf"tiers is .*{re.escape(repr(value))}, expected one of ")
        for value in ((), "disk", ["disk"], ("disk", "host"), ("tape",))
    ),
    *(
        ({"tiers": ("disk",), "disk_dir": value}, "disk_dir is .*expected a path")
        for value in (7, "", b"/scratch")
    ),
    ({"disk_dir": "/scratch"}, "disk_dir is '/scratch'.*add \"disk\""),
    ({"verify": "yes"}, "verify is 'yes', expected True or False"),
    ({"verify": "x" * 99}, r"verify is 'x{99}\.\.\., expected"),
    ({"verify": [*range(40)]}, "verify is a list, expected"),
    ({"split_backward": "drop"}, "split_backward is 'drop', expected 'reload' or 'keep'"),
    ({"rematerialize": True}, "rematerialize is True, expected 'cheap' or 'none'"),
    ({"prefetch_bytes": "8GiB"}, "'8GiB', expected an integer.*'auto'; bytes of a file"),
    ({"device_limit_bytes": "7 GiBs"}, "device_limit_bytes is '7 GiBs', expected"),
    ({"plan": 5}, "plan is 5, expected an OffloadPlan, its file's path, or None"),
    ({"xyz": 1}, "no option xyz; expected some of min_offloaded_tensor_size, "),
    ({"disk_directory": 1}, r"no option disk_directory \(did you mean disk_dir\?\); expected"),
    (
        {"device_limit_bytes": 2**30, "activation_offload_fraction": 0.5},
        "device_limit_bytes and activation_offload_fraction or delta_offload_bytes_across_pp_"
        "ranks are given, expected one way to say what stays",
    ),
]


@pytest.mark.parametrize(("options", "message"), VALUES, ids=str)
def test_a_wrong_value_is_named_with_what_was_expected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(**options)


def test_dicts_and_variables_of_plain_values_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig(**{name: values[0] for name, values in OTHERS.items()})
    assert {*OTHERS, "plan", "device_limit_bytes"} == {*NAMES}
    for each in (config, OffloadConfig(), OffloadConfig(device_limit_bytes="70GiB")):
        options = json.loads(json.dumps(each.to_dict()))
        assert OffloadConfig.from_dict(options) == each and list(options) == NAMES
    assert OffloadConfig(device_limit_bytes="70GiB").device_limit_bytes == 70 * 2**30
    assert OffloadConfig.from_dict({name: each[1] for name, each in OTHERS.items()}) == config
    texts = in_env({name: each[2] for name, each in OTHERS.items()})
    assert OffloadConfig.from_env({"PATH": "/bin", **texts}) == config
    monkeypatch.setenv("PP_OFFLOAD_VERIFY", "1")
    assert OffloadConfig.from_env() == OffloadConfig(verify=True)
    assert OffloadConfig() == OffloadConfig(verify=False), "nothing else reads it"
    with_path = OffloadConfig(tiers=("disk",), disk_dir=Path("/scratch"))
    assert with_path.to_dict()["disk_dir"] == "/scratch"
    with pytest.raises(TypeError, match="options is an OffloadConfig"):
        OffloadConfig.from_dict(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "read", [OffloadConfig.from_dict, lambda options: OffloadConfig.from_env(in_env(options))]
)
def test_all_that_is_wrong_is_in_one_error(read: Callable[[Any], OffloadConfig]) -> None:
    options = {
        "host_budget_bytes": "8Gb",
        "min_offloaded_tensor_size": "1MiB",
        "verify": "perhaps",
        "disk_dir": "/scratch",
    }
    with pytest.raises(ConfigError) as raised:
        read(options)
    message = str(raised.value)
    for words in (
        "host_budget_bytes is '8Gb', expected an integer",
        "have a unit: B, kB, MB, GB, TB, KB, KiB",
        "min_offloaded_tensor_size is '1MiB', expected an integer",
        "verify is 'perhaps', expected True or False",
        'add "disk" to tiers',
    ):
        assert words in message
    assert issubclass(OptionError, ConfigError) and issubclass(OptionError, TypeError)
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, OffloadError)


@pytest.mark.parametrize(
    ("nbytes", "texts"),
    [
        (0, ["0"]),
        (12, [" 12 B "]),
        (8 * 10**9, ["8 GB"]),
        (1536, ["1.5KiB"]),
        (10**8, ["0.1GB"]),
        (2**33, ["8G", "8gib"]),
        (None, ["", "GiB", "8Gb", "8gB", "-1", "1e9", "0.3B", "1_0"]),
    ],
)
def test_sizes_are_read_and_what_is_none_is_not_guessed(
    nbytes: int | None, texts: list[str]
) -> None:
    assert {parse_size(text) for text in texts} == {nbytes}


@pytest.mark.parametrize(
    ("nbytes", "text"), [(7, "7 B"), (560_000, "546.88 KiB"), (2**27, "0.12 GiB")]
)
def test_a_size_is_written_in_a_unit_in_which_it_is_not_zero(nbytes: int, text: str) -> None:
    """The least size is enough when it is typed as it was read."""
    assert size_text(nbytes) == text
    assert bytes_text(nbytes) == ("7" if nbytes == 7 else f"{nbytes} ({text})")
    typed = parse_size(size_text(nbytes, is_least=True), is_rounded=True)
    assert typed is not None and nbytes <= typed <= nbytes * 1.1


@pytest.mark.parametrize(
    "make",
    [
        lambda config: OffloadActivations(config=config),
        lambda config: checkpoint_function(offload_inputs=True, config=config),
        lambda config: OffloadModel(
            nn.Sequential(nn.Tanh()), "cpu", num_slices=1, checkpoint_activation=True, config=config
        ),
    ],
)
def test_each_product_is_given_its_options(
    make: Callable[[OffloadConfig], object], tmp_path: Path
) -> None:
    """One is impossible."""
    (tmp_path / "no-directory").touch()
    advice = "no-directory': it is a file; set disk_dir to a directory"
    with pytest.raises(DiskTierError, match=advice):
        make(OffloadConfig(tiers=("disk",), disk_dir=tmp_path / "no-directory"))
