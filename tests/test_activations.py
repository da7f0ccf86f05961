"""Everything a forward saves is offloaded; any number of forwards may be in pending."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from conftest import make_backend, on_two_backends
from helpers.checkpointed import ORDERS, make, results
from helpers.sessions import assert_idle, assert_no_hooks
from helpers.sliced import Call, Order, first_in_first_out, last_in_first_out, one_by_one, together
from helpers.toy import same_bits
from helpers.virtual_training import ROWS, SAVED_BYTES, WIDTH, Layers, hardware
from torch import Tensor, nn

from pp_offload import NoOpManager, OffloadActivations, OffloadConfig
from pp_offload._common import processes
from pp_offload._memory.budget import as_another_process
from pp_offload.activations import (
    get_act_offloading_ctx_manager,
    get_lora_act_offloading_ctx_manager,
)
from pp_offload.backends import Backend
from pp_offload.simulate import VirtualBackend
from pp_offload.testing import SimulatedBackend


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", [*ORDERS, together], ids=lambda order: order.__name__)
@pytest.mark.parametrize("way", [None, "full"], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("is_whole_step", [False, True])
def test_equal_bit_for_bit(
    activations: OffloadActivations, is_whole_step: bool, way: str | None, order: Order
) -> None:
    """Around each forward, or around backwards as well, as in an eager trainer."""
    backend = activations.stash.backend
    plain, model = (make(backend.device, way, backend)[0] for _ in range(2))
    activations.keep_module(model)
    for_forward, for_step = (None, activations) if is_whole_step else (activations, None)
    for step in range(3):
        program = partial(results, order=order, step=step, device=backend.device, rows=6 + step)
        expected = program(plain)
        with for_step or nullcontext():
            got = program(model, context=for_forward)
        assert same_bits(got, expected), step
        gc.collect()
        assert_idle(activations)
    assert activations.statistics().bytes_offloaded > 0


def test_casts_of_parameters_stay() -> None:
    """Autocast's cache holds them until the forward ends, where memory is at its peak."""
    backend, model = SimulatedBackend("late"), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)

    def run(context: Any) -> list[Tensor]:
        model.zero_grad()
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.linspace(-1, 1, 256).view(4, 64)).square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    with backend.activate():
        assert same_bits(run(context), run(nullcontext()))
    assert 0 < context.statistics().bytes_offloaded < 64 * 64 * 2


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("stash", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ["eager", "late"])
def test_device_memory_is_arithmetic(order: str, stash: int, window: int) -> None:
    """A chain of 12 operations that save their input, in units of one tensor."""
    numel, nbytes = 1000, 4000
    backend = SimulatedBackend(order)
    config = OffloadConfig(max_in_flight_bytes=0, prefetch_bytes=window * nbytes)
    with backend.activate():
        offload = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=stash, config=config, backend=backend
        )
        x = torch.ones(numel, requires_grad=True)
        x * 1  # the device knows it from now on
        before = backend.device_bytes
        backend.take_device_peak()
        with offload:
            y = x * 1
            for _ in range(12):
                y = y.sin()
        rest = 12 % stash
        assert backend.device_bytes - before == (rest + 1) * nbytes, "what is left, and y"
        # Those that gathered leave when the next operator saves, before it makes its output.
        assert backend.take_device_peak() - before == (stash + 1) * nbytes
        y.backward(torch.ones(numel))
        # y and its gradient; what was saved and its cosine; the gradients behind and before it.
        assert backend.take_device_peak() - before == max(6 + window, 7 if rest else 0) * nbytes


@pytest.mark.parametrize("stash", [1, 4, 9])
def test_a_backward_that_comes_behind_a_step_and_the_next_forward(stash: int) -> None:
    """The last tensors leave when the next forward begins; a fused optimizer counts no change."""

    def run(context: nullcontext[None] | OffloadActivations) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        before, results = torch.zeros((), requires_grad=True), []
        for _ in range(6):
            with context:
                loss = model(torch.randn(8, 64)).square().sum()
            before.backward()
            results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            before = loss
        return results

    offload = OffloadActivations(max_fwd_stash_size=stash, min_offload_size=1)
    assert same_bits(run(offload), run(nullcontext()))
    assert offload.statistics().bytes_offloaded > 0


