"""What the README shows runs as it stands."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_layers import RANK
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pp_offload import CpuBackend, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(1024, 1024)
        self.mlp = nn.Sequential(nn.Linear(1024, 1024), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.attn(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_are_as_many_examples_as_tests() -> None:
    assert len(BLOCKS) == 7


def test_the_ten_lines_are_ten_and_run(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line]
    assert len(lines) <= 12
    x = torch.randn(8 * 1024, 1024)
    names = {
        "model": Model(),
        "rank": 0,
        "num_stages": 1,
        "device": torch.device("cpu"),
        "loss_fn": nn.functional.mse_loss,
        "data": [(x, x), (x, x)],
    }
    with use_backend(CpuBackend()):
        exec(BLOCKS[0], names)
        assert PipelineOffloadManager.get_instance().statistics().bytes_offloaded > 0
    printed = capsys.readouterr().out
    assert "attn" in printed and "mlp" in printed


def test_the_loop_without_a_schedule_runs(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    x = torch.randn(1024, 1024)
    names: dict[str, Any] = {
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [[(x, x), (x, x)]] * 2,
    }
    with use_backend(CpuBackend()):
        exec(BLOCKS[1], names)
        assert PipelineOffloadManager.get_instance().statistics().bytes_offloaded > 0
    assert "mlp" in capsys.readouterr().out


def test_training_on_one_device_runs() -> None:
    model = Model()
    model.head = nn.Linear(1024, 1024)
    x = torch.randn(64, 1024)
    names: dict[str, Any] = {
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [(x, x), (x, x)],
    }
    exec(BLOCKS[3], names)
    assert names["offload"].statistics().bytes_offloaded > 0
    assert names["offload"].statistics().live_tensors == 0


def test_checkpoints_run(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    x = torch.randn(64, 1024)
    names: dict[str, Any] = {
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [(x, x), (x, x)],
    }
    exec(BLOCKS[5], names)
    assert "offloaded_outputs=12, offloaded_bytes=" in capsys.readouterr().out
    statistics = names["recompute"].stash.statistics()
    assert statistics.bytes_offloaded > 0 and statistics.live_tensors == 0


def test_the_trainer_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from tiny_llama import make_data, make_llama

    names: dict[str, Any] = {
        "model": make_llama(),
        "args": transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=2, report_to=[], save_strategy="no"
        ),
        "data": make_data(),
    }
    exec(BLOCKS[4], names)
    assert names["trainer"].activation_offload.statistics().bytes_offloaded > 0
    assert "OffloadStatistics(" in capsys.readouterr().out


def test_parameters_on_the_host_run(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64, 1024)
    names: dict[str, Any] = {
        "layers": Model().layers,
        "device": torch.device("cpu"),
        "loss_fn": nn.functional.mse_loss,
        "data": [(x, x), (x, x)],
    }
    with pytest.raises(ValueError, match="num_slices is 4; expected 1 to 3"):
        exec(BLOCKS[6], names)
    names["layers"] = [*Model().layers, *Model().layers]
    exec(BLOCKS[6], names)
    model = names["model"]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 < model.peak_parameter_bytes_on_device < whole
    assert model.statistics().bytes_offloaded == 2 * whole
    assert "bytes_reloaded=" in capsys.readouterr().out


def test_every_option_is_in_the_table() -> None:
    for field in dataclasses.fields(OffloadConfig):
        assert f"| `{field.name}` |" in TEXT


def test_the_table_of_layers_is_true() -> None:
    """Every folder once, and every file beside them, in the order of the layers."""
    section = TEXT.split("## The layers")[1].split("\n\n`pp_offload.testing`")[0]
    rows = [re.findall(r"`([^`]+)`", line) for line in section.splitlines() if line[:1] == "|"]
    assert [name for row in rows for name in row] == [name for name in RANK if name]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
def test_groups_and_checkpoints_do_what_is_said(reentrant: bool, is_inside: bool) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(32, 64)
    expected = gradients(layer, layer(x.requires_grad_() * 1), x)

    def grouped(h: Tensor, work: Any) -> Tensor:
        with off_interface(True, h, "g") as h:
            y = work(h)
        return off_interface.group_commit(y, name="g")

    def checkpointed(h: Tensor, work: Any) -> Tensor:
        return checkpoint(work, h, use_reentrant=reentrant)

    with use_backend(CpuBackend(), config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        off_interface.init_chunk_handler(None, None, 1)
        if is_inside:
            y = checkpointed(x * 1, lambda h: grouped(h, layer))
        else:
            y = grouped(x * 1, lambda h: checkpointed(h, layer))
        got = gradients(layer, y, x)
        kept = x.nbytes
        moved = {(True, True): 0, (True, False): 2 * kept}.get((is_inside, reentrant), kept)
        assert manager.statistics().bytes_offloaded == moved
    assert all(map(torch.equal, got, expected))


def gradients(layer: nn.Module, y: Tensor, x: Tensor) -> list[Tensor]:
    y.sum().backward()
    found = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    return [gradient for gradient in found if gradient is not None]


def test_the_markers_run() -> None:
    layer: Any = Layer()
    layer.offload_mlp = True
    x = torch.randn(2048, 1024, requires_grad=True)
    with use_backend(CpuBackend()) as manager:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1024 * 1024)
        names = {"self": layer, "x": x}
        exec(BLOCKS[2], names)
        assert manager.statistics().bytes_offloaded > 0
        names["y"].sum().backward()
    assert x.grad is not None
