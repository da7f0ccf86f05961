"""F44: a group that was asked for and does nothing is named in a warning, once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toy import batches, make_model, run_step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, configure, offload_modules

pytestmark = pytest.mark.field("F44")


class Two(nn.Module):
    """Calls one of its layers as a module, and of the other only what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.bypassed = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.small = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        for layer in self.bypassed:
            x = layer(x)
        return self.small(x[:, :1])


GROUPS = {"called": "called", "bypassed": "bypassed", "small": "small"}


def train(model: nn.Module, steps: int = 2, numel: int = 6, is_grad: bool = True) -> None:
    for number in range(steps):
        off_interface.reset()
        for x in batches(2, step=number):
            x = x.to(next(model.parameters()).device).requires_grad_()
            off_interface.init_chunk_handler(None, None, numel)
            with torch.set_grad_enabled(is_grad):
                loss = model(x).square().mean()
            if is_grad:
                loss.backward()
    off_interface.reset()


def test_each_idle_name_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two().to(manager.backend.device)
    with offload_modules(model, GROUPS):
        train(model)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("group 'bypassed' never ran")
    assert said[1].startswith("group 'small' offloaded nothing: none of its 2 groups")
    assert "min_offloaded_tensor_size=6" in said[1]


def test_the_rest_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """No forward, one without grad, offload disabled, a pattern taken back, markers that work."""
    configure(OffloadConfig(min_offloaded_tensor_size=1))
    model = Two()
    with offload_modules(model, GROUPS):
        off_interface.reset()
        train(model, is_grad=False)
        manager = PipelineOffloadManager.get_instance()
        manager.disable_offload()
        train(model)
        manager.enable_offload()
        off_interface.reset()
    with offload_modules(model, {"called": "called"}):
        train(model)
    run_step(make_model(), batches(2))
    off_interface.reset()
    assert not caplog.records


@pytest.mark.parametrize("name", ["called", "bypassed"])
def test_asked_for_between_a_step_and_the_next_begin(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step before had no such group, and need not have had one; later ones are looked at."""
    configure(OffloadConfig(min_offloaded_tensor_size=1))
    model = Two()

    def step() -> None:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        model(batches(1)[0].requires_grad_()).sum().backward()

    with offload_modules(model, {"first": "called.0"}):
        step()
        with offload_modules(model, {name: "bypassed.0" if name == "called" else "bypassed"}):
            step()
            assert not caplog.records
            off_interface.reset()
            said = [record.getMessage() for record in caplog.records]
            assert [text[:26] for text in said] == ["group 'bypassed' never ran"] * (
                name == "bypassed"
            )


def test_a_marker_in_a_compiled_region(caplog: pytest.LogCaptureFixture) -> None:
    """The module's forward is traced by a compiler around it, so that its group never opens."""
    model = Two()
    with offload_modules(model, {"called": "called"}):
        train(torch.compile(model, backend="eager"), numel=1)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("pp_offload")]
    assert [message[:24] for message in ours] == ["group 'called' never ran"]


class Failing(nn.Module):
    """Three layers, of which one may raise; the last saves nothing if the first raised."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.fails_in: int | None = None

    def compute(self, x: Tensor, number: int) -> Tensor:
        y = self.layers[number](x).sin()
        if self.fails_in == number:
            raise MemoryError
        return y.sin()


class Marked(Failing):
    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            with off_interface(True, x, f"part{number}") as x:
                x = self.compute(x, number)
            x = off_interface.group_commit(x, name=f"part{number}")
        return x


class Part(nn.Module):
    def __init__(self, model: Failing, number: int) -> None:
        super().__init__()
        self.number, self.of = number, [model]

    def forward(self, x: Tensor) -> Tensor:
        return self.of[0].compute(x, self.number)


class Named(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(Part(self, number) for number in range(3)))
        offload_modules(self, {f"part{number}": f"parts.{number}" for number in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


@pytest.mark.parametrize("kind", [Marked, Named])
@pytest.mark.parametrize("fails_in", range(3))
@pytest.mark.parametrize("microbatch", [0, 1])
def test_a_forward_that_raised_is_not_a_group_that_does_nothing(
    caplog: pytest.LogCaptureFixture, kind: type[Failing], fails_in: int, microbatch: int
) -> None:
    """The program goes on with the next step, as after a batch that was too large."""
    configure(OffloadConfig(min_offloaded_tensor_size=1))
    model = kind()
    for step in range(3):
        off_interface.reset()
        for number, x in enumerate(batches(2, step=step)):
            off_interface.init_chunk_handler(None, None, 1)
            model.fails_in = fails_in if (step, number) == (0, microbatch) else None
            try:
                model(x.requires_grad_()).square().mean().backward()
            except MemoryError:
                break
    off_interface.reset()
    assert not caplog.records
    manager = PipelineOffloadManager.get_instance()
    assert manager.statistics().bytes_offloaded > 0
