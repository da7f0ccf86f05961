"""What the README and the pages of docs show runs as it stands, and what they list is all there."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.cli import good
from helpers.docs import PAGES, PATHS, ROOT, script
from helpers.sessions import session
from helpers.sources import RANK
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

import pp_offload
from pp_offload import CpuBackend, OffloadConfig, PipelineOffloadManager, errors, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.simulate import DEVICES


def blocks(page: str) -> list[str]:
    """The Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)


def section(page: str, heading: str) -> str:
    """What is under a heading of the second level."""
    return PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(1024, 1024)
        self.mlp = nn.Sequential(nn.Linear(1024, 1024), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.attn(x))


class Model(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: nn.Module, rows: int = 64) -> dict[str, Any]:
    """Names of a loop of two steps."""
    x = torch.randn(rows, 1024)
    return {
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [(x, x), (x, x)],
    }


def run(page: str, number: int = 0, /, **names: Any) -> Any:
    """Run a block of a page; the names behind it."""
    exec(blocks(page)[number], names)
    return SimpleNamespace(**names)


@pytest.fixture
def on_cpu() -> Iterator[PipelineOffloadManager]:
    """Offload on the CPU, which is worth nothing there."""
    with use_backend(CpuBackend()) as manager:
        yield manager


def loader(rows: int) -> Any:
    """Batches of 1024 rows, with the same rows for targets."""
    x = torch.randn(rows, 1024)
    data = torch.utils.data.TensorDataset(x, x)
    return torch.utils.data.DataLoader(data, batch_size=1024)


