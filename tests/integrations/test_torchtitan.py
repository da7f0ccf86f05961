"""Offload in pipelines of torchtitan: its own Llama, checkpoints and schedules, on real ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_example import run_command
from test_pipelining import ROOT, run_ranks

from pp_offload import OffloadConfig
from pp_offload.integrations.torchtitan import with_offload

WORKER = Path(__file__).with_name("titan_worker.py")
CASES = ["layer:1F1B", "op:Interleaved1F1B", "full:GPipe", "none:1F1B", "layer:1F1B:compiled"]
"""The first is what torchtitan does where its configuration says nothing."""


needs_torchtitan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="no torchtitan")
"""Without importing it here, which takes long and, on a CPU, triton."""


@needs_torchtitan
def test_its_llama_is_equal_bit_for_bit(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, CASES, tmp_path, WORKER)):
        assert list(found) == CASES
        for case, facts in found.items():
            where = f"{case}, rank {rank}"
            assert facts["equal"] and facts["tensors"] > 20, where
            assert facts["offloaded"] > 2**20, where
            assert facts["in_use"] == facts["live"] == 0, where


@needs_torchtitan
@pytest.mark.slow
def test_the_example_runs() -> None:
    script = str(ROOT / "examples" / "train_torchtitan.py")
    done = run_command([sys.executable, script, "--steps", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all losses and final parameters: equal bit for bit" in done.stdout
    assert "mlp" in done.stdout


@dataclass
class Spec:
    """As those of torchtitan, but for other fields."""

    pipelining_fn: Callable[..., Any] | None
    name: str = "model"


def test_what_is_no_spec_is_refused() -> None:
    groups = {"mlp": "layers.*.feed_forward"}
    for wrong in ("llama3", Spec, OffloadConfig()):
        with pytest.raises(TypeError, match=r"spec is .*get_train_spec.*pp_offload\[titan\]"):
            with_offload(wrong, groups)
    with pytest.raises(ValueError, match="pipelining_fn of the Spec is None.*OffloadActivations"):
        with_offload(Spec(None), groups)
    with pytest.raises(ValueError, match="groups is empty"):
        with_offload(Spec(lambda: ()), {})
    with pytest.raises(TypeError, match="config"):
        with_offload(Spec(lambda: ()), groups, {"tiers": ("disk",)})  # type: ignore[arg-type]


def test_the_rest_of_a_spec_stays() -> None:
    def pipelining_fn() -> None:
        """Makes one."""

    spec = Spec(pipelining_fn, "llama3")
    made = with_offload(spec, {"mlp": "layers.*.feed_forward"})
    assert made.name == "llama3" and spec.pipelining_fn is pipelining_fn
    assert made.pipelining_fn is not pipelining_fn
    assert made.pipelining_fn.__doc__ == "Makes one."  # type: ignore[union-attr]
