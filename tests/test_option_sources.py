"""Options of dicts, TOML files and the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_docs import PAGES
from torch import nn

from pp_offload import (
    OffloadActivations,
    OffloadConfig,
    OffloadHiddenStates,
    checkpoint,
    get_lora_act_offloading_ctx_manager,
)
from pp_offload._common.option_sources import bytes_said, parse_limit, parse_size, size_said
from pp_offload.config import COUNTS
from pp_offload.errors import ConfigError, OptionError

OTHERS: dict[str, Any] = {
    "min_offloaded_tensor_size": 17,
    "delta_offload_bytes_across_pp_ranks": 3 * 2**20,
    "activation_offload_fraction": 0.25,
    "max_in_flight_bytes": 2**31,
    "prefetch_bytes": 1500,
    "rematerialize": "none",
    "split_backward": "keep",
    "host_budget_bytes": 2**36,
    "tiers": ("host", "disk"),
    "disk_dir": "/scratch",
    "verify": True,
}
"""No default among them."""

AS_TEXT = {
    "min_offloaded_tensor_size": "17",
    "delta_offload_bytes_across_pp_ranks": "3MiB",
    "activation_offload_fraction": "0.25",
    "max_in_flight_bytes": "2 GiB",
    "prefetch_bytes": "1.5kB",
    "rematerialize": "none",
    "split_backward": "keep",
    "host_budget_bytes": "64GiB",
    "tiers": "host, disk",
    "disk_dir": "/scratch",
    "verify": "true",
}

TOML = """
steps = 100
[train.offload]
min_offloaded_tensor_size = 17
delta_offload_bytes_across_pp_ranks = "3MiB"
activation_offload_fraction = 0.25
max_in_flight_bytes = "2 GiB"
prefetch_bytes = 1500
rematerialize = "none"
split_backward = "keep"
host_budget_bytes = "64GiB"
tiers = ["host", "disk"]
disk_dir = "/scratch"
verify = true
"""


def in_env(**options: str) -> dict[str, str]:
    return {f"PP_OFFLOAD_{name.upper()}": text for name, text in options.items()}


def options() -> list[Any]:
    """All but the plan, which stands for two of them, and its limit: see ``test_offload_plan.py``
    and below.
    """
    return [one for one in fields(OffloadConfig) if one.name not in ("plan", "device_limit_bytes")]


def test_these_are_all_options() -> None:
    defaults = OffloadConfig()
    for one in options():
        assert OTHERS[one.name] != getattr(defaults, one.name)
    assert OTHERS.keys() == AS_TEXT.keys() == {one.name for one in options()}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("12", 12),
        (" 12 B ", 12),
        ("8GiB", 2**33),
        ("8 GB", 8 * 10**9),
        ("1.5KiB", 1536),
        ("0.1GB", 10**8),
        ("2kB", 2000),
        ("2KB", 2000),
        ("3TiB", 3 * 2**40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8G", "8Gb", "8gib", "-1", "1e9", "0.3B", "1_000", "8GiB x", "\u0663"]
)
def test_what_is_no_size_is_not_guessed(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize("config", [OffloadConfig(), OffloadConfig(**OTHERS)])
def test_a_dict_and_back(config: OffloadConfig) -> None:
    options = json.loads(json.dumps(config.to_dict()))
    assert OffloadConfig.from_dict(options) == config
    assert list(options) == [one.name for one in fields(OffloadConfig)]


def test_a_path_becomes_text() -> None:
    config = OffloadConfig(tiers=("disk",), disk_dir=Path("/scratch"))
    assert config.to_dict()["disk_dir"] == "/scratch"


def test_every_option_of_a_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(TOML)
    assert OffloadConfig.from_toml(file, "train.offload") == OffloadConfig(**OTHERS)


def test_a_toml_file_that_is_all_options(tmp_path: Path) -> None:
    file = tmp_path / "offload.toml"
    file.write_text('prefetch_bytes = "auto"\nhost_budget_bytes = "1GiB"\n')
    assert OffloadConfig.from_toml(str(file)) == OffloadConfig(host_budget_bytes=2**30)


def test_every_option_of_the_environment() -> None:
    environ = {"PATH": "/bin", **in_env(**AS_TEXT)}
    assert OffloadConfig.from_env(environ) == OffloadConfig(**OTHERS)


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PP_OFFLOAD_VERIFY", "0")
    assert OffloadConfig.from_env() == OffloadConfig()
    monkeypatch.setenv("PP_OFFLOAD_VERIFY", "1")
    assert OffloadConfig.from_env() == OffloadConfig(verify=True)
    assert OffloadConfig() == OffloadConfig(verify=False), "nothing else reads it"


def test_a_size_is_for_files_alone() -> None:
    with pytest.raises(ConfigError, match="'8GiB', expected an integer.*'auto'; bytes of a file"):
        OffloadConfig(prefetch_bytes="8GiB")  # type: ignore[arg-type]


def from_dict(options: dict[str, Any], folder: Path) -> OffloadConfig:
    return OffloadConfig.from_dict(options)


def from_toml(options: dict[str, Any], folder: Path) -> OffloadConfig:
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    (folder / "given.toml").write_text(text)
    return OffloadConfig.from_toml(folder / "given.toml")


def from_env(options: dict[str, Any], folder: Path) -> OffloadConfig:
    return OffloadConfig.from_env(in_env(**{name: str(one) for name, one in options.items()}))


@pytest.mark.parametrize("read", [from_dict, from_toml, from_env])
def test_all_that_is_wrong_is_in_one_error(
    read: Callable[[dict[str, Any], Path], OffloadConfig], tmp_path: Path
) -> None:
    options = {
        "prefetch_byte": "1GiB",
        "host_budget_bytes": "8Gb",
        "min_offloaded_tensor_size": "1MiB",
        "verify": "perhaps",
    }
    with pytest.raises(OptionError) as raised:
        read(options, tmp_path)
    said = str(raised.value)
    assert "prefetch_byte (did you mean prefetch_bytes?)" in said
    assert "host_budget_bytes is '8Gb', expected an integer" in said
    assert "kMGT" not in said and "GB, TB" in said and "GiB" in said
    assert "min_offloaded_tensor_size is '1MiB', expected an integer" in said, "it is no bytes"
    assert "verify is 'perhaps', expected True or False" in said
    if read is from_toml:
        assert str(tmp_path / "given.toml") in said
    if read is from_env:
        assert "PP_OFFLOAD_" in said


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("trian", r"no table \[trian\] \(did you mean train\?\), .*there is steps, train"),
        ("train.of", r"no table \[train.of\] \(did you mean offload\?\)"),
        ("steps", "steps in .* is 100, expected a table"),
        ("train.offload.verify", "verify in .* is True, expected a table"),
    ],
)
def test_a_table_that_is_not_there(table: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(TOML)
    with pytest.raises(ConfigError, match=said):
        OffloadConfig.from_toml(file, table)


@pytest.mark.parametrize("content", [b"prefetch_bytes = ", b"\xff\xfe"])
def test_a_file_that_is_no_toml(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml is no TOML file"):
        OffloadConfig.from_toml(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OffloadConfig.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("wrong", [None, [], "prefetch_bytes", OffloadConfig()])
def test_what_is_no_mapping(wrong: Any) -> None:
    with pytest.raises(TypeError, match="options is .*, expected options by name"):
        OffloadConfig.from_dict(wrong)


def test_a_limit_is_a_size_in_a_program_too() -> None:
    assert OffloadConfig(device_limit_bytes="70GiB").device_limit_bytes == 70 * 2**30
    config = OffloadConfig.from_env(in_env(device_limit_bytes="auto"))
    assert config.device_limit_bytes == "auto"
    assert OffloadConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device_limit_bytes": -1}, "device_limit_bytes is -1, expected"),
        ({"device_limit_bytes": "7 GiBs"}, "device_limit_bytes is '7 GiBs', expected"),
        ({"plan": "auto"}, "plan is 'auto', which is gone: write device_limit_bytes='auto'"),
        ({"device_budget_bytes": 1}, "device_budget_bytes, which is gone: give max_in_flight"),
        (
            {"device_limit_bytes": 2**30, "activation_offload_fraction": 0.5},
            "device_limit_bytes and activation_offload_fraction or delta_offload_bytes_across_pp_"
            "ranks are given, expected one way to say what stays",
        ),
    ],
)
def test_what_is_no_limit(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        OffloadConfig(**options)


UNITS = {
    "min_offloaded_tensor_size": "In elements",
    "activation_offload_fraction": "0 to 1",
}
"""Of options whose names do not end with theirs."""


@pytest.mark.parametrize("name", [*COUNTS, "activation_offload_fraction"])
def test_every_option_says_its_unit(name: str) -> None:
    """In its documentation, and in the error for a value that cannot be right."""
    page = PAGES["options"].split(f"\n## {name}\n")[1].split("\n## ")[0]
    first = page.split("\n\n")[1]
    unit = UNITS.get(name, "bytes")
    assert unit.lower() in first.lower()
    assert (name in UNITS) == ("bytes" not in name)
    with pytest.raises(ConfigError, match=unit.removeprefix("In ")):
        OffloadConfig(**{name: -1})


def test_the_two_smallest_sizes_name_each_other_and_their_units() -> None:
    """One is in elements, as in the reference, and one in bytes, as in TRL and torchtune."""
    page = PAGES["options"].split("\n## min_offloaded_tensor_size\n")[1].split("\n## ")[0]
    assert (
        "In elements" in page
        and "`min_offload_size` of contexts and checkpoints is in bytes" in page
    )
    model = nn.Linear(2, 2)
    calls: list[Callable[..., Any]] = [
        OffloadActivations,
        lambda **options: OffloadHiddenStates(model, **options),
        lambda **options: get_lora_act_offloading_ctx_manager(model, **options),
        lambda **options: checkpoint(model, **options),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"min_offload_size is -1.*\(bytes\)"):
            call(min_offload_size=-1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (7, "7 B"),
        (2**10, "1.00 KiB"),
        (560_000, "0.53 MiB"),
        (2**26, "64.00 MiB"),
        (2**27, "0.12 GiB"),
        (7 * 2**30, "7.00 GiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_a_size_is_said_in_a_unit_in_which_it_is_not_zero(nbytes: int, text: str) -> None:
    assert size_said(nbytes) == text
    assert bytes_said(nbytes) == ("7" if nbytes == 7 else f"{nbytes} ({text})")


@pytest.mark.parametrize("nbytes", [7, 2**27, 2**27 + 1, 1_493_444_096, 560_000, 7 * 2**30])
def test_what_is_the_least_is_enough_when_it_is_typed_as_it_was_read(nbytes: int) -> None:
    text = size_said(nbytes, is_least=True)
    read = parse_limit(text.replace(" ", ""))
    assert read is not None and nbytes <= read <= nbytes * 1.1
    assert bytes_said(nbytes, is_least=True) == ("7" if nbytes == 7 else f"{nbytes} ({text})")
