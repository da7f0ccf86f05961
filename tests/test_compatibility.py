"""The list of other libraries' names is right: ours can be imported, and theirs where they are.

docs/peers.toml has the list, docs/compatibility.py makes the page of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import pytest
from helpers.docs import PAGES, script

compatibility = script("compatibility")
PEERS = tuple(compatibility.peers(compatibility.SOURCE.read_text()))
NAMES = [(peer, name) for peer in PEERS for name in peer.names]
OURS = sorted({name.ours for _, name in NAMES if name.ours})
TAKEN = [(peer, name) for peer, name in NAMES if name.takes]
MODULES = [(peer, module) for peer in PEERS for module in peer.modules]


def find(dotted: str) -> Any:
    """What has this name, a module or something in one.

    Raises:
        ImportError: A module on the way is not there.
        AttributeError: A name in it is not.
    """
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


def theirs(dotted: str) -> Any:
    """The same of another library; the test is skipped where that is not installed."""
    root = dotted.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        pytest.skip(f"{root} is not installed")
    try:
        return find(dotted)
    except ImportError as failure:
        if (failure.name or "").partition(".")[0] == root:
            raise
        pytest.skip(f"{root} cannot be imported: {failure}")


def is_name(dotted: str) -> bool:
    """Whether it is one of Python, and no word of a configuration."""
    return "." in dotted and all(part.isidentifier() for part in dotted.split("."))


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """By name."""
    return dict(inspect.signature(function).parameters)


def test_the_page_is_what_the_script_writes() -> None:
    """If not: python docs/compatibility.py"""
    assert PAGES["compatibility"] == compatibility.page()


def test_the_libraries_are_all_there() -> None:
    six = {"TRL", "torchtune", "axolotl", "Modalities", "fairscale", "Megatron-LM"}
    assert six <= {peer.title for peer in PEERS}
    assert all(peer.names for peer in PEERS)
    listed = [name.theirs for _, name in NAMES]
    assert len(set(listed)) == len(listed), "a name is there twice"


@pytest.mark.parametrize("name", OURS)
def test_ours_can_be_imported(name: str) -> None:
    find(f"pp_offload.{name}")


@pytest.mark.parametrize(
    "name", [name.theirs for _, name in NAMES if is_name(name.theirs)], ids=str
)
def test_theirs_can_be_imported(name: str) -> None:
    theirs(name)


@pytest.mark.parametrize(("peer", "module"), MODULES, ids=[module for _, module in MODULES])
def test_every_public_name_of_a_module_is_listed(peer: Any, module: str) -> None:
    found = {
        name
        for name, one in vars(theirs(module)).items()
        if not name.startswith("_") and getattr(one, "__module__", None) == module
    }
    assert found <= {name.theirs.rpartition(".")[2] for name in peer.names}


@pytest.mark.parametrize(("peer", "name"), TAKEN, ids=[name.theirs for _, name in TAKEN])
def test_ours_takes_what_is_said(peer: Any, name: Any) -> None:
    assert set(name.takes) <= set(parameters(find(f"pp_offload.{name.ours}")))


@pytest.mark.parametrize(("peer", "name"), TAKEN, ids=[name.theirs for _, name in TAKEN])
def test_defaults_are_theirs(peer: Any, name: Any) -> None:
    there = parameters(theirs(name.theirs))
    here = parameters(find(f"pp_offload.{name.ours}"))
    assert {one: here[one].default for one in name.takes} == {
        one: there[one].default for one in name.takes
    }
