"""What asks for offload by PyTorch's, Hugging Face's or TRL's own means gets this package's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.processes import environment, run
from helpers.sessions import assert_idle
from helpers.toy import batches, run_step, same_bits
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pp_offload import OffloadActivations, OffloadConfig, errors, patch
from pp_offload.__main__ import main
from pp_offload._common.text import size_text
from pp_offload.backends import Backend
from pp_offload.integrations.patches import patch as Patch

CONFIG = OffloadConfig(device_limit_bytes=None)
WIDTH, NUM_LAYERS = 16, 4
HIDDEN_BYTES = 8 * WIDTH * 4


def saved_on_cpu(layer: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=True):
        return layer(x)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return saved_on_cpu(layer, x)


def around_checkpoint(layer: nn.Module, x: Tensor, reentrant: bool = False) -> Tensor:
    return saved_on_cpu(partial(checkpoint, layer, use_reentrant=reentrant), x)


def wrapped(layer: nn.Module, x: Tensor) -> Tensor:
    return offload_wrapper(checkpoint_wrapper(layer))(x)


def selective(policy: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y: Tensor = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    return y


POLICIES: Any = torch_checkpoint.CheckpointPolicy


def leaving(*args: Any, **kwargs: Any) -> Any:
    """Everything leaves."""
    return POLICIES.MUST_CPU_OFFLOAD


MADE_BEFORE = partial(create_selective_checkpoint_contexts, leaving)


def recomputing(*args: Any, **kwargs: Any) -> Any:
    return POLICIES.PREFER_RECOMPUTE


def by_policy(layer: nn.Module, x: Tensor) -> Tensor:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return leaving() if op is torch.ops.aten.addmm.default else recomputing()

    return selective(policy, layer, x)


needs_policies = pytest.mark.skipif(
    not hasattr(POLICIES, "MUST_CPU_OFFLOAD"), reason="since torch 2.13"
)

INPUTS = NUM_LAYERS * HIDDEN_BYTES
WAYS: dict[str, Any] = {
    "save_on_cpu": (saved_on_cpu, 3 * INPUTS),
    "nested": (nested, 3 * INPUTS),
    "inside a checkpoint": (partial(checkpoint, saved_on_cpu, use_reentrant=False), 0),
    "around a checkpoint": (around_checkpoint, INPUTS),
    "around a reentrant one": (partial(around_checkpoint, reentrant=True), INPUTS),
    "offload_wrapper": (wrapped, INPUTS),
    "policy": pytest.param(by_policy, 3 * INPUTS, marks=needs_policies),
}
"""Each with the bytes that leave in a step: what recipes give is not copied."""


class Layers(nn.Module):
    """Run in one of the ways; the same weights every time."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(NUM_LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.way(layer, x)
        return x


@pytest.fixture
def patched(backend: Backend) -> Iterator[Patch]:
    options = {"min_offload_size": 1, "backend": backend}
    with backend.activate(), patch(CONFIG, **options) as made:
        yield made


@pytest.mark.parametrize(("way", "nbytes"), WAYS.values(), ids=WAYS)
def test_numbers_are_those_without_and_bytes_leave(
    backend: Backend, patched: Patch, way: Any, nbytes: int
) -> None:
    plain, model = (Layers(each).to(backend.device) for each in (nn.Module.__call__, way))
    for step in range(3):
        inputs = [x.to(backend.device) for x in batches(2, WIDTH, step, length=8)]
        expected = run_step(plain, inputs, in_flight=2, offload=False)
        assert same_bits(run_step(model, inputs, in_flight=2, offload=False), expected)
    statistics = patched.statistics()
    assert statistics.bytes_offloaded == 3 * 2 * nbytes
    moved = f"{size_text(statistics.bytes_offloaded)} offloaded"
    assert (moved if nbytes else "nothing offloaded") in repr(patched)
    gc.collect()
    assert_idle(patched)


