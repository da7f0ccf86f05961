"""The engine on a virtual device: time obeys the law, and memory is spared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.virtual_training import FLOPS, NUM_LAYERS, SAVED_BYTES, Steady, Training, hardware
from on_card import CASES, GIB, Layer
from torch import Tensor, nn

from pp_offload.simulate import DEVICES, Hardware, VirtualBackend


def steady(device: Hardware, in_flight: int, window: int = 12, **how: bool) -> Steady:
    """The steady state with so many layers under way in each direction."""
    bounds = {"max_in_flight_bytes": window * SAVED_BYTES, "prefetch_bytes": window * SAVED_BYTES}
    training = Training(None, device=device, **bounds, **how)
    with training.running():
        return training.steady(in_flight)


@pytest.mark.parametrize(("in_flight", "copies", "window"), [(1, 0.8, 4), (3, 2.0, 12)])
def test_a_link_that_is_fast_enough_costs_nothing_and_saves_memory(
    in_flight: int, copies: float, window: int
) -> None:
    """A single microbatch needs its copies in a forward's time; several in turn have a step's."""
    device = hardware(copies)
    none = steady(device, in_flight, offload=False)
    ours = steady(device, in_flight, window)
    assert none.seconds == pytest.approx(NUM_LAYERS * 3 * FLOPS / (990e12 * 0.6), rel=0.05)
    assert ours.seconds / none.seconds < 1.03
    assert ours.peak_bytes < none.peak_bytes


def test_a_host_that_waits_for_operators_has_the_lower_peak() -> None:
    """What was copied is free as soon as the host sees it; a host that is ahead sees it late."""
    device = hardware(0.8)
    ahead, waits = steady(device, 3), steady(device, 3, is_blocking=True)
    assert waits.peak_bytes < ahead.peak_bytes
    assert waits.seconds > ahead.seconds, "each launch is on its way"
    further = replace(device, num_queued_launches=10**9, launch_s=0)
    assert steady(further, 3).peak_bytes >= ahead.peak_bytes


class Gpt(nn.Sequential):
    """Of layers with attention and MLP as groups."""

    def forward(self, x: Tensor, *, offload: bool) -> Tensor:
        for layer in self:
            layer.groups = ("attn", "mlp") if offload else ()
        return super().forward(x[None])[0]


def test_layers_of_gpt_all_leave() -> None:
    """Their copies need 1.05 of the time that compute does."""
    case, figures = CASES["gpt4096"], []
    for offload in (False, True):
        with torch.device("meta"):
            model = Gpt(*(Layer(case).bfloat16() for _ in range(2)))
        training = Training(
            None,
            device=DEVICES["H100"],
            model=model,
            offload=offload,
            min_offloaded_tensor_size=case.min_numel,
            max_in_flight_bytes="auto",
            prefetch_bytes="auto",
            rematerialize="none",
        )
        training.rows = case.length
        with training.running():
            figures.append([training.steady() for _ in range(3)][-1])  # it learns from two
    none, ours = figures
    assert none.peak_bytes / GIB == pytest.approx(5.94, rel=0.01)
    assert ours.seconds <= 1.065 * none.seconds
    assert ours.peak_bytes / GIB <= 3.51


def test_work_of_another_stream_takes_time_beside_the_host() -> None:
    backend = VirtualBackend(DEVICES["H100"])
    assert backend.allocate_host(2**36).nbytes == 2**36, "addresses, and no memory"
    with backend.stream(backend.new_stream("side")):
        backend.current_stream().launch(1.0)
    assert backend.current_stream() is backend.compute
    assert backend.host.now_s < 1.0 < backend.seconds, "though nobody is on that stream any more"
    backend.synchronize()
    assert backend.host.now_s == backend.seconds