def test_small_ones_and_those_of_a_no_op_manager_stay() -> None:
    offload = OffloadActivations(min_offload_size=1200, max_fwd_stash_size=1)
    for numel, context, expected in (
        (299, nullcontext(), 0),
        (300, NoOpManager(), 0),
        (300, nullcontext(), 1),
    ):
        with offload:
            y = torch.ones(numel, requires_grad=True) * 1
            with context:
                y = y.sin()
        assert offload.statistics().live_tensors == expected
        y.sum().backward()


@on_two_backends
@pytest.mark.parametrize(("use_pin_memory", "use_streams"), [(False, True), (True, False)])
def test_options(active: Backend, use_pin_memory: bool, use_streams: bool) -> None:
    """Without streams each copy is waited for, which a late device shows."""
    offload = OffloadActivations(
        use_pin_memory, use_streams, min_offload_size=1, max_fwd_stash_size=1, backend=active
    )
    x = torch.linspace(0, 1, 300).to(active.device).requires_grad_()
    with offload:
        y = (x * 1).sin()
    is_in_flight = offload.statistics().bytes_in_flight > 0
    assert is_in_flight is use_streams or not isinstance(active, SimulatedBackend)
    y.sum().backward()
    assert same_bits([x.grad], [x.detach().cos()])


def decoder() -> nn.Sequential:
    """A body and an output head."""
    head, body = (nn.Sequential(nn.Linear(8, 8), act) for act in (nn.Sigmoid(), nn.Tanh()))
    return nn.Sequential(OrderedDict(body=body, lm_head=head))


@pytest.mark.parametrize("head", [None, "body"])
def test_the_head_is_left_out(head: str | None) -> None:
    model = decoder()
    offload = get_lora_act_offloading_ctx_manager(
        model, min_offload_size=1, max_fwd_stash_size=1, head=head
    )
    with offload:
        y = model(torch.ones(4, 8, requires_grad=True) * 1)
    assert offload.statistics().live_tensors == 2, "the input and Tanh's output, or Sigmoid's"
    y.sum().backward()
    assert_no_hooks()


def test_a_context_for_a_model_has_the_options_of_trl_and_torchtune() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_lora_act_offloading_ctx_manager(nn.Linear(2, 2), warn_if_no_head=False)
    with pytest.raises(ValueError, match=r"head is 'tail', but the model has no module"):
        get_lora_act_offloading_ctx_manager(decoder(), head="tail")
    assert isinstance(get_act_offloading_ctx_manager(decoder(), False), NoOpManager)
    offload = get_act_offloading_ctx_manager(decoder(), use_streams=False, max_fwd_stash_size=2)
    assert isinstance(offload, OffloadActivations)
    names = ("use_pin_memory", "use_streams", "min_tensor_size_bytes", "max_fwd_stash_size")
    assert [getattr(offload, name) for name in names] == [True, False, 1024, 2]


