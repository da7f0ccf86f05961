"""Bounds that are chosen from times, on streams that take time and know it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from toy import assert_idle, batches, make_model, run_step, same_bits

from emulated.test_engine import DELAYS, WIDTH
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._core.bound import IN_FLIGHT_BYTES
from pp_offload._groups import auto_bounds
from pp_offload.backends import AcceleratorBackend

pytestmark = pytest.mark.emulated


class Training:
    """Steps with bounds left to the engine, and the same steps without offload."""

    def __init__(self, manager: PipelineOffloadManager, backend: AcceleratorBackend) -> None:
        self.manager = manager
        self.d2h = cast(torch.Stream, backend.d2h)
        self._on = make_model(width=WIDTH, device="emulated")
        self._off = make_model(width=WIDTH, groups=(), device="emulated")
        self._num = 0

    def step(self, *, length: int = 16, num: int = 4) -> list[Tensor]:
        """Queued, and perhaps not done."""
        self._num += 1
        return self._run(self._on, length, num, offload=True)

    def same_without(self, found: list[Tensor], *, length: int = 16, num: int = 4) -> bool:
        """Whether the last step has the bits of one without offload."""
        return same_bits(found, self._run(self._off, length, num, offload=False))

    def _run(self, model: nn.Module, length: int, num: int, *, offload: bool) -> list[Tensor]:
        inputs = [x.to("emulated") for x in batches(num, WIDTH, self._num, length)]
        return run_step(model, inputs, in_flight=2, offload=offload)

    @staticmethod
    def end_step() -> None:
        """The step has been run, and another one begins, which knows its times."""
        torch.accelerator.synchronize()
        off_interface.reset()

    def bounds(self) -> tuple[int, int]:
        offloader = self.manager.offloader
        return offloader.engine.mover.in_flight.bound.nbytes, offloader.engine.window.bound.nbytes


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors here are small."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


@pytest.fixture
def training(emulated: ModuleType) -> Iterator[Training]:
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    backend = AcceleratorBackend()
    with use_backend(backend, config=config) as manager:
        yield Training(manager, backend)


@pytest.mark.parametrize("delays", DELAYS)
def test_bounds_are_chosen_and_bits_are_the_same(
    emulated: ModuleType, training: Training, delays: str
) -> None:
    emulated.set_delays(**DELAYS[delays])
    assert training.manager.statistics().stalled_ms is None
    bounds = [training.bounds()]
    for _ in range(5):
        assert training.same_without(training.step())
        training.end_step()
        bounds.append(training.bounds())
    cap, window = bounds[-1]
    assert bounds[0][0] == IN_FLIGHT_BYTES > cap > 0 and window > 0
    assert bounds[1][0] != IN_FLIGHT_BYTES, "the first step told"
    assert bounds[2:] == [(cap, window)] * 4, "the second one was the last that was timed"
    assert training.manager.statistics().stalled_ms is not None
    assert not training.manager.offloader.observers.reached
    gc.collect()
    assert_idle(training.manager)


def test_the_begin_of_a_step_does_not_wait_for_times(
    emulated: ModuleType, training: Training
) -> None:
    """While the copies of a step stand still, the next one begins, with the bounds it had."""
    assert training.same_without(training.step())
    before = training.bounds()
    training.end_step()
    chosen = training.bounds()
    assert chosen != before, "the first step's times were known"
    with emulated.hold(training.d2h) as gate:
        found = training.step()
        for _ in range(3):
            off_interface.reset()
            assert training.bounds() == chosen and not training.d2h.query()
        gate.release()
    assert training.same_without(found)
    stalled_ms = training.manager.statistics().stalled_ms
    training.end_step()
    assert training.manager.statistics().stalled_ms != stalled_ms, "now its times are known"


def test_steps_that_differ_are_timed_again(emulated: ModuleType, training: Training) -> None:
    emulated.set_delays(d2h_us=500, h2d_us=500)
    for length, num in [(16, 4), (16, 4), (64, 4), (64, 6), (64, 6), (8, 1), (8, 1), (16, 4)]:
        found = training.step(length=length, num=num)
        assert training.same_without(found, length=length, num=num)
        assert min(training.bounds()) > 0


def test_a_step_without_backward_chooses_nothing(training: Training) -> None:
    before = training.bounds()
    model = make_model(width=WIDTH, device="emulated")
    for _ in range(2):
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        y = model(torch.ones(16, WIDTH, device="emulated"))
        training.end_step()
        del y
    assert training.bounds()[0] == before[0]
    for _ in range(3):
        assert training.same_without(training.step())
        training.end_step()
    assert training.bounds()[0] < before[0]


def test_by_default_what_has_room_stays(emulated: ModuleType) -> None:
    """Nobody has to say that there is enough."""
    backend, sent = AcceleratorBackend(), [0]
    with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        training = Training(manager, backend)
        for _ in range(5):
            assert training.same_without(training.step())
            sent.append(manager.statistics().bytes_offloaded)
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert steps[0] > 0 and steps[-2:] == [0, 0]