def test_tensors_leave_before_a_long_forward_ends(backend: Backend, patched: Patch) -> None:
    x = torch.randn(8, WIDTH).to(backend.device).requires_grad_()
    with save_on_cpu():
        for _ in range(20):
            x = x.sin()
        assert patched.statistics().bytes_offloaded >= 15 * HIDDEN_BYTES
    x.sum().backward()


def writes(x: Tensor) -> Tensor:
    hidden = x.sin()
    hidden.view(-1).mul_(2)
    return hidden.cos().exp()


def draws(x: Tensor) -> Tensor:
    hidden = nn.functional.dropout(x.sin(), 0.5) * torch.rand_like(x)
    return nn.functional.dropout(hidden.exp(), 0.5)


@needs_policies
@pytest.mark.parametrize("compute", [writes, draws, lambda x: x.sin() * x.detach().sum().item()])
def test_what_selective_checkpoints_may_meet(
    backend: Backend, patched: Patch, compute: Callable[[Tensor], Tensor]
) -> None:
    """Writes in place, random numbers, outputs that are no tensors, and a second backward."""

    def run(policy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(8, WIDTH).to(backend.device).requires_grad_()
        y = selective(policy, compute, x)
        gradients = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
        return [y.detach(), *gradients, torch.randn(4)]

    num_modes = torch._C._len_torch_dispatch_stack()  # a simulated device has some
    assert same_bits(run(leaving), run(recomputing))
    assert patched.statistics().bytes_offloaded > 0
    assert torch._C._len_torch_dispatch_stack() == num_modes


@needs_policies
def test_a_checkpoint_that_preserves_no_random_state_sets_none(patched: Patch) -> None:
    x = torch.ones(8, WIDTH, device=patched._stash.backend.device, requires_grad=True)
    options: Any = {"preserve_rng_state": False, "context_fn": MADE_BEFORE}
    y = checkpoint(lambda: x.sin() * torch.rand_like(x), use_reentrant=False, **options)
    seen = torch.rand(1)
    y.sum().backward()
    assert torch.rand(1) != seen
    assert patched.statistics().bytes_offloaded > 0


@needs_policies
def test_a_cast_weight_is_there_for_the_next_checkpoint() -> None:
    """PyTorch's raises an error: its recomputation casts once more."""
    layer, x = nn.Linear(WIDTH, WIDTH), torch.ones(8, WIDTH, requires_grad=True)
    with patch(CONFIG, min_offload_size=1), torch.autocast("cpu", torch.bfloat16):
        ours = selective(leaving, layer, x) + selective(leaving, layer, x.exp())
        plain = layer(x) + layer(x.exp())
    gradients = [torch.autograd.grad(y.sum(), [x, layer.weight]) for y in (ours, plain)]
    assert same_bits(*gradients)


@needs_policies
def test_code_that_is_compiled_inside_a_checkpoint_stays_compiled() -> None:
    compiler = Mock(side_effect=lambda module, inputs: module)
    layer = torch.compile(nn.Linear(WIDTH, WIDTH), backend=compiler)
    with patch(CONFIG, min_offload_size=1) as made:
        selective(leaving, layer, torch.ones(8, WIDTH, requires_grad=True)).sum().backward()
    assert made.statistics().bytes_offloaded == HIDDEN_BYTES and compiler.called


@needs_policies
def test_parameters_stay_when_a_policy_offloads_everything(
    backend: Backend, patched: Patch
) -> None:
    """A linear layer computes with ``weight.t()``, which is an operator's output, too."""
    layer = nn.Linear(WIDTH, WIDTH).to(backend.device)
    selective(leaving, layer, torch.randn(8, WIDTH).to(backend.device)).sum().backward()
    assert patched.statistics().bytes_offloaded == HIDDEN_BYTES


def test_a_subclass_of_save_on_cpu_keeps_its_own_hooks(backend: Backend, patched: Patch) -> None:
    class Rounding(save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            self.pack_hook = lambda tensor: tensor.bfloat16()
            self.unpack_hook = lambda tensor: tensor.float()

    x = torch.randn(8, WIDTH).to(backend.device).requires_grad_()
    with Rounding():
        y = x.sin()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, x.detach().bfloat16().float().cos())
    assert patched.statistics().bytes_offloaded == 0


def test_undo_puts_everything_back_and_offloaded_tensors_stay_good() -> None:
    before = {**vars(save_on_cpu)}, create_selective_checkpoint_contexts.__code__
    handle = patch(CONFIG, min_offload_size=1)
    with pytest.raises(errors.OffloadError, match=r"patch\(\) is active already"):
        patch()
    x = torch.randn(8, WIDTH, requires_grad=True)
    with save_on_cpu():
        y = torch.special.erf(x)
    handle.undo()
    handle.undo()
    assert ({**vars(save_on_cpu)}, create_selective_checkpoint_contexts.__code__) == before
    (got,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(torch.special.erf(x).sum(), x)
    assert torch.equal(got, expected)
    with pytest.raises(TypeError, match="config is 5"):
        patch(5)  # type: ignore[arg-type]
    with patch():
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_flag_of_transformers_offloads(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("transformers has the flag from 5.17 on, by this name from 5.23 on")
    from helpers.tiny_llama import make_data, make_llama

    def run(offload: bool) -> list[Tensor]:
        model = make_llama(attention_dropout=0.0)
        if offload:
            kwargs = {"use_reentrant": reentrant}
            model.activation_checkpointing_enable(kwargs, offload=True)
        seen = []
        for row in make_data(3):
            loss = model(**{name: value.unsqueeze(0) for name, value in row.items()}).loss
            loss.backward()
            seen.append(loss.detach())
        return seen + [p.grad for p in model.parameters() if p.grad is not None]

    expected = run(False)
    with patch(CONFIG, min_offload_size=1) as made:
        got = run(True)
        assert made.statistics().bytes_offloaded == 3 * 2 * 12 * 16 * 4
    assert same_bits(got, expected)


def test_the_flag_of_trl_makes_a_context_of_ours() -> None:
    trl = pytest.importorskip("trl")
    from helpers.tiny_llama import make_llama
    from trl.trainer import sft_trainer

    original = trl.models.get_act_offloading_ctx_manager
    with patch(CONFIG) as made:
        context = sft_trainer.get_act_offloading_ctx_manager(model=make_llama(hidden_size=512))
        assert isinstance(context, OffloadActivations)
        tokens = torch.zeros(1, 12, dtype=torch.long)
        with context:
            loss = make_llama(hidden_size=512)(input_ids=tokens, labels=tokens).loss
        loss.backward()
        assert context.statistics().bytes_offloaded > 0
        moved = context.statistics().bytes_offloaded
        assert moved > 2**18 and f", {size_text(moved)} offloaded" in repr(made)
    assert sft_trainer.get_act_offloading_ctx_manager is original


SCRIPT = """
import sys
import torch
from torch.autograd.graph import save_on_cpu
assert sys.argv[1:] == ["--length", "8"] and __name__ == "__main__"
x = torch.randn(1024, 1024, requires_grad=True)
with save_on_cpu():
    y = torch.special.erf(x)
y.sum().backward()
sys.exit(3)
"""


@pytest.mark.parametrize("arguments", [["train.py"], ["-m", "train"]])
def test_a_script_runs_unchanged(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pp_offload", *arguments, "--length", "8"]
    done = run(command, tmp_path, environment(), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "<pp_offload.patch: active, 4.00 MiB offloaded" in done.stderr


@pytest.mark.parametrize(("arguments", "what"), [([], "script"), (["simulate"], "file simulate")])
def test_without_a_script_the_command_says_how(
    arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pp_offload", *arguments])
    with pytest.raises(SystemExit, match=f"found no {what}; expected") as ended:
        main()
    assert "python -m pp_offload train.py" in str(ended.value.code)