def test_the_six_lines_are_six_and_run(
    one_rank: None, on_cpu: PipelineOffloadManager, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks("README")
    assert blocks("index") == [code]
    assert len([line for line in code.splitlines() if line]) == 6
    x = torch.randn(2 * 1024, 1024)
    stage = PipelineStage(Model(1), 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    run("README", schedule=schedule, data=[(x, x), (x, x)])
    assert on_cpu.statistics().bytes_offloaded > 0
    printed = capsys.readouterr().out
    assert "attn" in printed and "mlp" in printed


def test_the_loop_without_a_schedule_runs(
    on_cpu: PipelineOffloadManager, capsys: pytest.CaptureFixture[str]
) -> None:
    names = trained(Model(2), 1024)
    run("pipelining", **names | {"data": [names["data"]] * 2})
    assert on_cpu.statistics().bytes_offloaded > 0
    assert "mlp" in capsys.readouterr().out


def test_the_markers_run(on_cpu: PipelineOffloadManager) -> None:
    layer: Any = Layer()
    layer.offload_mlp = True
    x = torch.randn(2048, 1024, requires_grad=True)
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1024 * 1024)
    names = run("pipelining", 1, self=layer, x=x)
    assert on_cpu.statistics().bytes_offloaded > 0
    names.y.sum().backward()
    assert x.grad is not None


def test_training_on_one_device_runs() -> None:
    names = trained(Model())
    names["model"].head = nn.Linear(1024, 1024)
    statistics = run("activations", **names).offload.statistics()
    assert statistics.bytes_offloaded > 0 and statistics.live_tensors == 0


def test_checkpoints_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Of layers, of one call, and of one module."""
    statistics = run("checkpointing", **trained(Model())).recompute.stash.statistics()
    assert "offloaded_outputs=12, offloaded_bytes=" in capsys.readouterr().out
    assert statistics.bytes_offloaded > 0 and statistics.live_tensors == 0
    x = torch.randn(64, 1024, requires_grad=True)
    names = run("checkpointing", 1, block=nn.Linear(1024, 1024), x=x * 1)
    assert "CheckpointCounts(" in capsys.readouterr().out
    assert names.block.recompute is names.recompute


def a_trainer(folder: Path, **options: Any) -> dict[str, Any]:
    """Names of a Trainer of Hugging Face."""
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from helpers.tiny_llama import make_data, make_llama

    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=2, report_to=[], save_strategy="no"
    )
    return {"model": make_llama(**options), "args": args, "data": make_data()}


def test_the_trainers_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run("activations", 1, **a_trainer(tmp_path)).trainer
    assert trainer.activation_offload.statistics().bytes_offloaded > 0
    assert "OffloadStatistics(" in capsys.readouterr().out
    trainer = run("offload-layers", 1, **a_trainer(tmp_path, lora={})).trainer
    assert trainer.layer_offload.statistics().bytes_reloaded > 0
    assert "OffloadStatistics(" in capsys.readouterr().out


def test_layers_on_the_host_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = a_trainer(tmp_path)
    batch = {name: tensor.unsqueeze(0) for name, tensor in names["data"][0].items()}
    whole = sum(parameter.nbytes for parameter in names["model"].model.layers.parameters())
    names |= {"data": [batch, batch], "device": torch.device("cpu")}
    offloaded = run("offload-layers", **names).offloaded
    assert offloaded.peak_parameter_bytes_on_device == whole
    assert offloaded.statistics().bytes_offloaded == 2 * whole
    assert "bytes reloaded" in capsys.readouterr().out


def test_parameters_on_the_host_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = {**trained(Model()), "device": torch.device("cpu"), "layers": Model(4).layers}
    model = run("offload-model", **names).model
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 < model.peak_parameter_bytes_on_device < whole
    assert model.statistics().bytes_offloaded == 2 * whole
    assert "bytes reloaded" in capsys.readouterr().out


def test_the_configurations_of_torchtitan_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a registry in the place of torchtitan's, which cannot be imported on every CPU."""
    spec = pytest.importorskip("torchtitan.protocols.model_spec").ModelSpec
    registry: Any = ModuleType("config_registry")
    registry.llama3_8b = lambda: SimpleNamespace(
        model_spec=spec("llama3", "8B", None, len, lambda: (None,), None, None),
        training=SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "torchtitan.models.llama3.config_registry", registry)
    names = run("integrations")
    with pytest.raises(TypeError, match="schedule is None"):
        names.pipeline().model_spec.pipelining_fn()  # it is attached
    assert isinstance(names.no_pipeline().activation_checkpoint, names.OffloadAC.Config)


def test_a_patch_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        x = torch.randn(1024, 1024, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = torch.special.erf(x)
        y.sum().backward()

    run("patch", train=train)
    assert "active, 4.00 MiB offloaded, 0 B computed again" in capsys.readouterr().out


def test_the_callback_of_lightning_runs(
    on_cpu: PipelineOffloadManager, capsys: pytest.CaptureFixture[str]
) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Trained(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Model(1).layers

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, target = batch
            return nn.functional.mse_loss(Model.forward(self, x), target)  # type: ignore[arg-type]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    code = blocks("integrations")[1].replace("max_epochs=1", "max_epochs=1, **quiet")
    exec(code, {"model": Trained(), "data": loader(2 * 1024), "quiet": quiet})
    printed = capsys.readouterr().out
    assert int(re.findall(r"bytes_offloaded=(\d+)", printed)[0]) > 0


def test_the_loop_of_accelerate_runs(on_cpu: PipelineOffloadManager) -> None:
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    names = {**trained(Model(1)), "data": loader(4 * 1024)}
    exec(blocks("integrations")[2].replace("Accelerator(", "Accelerator(cpu=True, "), names)
    assert names["offload"].statistics().bytes_offloaded > 0


def test_traces_are_written_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.toy import batches, make_model, run_step

    from pp_offload.trace import Timeline, read, write

    monkeypatch.chdir(tmp_path)

    def train() -> None:
        for number in range(4):
            run_step(make_model(), batches(2, step=number))

    with session(CpuBackend()):
        run("trace", train=train)
    assert [step.name for step in read("out.json.gz").of(0, "steps")] == ["step 2", "step 3"]
    for rank in range(2):
        write(Timeline(1, metadata={rank: {}}), f"out.rank{rank}.json.gz")
    run("trace", 1, num_ranks=2)
    assert read("out.json.gz").ranks == [0, 1]


def test_a_virtual_pipeline_does_what_was_planned_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("simulate")
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[::2]] == ["0", "1", "2", "3"]
    saved = 4 * 4096 * 8192 * 2  # of a microbatch, on a rank
    for rank in names.step.ranks:
        assert 8 * saved < rank.bytes_offloaded <= 16 * saved
        assert 0 < rank.peak_bytes < DEVICES["H100"].memory_bytes
    predicted = run("simulate", 1, **vars(names))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["1.0", "0.5", "0.25"]
    assert float(lines[0][1]) == pytest.approx(names.step.seconds, rel=1e-9)
    run("planning", 3, **vars(predicted))
    *others, planned, measured, least = capsys.readouterr().out.splitlines()
    assert "linear     0-3   15  64.0" in "\n".join(others)
    assert planned.split("[")[1] == measured.split("[")[1]
    assert 2 * 2**30 < int(least) < 4 * 2**30


@pytest.fixture
def folder_of_my_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the model that the page of the command line shows."""
    assert "{literalinclude} ../examples/my_model.py" in PAGES["cli"]
    shutil.copy(ROOT / "examples" / "my_model.py", tmp_path)
    monkeypatch.chdir(tmp_path)


def rows_of(page: str, command: str, *more: str) -> list[list[str]]:
    """What a command that a page shows prints for ranks."""
    shown = re.search(rf"^pp-offload ({command} my_model.*)$", PAGES[page], flags=re.MULTILINE)
    assert shown is not None
    output = good(*shown[1].split(), *more)
    return [line.split() for line in output.splitlines() if line[:1].isdigit()]


def test_the_model_of_the_command_line_runs(folder_of_my_model: None) -> None:
    rows = rows_of("cli", "simulate", "--microbatches", "4")  # fewer than shown
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(0 < float(with_it) < float(without) for _, without, with_it, *_ in rows[:3])


def test_a_plan_is_made_and_followed(
    folder_of_my_model: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("planning", "plan")
    assert [float(row[1]) > 7 for row in rows] == [True, False, False, False]
    assert all(float(row[2]) <= 7 for row in rows)
    given: list[OffloadConfig] = []
    with monkeypatch.context() as patch:
        patch.setattr(pp_offload, "attach", lambda schedule, groups, config: given.append(config))
        run("planning", schedule=None)
    assert given[0].offload_plan is not None and len(given[0].offload_plan.ranks) == 4
    run("planning", 1, pipeline_rank=3, stage_modules=[nn.Linear(1, 1)])

    def train() -> None:
        for _ in range(5):
            PipelineOffloadManager.get_instance().reset()

    for rank in (0, 1):  # the other one does nothing, and nobody waits for it
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        run("trace", train=train)
        dist.destroy_process_group()
    run("planning", 2)
    printed = capsys.readouterr().out
    assert printed.startswith("False") and "rank 1: sent GiB 0.0, planned" in printed


def test_a_sharded_optimizer_counts_its_slices(folder_of_my_model: None) -> None:
    """Of 8 replicas: masters and gradients of an eighth of the parameters, and two states."""
    holds = {}
    for optimizer in ("AdamW", "my_model:sharded"):
        command = ["profile", "my_model:stages", "--optimizer", optimizer, "--json"]
        profile = json.loads(good(*command))
        holds[optimizer] = profile["resident_bytes"][0], profile["optimizers"][0]["resident_bytes"]
    (plain, state), (sharded, of_slices) = holds.values()
    assert of_slices == pytest.approx(2 * state / 8, rel=1e-3), "in fp32"
    assert sharded - plain == pytest.approx(of_slices, rel=1e-3), "masters, and their gradients"


def test_the_profile_is_that_of_the_page(folder_of_my_model: None) -> None:
    output = good("profile", "my_model:stages")
    shown = section("planning", "What is worth sending").split("```")[1].strip()
    assert shown.startswith("group") and f"\n{shown}\n" in output


def test_the_script_of_the_pictures_runs(tmp_path: Path) -> None:
    pictures = script("pictures")
    path = tmp_path / "out.png"
    pictures.draw_small(pictures.traced(2, 2, 2, 256), path, [1])
    assert path.read_bytes()[1:4] == b"PNG"


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8192


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    """On a code host, that is; Sphinx looks at the pages of docs alone."""
    for link in re.findall(r"\]\(([^)#]+)", PAGES[page]):
        assert "://" in link or (PATHS[page].parent / link).is_file(), link


def test_the_options_are_what_their_docstrings_say() -> None:
    """If not: python docs/options.py"""
    assert PAGES["options"] == script("options").page()


def test_every_error_has_its_section() -> None:
    """And every section its error, in the order of the module."""
    titles = re.findall(r"^## (\w+)$", PAGES["errors"], flags=re.MULTILINE)
    classes = inspect.getmembers(errors, inspect.isclass)
    lines = {name: inspect.getsourcelines(kind)[1] for name, kind in classes}
    assert titles == sorted(lines, key=lines.__getitem__)


def test_the_table_of_layers_is_true() -> None:
    """Every folder once, and every file beside them, in the order of the layers."""
    lines = section("architecture", "Folders").splitlines()
    heads = [re.findall(r"`([^`]+)`", line.split(":")[0]) for line in lines if line[:1] == "-"]
    assert [name for head in heads for name in head] == [name for name in RANK if name]
