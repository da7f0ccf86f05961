"""Offload in a loop with an ``Accelerator``: same bits, and steps as it counts them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.sessions import assert_no_hooks
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pp_offload import PipelineOffloadManager, use_backend
from pp_offload.backends import CpuBackend
from pp_offload.integrations.accelerate import ActivationOffload

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small_blocks import GROUPS, PRODUCTS, Blocks, batches

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "bf16": {"mixed_precision": "bf16"},
    "ddp": {"gradient_accumulation_steps": 2, "wrap": DistributedDataParallel},
}


def make_accelerator(**options: Any) -> Accelerator:
    """Make an accelerator with new state, whatever was made before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def train(
    make: Callable[[Accelerator, nn.Module], Any],
    wrap: Callable[[nn.Module], nn.Module] = nn.Module.train,
    **options: Any,
) -> tuple[list[Tensor], Any]:
    """Two epochs with an evaluation after each; losses, gradients and parameters; the offload."""
    accelerator = make_accelerator(**options)
    model = wrap(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, batches(9))
    offload = make(accelerator, model)
    torch.manual_seed(17)
    seen: list[Tensor] = []
    for _ in range(2):
        model.train()
        for x, target in data:
            with accelerator.accumulate(model):
                with offload:
                    loss = nn.functional.cross_entropy(model(x), target)
                accelerator.backward(loss)
                seen.append(loss.detach())
                if accelerator.sync_gradients:
                    seen += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), offload:
            seen.append(model(x))
    return [*seen, *(p.detach().clone() for p in model.parameters())], offload


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with use_backend(CpuBackend()):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits_with_the_options_of_an_accelerator(
    product: dict[str, Any], options: dict[str, Any], one_rank: None
) -> None:
    got, offload = train(partial(ActivationOffload, **product), **options)
    assert same_bits(got, train(lambda *_: nullcontext(), **options)[0])
    gc.collect()
    statistics = offload.statistics()
    assert statistics.bytes_offloaded > 0 and statistics.live_tensors == 0
    assert re.search(
        r"ActivationOffload: .* offloaded so far; .*a step takes [\d.]+ ms>", repr(offload)
    )
    assert offload.figures()["offload/bytes_offloaded"] == statistics.bytes_offloaded
    assert offload.figures()["offload/bytes_offloaded"] == 0, "nothing since"
    offload.close()
    offload.close()
    assert_no_hooks()


def test_groups_learn_from_steps_of_the_accelerator() -> None:
    """Nine microbatches in fours: two steps, and one of what is left at the end of the data."""
    lengths = []

    class Asks(ActivationOffload):
        def __enter__(self) -> Any:
            entered = super().__enter__()
            if torch.is_grad_enabled():
                step = PipelineOffloadManager.get_instance().step
                lengths.append(step.num_chunks)
            return entered

    train(partial(Asks, **GROUPS), gradient_accumulation_steps=4)[1].close()
    of_an_epoch = [lengths[0] + number for number in (0, 1, 2, 3, 0, 1, 2, 3, 0)]
    assert lengths == of_an_epoch * 2


def test_models_of_one_loop_have_a_step_together() -> None:
    """Else the step of one ends that of the other, which waits for its backward."""
    accelerator, models = make_accelerator(), [Blocks(), Blocks()]
    offloads = [ActivationOffload(accelerator, model, **GROUPS) for model in models]
    manager = PipelineOffloadManager.get_instance()
    for number in range(3):
        losses = []
        for model, offload in zip(models, offloads, strict=True):
            with offload:
                losses.append(model(torch.randn(4, 12)).sum())
        assert manager.step.num_chunks == 2, number
        accelerator.backward(sum(losses))
        assert manager.step.is_complete(is_ended=True)
    offloads[0].close()
    ended = offloads[0].statistics()
    for _ in range(2):
        with offloads[1]:
            loss = models[1](torch.randn(4, 12)).sum()
        assert manager.step.num_chunks == 1
        accelerator.backward(loss)
    assert offloads[1].statistics().bytes_offloaded > ended.bytes_offloaded > 0
    assert offloads[0].statistics() == replace(ended, host_bytes_reserved=2**21)
    offloads[1].close()


def test_options_of_all_activations_do_not_go_with_groups() -> None:
    with pytest.raises(ValueError, match="groups are given, and head too"):
        ActivationOffload(make_accelerator(), Blocks(), **GROUPS, head="head")