@pytest.mark.parametrize("order", [one_by_one, first_in_first_out])
def test_after_two_steps_the_log_says_once_what_a_step_takes(
    activations: OffloadActivations, order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps without a backward do not count."""
    backend = activations.stash.backend
    model, _ = make(backend.device, None, backend)
    assert activations.statistics().step_ms is None and "a step takes" not in repr(activations)
    times = []
    with caplog.at_level("INFO"):
        for number in range(6):
            for each in (order, lambda call, leaves: [call(leaves[0])]):
                results(model, each, number, backend.device, context=activations, num=2)
            backend.synchronize()
            times.append(activations.statistics().step_ms)
    (line,) = [line for line in caplog.messages if "a step takes" in line]
    assert f"a step takes {times[-1]:.1f} ms>" in repr(activations)
    has_clock = activations.statistics().stalled_ms is not None
    assert times[-1] > 0 and (times[-1] == times[-2]) == has_clock


@pytest.mark.parametrize(
    ("kind", "tiers", "is_said"),
    [("cpu", ("host",), True), ("cpu", ("disk",), False), ("late", ("host",), False)],
)
def test_that_it_only_copies_is_said_once(
    kind: str,
    tiers: tuple[str, ...],
    is_said: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_warned", WeakKeyDictionary())  # a process is warned once
    config = OffloadConfig(tiers=tiers, disk_dir=tmp_path if "disk" in tiers else None)
    for _ in range(2):
        with OffloadActivations(config=config, backend=make_backend(kind)):
            pass
    assert caplog.text.count("frees none") == is_said


# Below a limit as much stays as has room, without groups to mark

NUM_LAYERS = 24


def one_ahead(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    """As in a pipeline: a step is over where no graph is left."""
    losses = [call(leaves[0]).square().mean()]
    for x in leaves[1:]:
        losses.append(call(x).square().mean())
        losses[-2].backward()
    losses[-1].backward()
    return losses


@pytest.mark.parametrize("program", [one_by_one, last_in_first_out, one_ahead])
@pytest.mark.parametrize("limit_bytes", [1, 3000, 2**30])
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_equal_below_any_limit(order: str, limit_bytes: int, program: Order) -> None:
    """In steps that differ in how many microbatches there are."""
    backend = make_backend(order)
    offload = OffloadActivations(
        min_offload_size=1,
        max_fwd_stash_size=2,
        config=OffloadConfig(device_limit_bytes=limit_bytes),
        backend=backend,
    )
    plain, model = (make(backend.device, None, backend)[0] for _ in range(2))
    sent = []
    for number, num in enumerate([2] * 7 + [3, 3, 1, 1]):
        before = offload.statistics().bytes_offloaded
        expected = results(plain, program, number, backend.device, num=num)
        got = results(model, program, number, backend.device, context=offload, num=num)
        assert same_bits(got, expected)
        sent.append(offload.statistics().bytes_offloaded - before)
    assert sent[0]
    assert bool(sent[6]) == (limit_bytes < 2**30)


@pytest.mark.parametrize(("num_saved", "least", "most"), [(1, 0.9, 1), (20, 0.3, 0.7), (60, 0, 0)])
def test_the_limit_is_kept_and_filled(
    num_saved: int, least: float, most: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what all layers save as much leaves as must; and the log says so once."""
    caplog.set_level(logging.INFO)
    limit_bytes = int(num_saved * SAVED_BYTES) + NUM_LAYERS * WIDTH**2 * 4
    backend = VirtualBackend(hardware(1.0))
    offload = OffloadActivations(
        max_fwd_stash_size=1,
        config=OffloadConfig(
            device_limit_bytes=limit_bytes,
            max_in_flight_bytes=SAVED_BYTES,
            prefetch_bytes=SAVED_BYTES,
        ),
        backend=backend,
    )
    with backend.activate():
        model = Layers(NUM_LAYERS, WIDTH)
        offload.keep_module(model)
        sent, peaks = [], []
        for _ in range(10):
            before = offload.statistics().bytes_offloaded
            backend.memory.take_peak()
            x = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
            with offload:
                y = model(x, offload=False)
            y.backward(torch.empty_like(y))
            del x, y
            backend.synchronize()  # as reading a loss does
            peaks.append(backend.memory.peak_bytes)
            sent.append(offload.statistics().bytes_offloaded - before)
    assert least <= sent[-1] / sent[0] <= most
    assert num_saved == 1 or max(peaks) <= limit_bytes
    (line,) = [text for text in caplog.messages if "saved tensors stay" in text]
    assert f"{sent[-1] / 2**30:.2f} are on the host" in line
    assert f"of at most {limit_bytes / 2**30:.2f}" in line
    assert "a step takes" in line and "without waiting for copies (estimated)" in line


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_idle_host_memory_of_another_context_makes_room_once(
    tier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also that of a dropped context, without the collector. What is in use stays where it is."""
    budget, x = OffloadConfig(host_budget_bytes=2**16), torch.rand(64, 64, requires_grad=True)

    def sent(context: OffloadActivations, *, is_over: bool = True) -> Any:
        before = context.statistics().bytes_offloaded
        with context:
            loss = x.sin().cos().sin().sum()
        nbytes = context.statistics().bytes_offloaded - before
        return (nbytes, torch.autograd.grad(loss, x)[0]) if is_over else (nbytes, loss)

    gc.disable()
    try:
        with as_another_process():
            make = partial(OffloadActivations, max_fwd_stash_size=1, config=budget)
            in_use, finder = make(), make()
            _, loss = sent(in_use, is_over=False)
            assert sent(finder)[0] == 0 and "release_host_memory" not in caplog.text
            expected = torch.autograd.grad(loss, x)[0]
            num, got = sent(finder)
            assert num > 0 and same_bits([got], [expected])
            del finder
            training = make(config=replace(budget, tiers=(tier,)))
            assert sent(training)[0] == sent(training)[0] == num
            if tier == "host":
                assert sent(in_use)[0] == num, "it asks now"
                assert sent(training)[0] == 0, "it has asked before"
                assert "release_host_memory" in caplog.messages[-1]
    finally:
        gc.enable()
