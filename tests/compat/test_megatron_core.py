"""Megatron-Core, as the index has it, trains its GPT model with ours in the place of its module."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
from helpers import reference
from helpers.ranks import WORKERS, run_ranks
from helpers.reference import kind_of, parameters

WORKER = WORKERS / "megatron_worker.py"
MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
GROUPS = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
NO_PIPELINING = "forward_backward_no_pipelining"
ONE_F_ONE_B = "forward_backward_pipelining_without_interleaving"
INTERLEAVED = "forward_backward_pipelining_with_interleaving"

needs_megatron = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def megatron() -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)


@needs_megatron
@pytest.mark.slow  # it takes seconds to import
@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (1, {"serial": NO_PIPELINING, "serial:recompute": NO_PIPELINING}),
        (2, {"1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED}),
    ],
)
def test_its_own_schedules(world: int, expected: dict[str, str], tmp_path: Path) -> None:
    for results in run_ranks(world, list(expected), tmp_path, WORKER):
        assert {case: facts["schedule"] for case, facts in results.items()} == expected
        for facts in results.values():
            assert facts["is_ours"]
            assert facts["equal"]
            assert facts["tensors"] > 50
            assert facts["reloaded"] > 0
            assert facts["offloaded"] > 0
            assert set(facts["groups"]) == GROUPS
            assert facts["live"] == facts["in_use"] == 0


@needs_megatron
@pytest.mark.slow
def test_its_module_has_the_names_as_they_were_introduced() -> None:
    """Version 0.16; what ``helpers.reference`` says of the reference is what is there."""
    from importlib import import_module
    from importlib.metadata import version

    if not version("megatron-core").startswith("0.16."):
        pytest.skip("a later version has the names of main")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = import_module(MODULE)
    for name, taken in reference.FUNCTIONS.items():
        assert parameters(getattr(theirs, name)) == taken, name
    for owner, methods in reference.CLASSES.items():
        for name, (kind, taken) in methods.items():
            cls = getattr(theirs, owner)
            member = inspect.getattr_static(cls, name)
            member = member.fget if kind == "property" else getattr(cls, name)
            assert (kind_of(cls, name), parameters(member)) == (kind, taken), f"{owner}.{name}"
