"""Offload in torchtitan: its own Llama, trainer, checkpoints and schedules, on real ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.processes import EXAMPLES, run_command
from helpers.ranks import run_ranks
from torch import nn

from pp_offload import OffloadConfig
from pp_offload.errors import NotWhileCapturingError

pytest.importorskip("torchtitan.protocols.model_spec", reason="no torchtitan 0.3")

from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC
from torchtitan.protocols.model_spec import ModelSpec

from pp_offload.integrations.torchtitan import OffloadAC, with_offload

WORKER = Path(__file__).with_name("titan_worker.py")
IN_STAGES = [
    "--schedule Interleaved1F1B --checkpoint selective",
    "--schedule 1F1B --checkpoint selective --compile",
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ["--ranks 1"]),
        (2, ["--schedule 1F1B"]),
        pytest.param(1, ["--ranks 1 --checkpoint full --compile"], marks=pytest.mark.slow),
        pytest.param(2, IN_STAGES, marks=pytest.mark.slow),
    ],
)
def test_its_llama_is_equal_bit_for_bit(world: int, cases: list[str], tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(world, cases, tmp_path, WORKER)):
        assert list(results) == cases
        for case, (is_equal, num_bytes) in results.items():
            assert is_equal and num_bytes > 2**16, f"{case}, rank {rank}: {num_bytes}"


@pytest.mark.slow
def test_the_example_runs() -> None:
    script = str(EXAMPLES / "train_torchtitan.py")
    done = run_command([sys.executable, script, "--steps", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all losses and final parameters: equal bit for bit" in done.stdout
    assert "mlp" in done.stdout


def make_schedule() -> tuple[Any, ...]:
    """Makes none."""
    return (None,)


SPEC: Any = ModelSpec("llama3", "8B", None, lambda model, **_: model, make_schedule, None, None)
GROUPS = {"mlp": "layers.*.feed_forward"}


def test_a_wrong_argument_is_refused() -> None:
    for wrong in ("llama3", ModelSpec, OffloadConfig()):
        with pytest.raises(TypeError, match=r"spec is .*expected the model_spec"):
            with_offload(wrong, GROUPS)
    with pytest.raises(ValueError, match="pipelining_fn of llama3 is None.*OffloadAC"):
        with_offload(replace(SPEC, pipelining_fn=None), GROUPS)


def test_a_spec_attaches_its_schedule_or_warns_and_stays_the_same_otherwise(
    recwarn: pytest.WarningsRecorder,
) -> None:
    spec, model = with_offload(SPEC, GROUPS), nn.Linear(1, 1)
    assert spec.flavor == "8B" and SPEC.pipelining_fn is make_schedule
    assert spec.pipelining_fn.__doc__ == "Makes none."
    with pytest.raises(TypeError, match="schedule is None"):
        spec.pipelining_fn()
    assert spec.parallelize_fn(model, parallel_dims=SimpleNamespace(pp_enabled=True)) is model
    assert not recwarn.list
    with pytest.warns(UserWarning, match="pipeline_parallel_degree is 1.*OffloadAC"):
        spec.parallelize_fn(model, parallel_dims=SimpleNamespace(pp_enabled=False))


def checkpointed(**options: Any) -> nn.Module:
    """A model of one block under our policy, as torchtitan builds and applies it."""
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(2, 2)})})
    policy = OffloadAC.Config(**options).build(dump_folder="")
    assert isinstance(policy, ActivationCheckpointing) and isinstance(policy.config, FullAC.Config)
    policy.apply(model)
    return model["layers"]["0"]


def test_options_of_the_policy_reach_its_checkpoints() -> None:
    config = OffloadConfig(host_budget_bytes=2**20)
    params = checkpointed(min_offload_size=7, offload=config, preserve_rng_state=False)
    params = params.recompute.params
    assert params.offload_inputs and params.min_offload_size == 7 and params.config == config
    assert not params.preserve_rng_state
    with pytest.raises(ValueError, match="debug is True"):
        checkpointed(debug=True)


def test_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    block = checkpointed(min_offload_size=8)
    monkeypatch.setattr(type(block.recompute.stash.backend), "is_capturing", True)
    with pytest.raises(NotWhileCapturingError, match="disable_cuda_graphs"):
        block(None)
