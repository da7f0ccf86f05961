"""F55: a model evaluated on a second thread while the first trains it: both right, no hook left.

The forwards of both stop inside every group, and go on in every order there is.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import make_backend
from field_checks import hook_depth
from processes import HANG_S
from threaded import assert_all_idle, on_threads
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from toy import same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadConfig,
    PipelineOffloadManager,
    offload_modules,
    use_backend,
)
from pp_offload.pipelining import attach

pytestmark = pytest.mark.field("F55")

WAYS = ["markers", "modules", "attach", "attach modules"]
NUM_PARTS = 3
ORDERS = [
    "".join("T" if place in mine else "E" for place in range(2 * NUM_PARTS))
    for mine in combinations(range(2 * NUM_PARTS), NUM_PARTS)
]
"""Which thread runs its next part: of training, or of evaluation."""


class Turns:
    """Two threads, of which one runs at a time, in an order given beforehand."""

    def __init__(self, order: str) -> None:
        self._left = list(order)
        self._changed = threading.Condition()

    def begin(self, who: str) -> None:
        """Wait for the first turn of this thread."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._may(who), HANG_S), self._left

    def pause(self, who: str) -> None:
        """The turn of this thread is over. Wait for its next, unless it has none: then go on."""
        with self._changed:
            if who in self._left:
                self._left.remove(who)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._may(who), HANG_S), self._left

    def end(self, who: str) -> None:
        """This thread needs no turn any more."""
        with self._changed:
            self._left = [one for one in self._left if one != who]
            self._changed.notify_all()

    def _may(self, who: str) -> bool:
        return who not in self._left or self._left[0] == who


class Part(nn.Module):
    """A group that stops in the middle, where its thread is told to."""

    def __init__(self, seed: int, is_marked: bool) -> None:
        super().__init__()
        weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)) / 2
        self.weight = nn.Parameter(weight)
        self.is_marked = is_marked
        self.pause: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        is_marked = self.is_marked
        with off_interface(is_marked, x, "part") as x:
            y = torch.tanh(x @ self.weight)
            self.pause()
            y = y.sin().exp()
        return off_interface.group_commit(y, name="part") if is_marked else y


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        is_marked = way in ("markers", "attach")
        self.a, self.b = Part(1, is_marked), Part(2, is_marked)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x * 2 + self.a(x)) * 3

    def pause_by(self, pause: Callable[[], None]) -> None:
        """Have both groups call ``pause`` in the middle."""
        self.a.pause = self.b.pause = pause


@contextmanager
def trainer_of(way: str, model: Model, directory: Path) -> Iterator[Callable[[Tensor], Any]]:
    """Runs one step, and gives back what it made; ``plain`` is without offload."""

    def gradients() -> list[Tensor]:
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return [gradient for gradient in found if gradient is not None]

    def by_hand(x: Tensor) -> list[Tensor]:
        if way != "plain":
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
        leaf = x.clone().requires_grad_()
        loss = model(leaf).square().sum()
        loss.backward()
        assert leaf.grad is not None
        return [loss.detach(), leaf.grad, *gradients()]

    if not way.startswith("attach"):
        with offload_modules(model, {"part": ["a", "b"]}) if way == "modules" else nullcontext():
            yield by_hand
        return
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 1, loss_fn=lambda y, _: y.square().sum())

        def by_schedule(x: Tensor) -> list[Tensor]:
            losses: list[Tensor] = []
            schedule.step(x, target=x, losses=losses, return_outputs=False)
            return [losses[0].detach(), *gradients()]

        with attach(schedule, {"part": ["a", "b"]} if way == "attach modules" else None):
            yield by_schedule
    finally:
        dist.destroy_process_group()


@contextmanager
def session(kind: str) -> Iterator[PipelineOffloadManager]:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(kind), config=config) as manager:
        yield manager


def both(
    model: Model, train: Callable[[], Any], evaluate: Callable[[], Any], order: str
) -> tuple[Any, Any]:
    """What two threads make of one model, in this order; neither has a hook left."""
    turns = Turns(order)
    who: dict[int, str] = {}
    model.pause_by(lambda: turns.pause(who[threading.get_ident()]))

    def run(name: str, work: Callable[[], Any]) -> Any:
        who[threading.get_ident()] = name
        turns.begin(name)
        try:
            found = work()
            assert hook_depth() == 0, f"hooks are left in {name}"
            return found
        finally:
            turns.end(name)

    found = on_threads([lambda: run("T", train), lambda: run("E", evaluate)])
    model.pause_by(lambda: None)
    return found[0], found[1]


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["cpu", "cpu threads"])
@pytest.mark.parametrize("way", WAYS)
def test_evaluation_beside_training(way: str, kind: str, without_grad: Any, tmp_path: Path) -> None:
    x, other = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    plain = Model("plain")
    with trainer_of("plain", plain, tmp_path) as train:
        right = train(x)
    right_output = plain(other).detach()
    model = Model(way)
    with session(kind) as manager, trainer_of(way, model, tmp_path) as train:
        train(x)
        before = manager.statistics().bytes_offloaded
        train(x)
        alone = manager.statistics().bytes_offloaded - before
        assert alone > 0

        def evaluate() -> Tensor:
            with without_grad():
                return model(other)

        for order in ORDERS:
            before = manager.statistics().bytes_offloaded
            found, output = both(model, lambda: train(x), evaluate, order)
            assert same_bits(found, [right[0], *right[2:]] if "attach" in way else right), order
            assert same_bits([output.clone()], [right_output]), order
            assert manager.statistics().bytes_offloaded - before == alone, order
        assert hook_depth() == 0
        manager.reset()
        assert_all_idle(manager)


@pytest.mark.parametrize("way", ["markers", "modules"])
def test_a_forward_with_grad_and_no_chunk(way: str, tmp_path: Path) -> None:
    """It is told so, in its own thread; training beside it is right."""
    x, other = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    plain = Model("plain")
    with trainer_of("plain", plain, tmp_path) as train:
        right = train(x)
    model = Model(way)
    with session("cpu") as manager, trainer_of(way, model, tmp_path) as train:
        train(x)

        def forward() -> str:
            with pytest.raises(GroupStateError, match="init_chunk_handler") as error:
                model(other)
            return str(error.value)

        for order in ORDERS:
            found, said = both(model, lambda: train(x), forward, order)
            assert same_bits(found, right), order
            assert "part" in said
        assert same_bits(train(x), right)
        gc.collect()  # the errors held what had been saved
        manager.reset()
        assert_all_idle(manager)
