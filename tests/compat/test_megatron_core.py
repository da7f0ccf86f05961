"""Megatron-Core, as the index has it, trains its GPT model with ours in the place of its module."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.ranks import WORKERS, run_ranks
from signatures import REFERENCE, signature

from pp_offload.compat.megatron import THEIRS

pytestmark = pytest.mark.slow  # it takes seconds to import

GROUPS = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
NO_PIPELINING = "forward_backward_no_pipelining"
ONE_F_ONE_B = "forward_backward_pipelining_without_interleaving"
INTERLEAVED = "forward_backward_pipelining_with_interleaving"


@pytest.fixture(autouse=True, scope="module")
def megatron() -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (1, {"serial": NO_PIPELINING, "serial:recompute": NO_PIPELINING}),
        (2, {"1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED}),
    ],
)
def test_its_own_schedules(world: int, expected: dict[str, str], tmp_path: Path) -> None:
    worker = WORKERS / "megatron_worker.py"
    for results in run_ranks(world, list(expected), tmp_path, worker):
        assert {case: facts["schedule"] for case, facts in results.items()} == expected
        for facts in results.values():
            assert facts["is_ours"] and facts["equal"]
            assert facts["tensors"] > 50
            assert facts["reloaded"] > 0 and facts["offloaded"] > 0
            assert set(facts["groups"]) == GROUPS
            assert facts["live"] == facts["in_use"] == 0


def test_its_module_has_the_names_as_they_were_introduced() -> None:
    """Version 0.16; what the table says of the reference is what is there."""
    if not version("megatron-core").startswith("0.16."):
        pytest.skip("a later version has the names of main")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = import_module(THEIRS)
    for owner, methods in REFERENCE.items():
        place = getattr(theirs, owner) if owner else theirs
        for name, expected in methods.items():
            assert signature(place, name) == expected, f"{owner}.{name}"
