"""F60: what several groups save comes back once for those of them that are near each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs, run_moves, schedule
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, offload_modules, use_backend
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.field("F60")

NUM_LAYERS, WIDTH, ROWS = 6, 6, 4


class Layers(nn.Module):
    """Groups, one behind the other, that save what ``shared`` makes of the input, each its view."""

    def __init__(self, is_on: bool, view: Callable[[Tensor, int], Tensor], device: object) -> None:
        super().__init__()
        self.is_on, self.view = is_on, view
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 2 for _ in range(NUM_LAYERS)]
        self.weights = nn.ParameterList([nn.Parameter(w.to(device)) for w in weights])

    def forward(self, x: Tensor) -> Tensor:
        table = (x * 2).cos()  # as rotary tables, which every layer saves
        for number, weight in enumerate(self.weights):
            name = f"layer {number % 2}"
            with off_interface(self.is_on, x, name) as x:
                y = torch.tanh(x @ weight) * self.view(table, number)
            x = off_interface.group_commit(y, name=name) if self.is_on else y
        return x


VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "as it is": lambda table, number: table,
    "in halves": lambda table, number: torch.cat(table.chunk(2)[:: (-1) ** number]),
    "transposed by turns": lambda table, number: table if number % 2 else table.t().t(),
    "reshaped by turns": lambda table, number: table.view(-1).view(ROWS, WIDTH),
}


@contextmanager
def manager_of(kind: str, tier: str, directory: Path, window: int | str) -> Iterator[object]:
    """Where tensors of any size leave."""
    disk = {"disk_dir": directory} if tier != "host" else {}
    tiers = (tier,) if tier == "host" else ("disk",)
    config = OffloadConfig(
        device_limit_bytes=None,
        min_offloaded_tensor_size=1,
        prefetch_bytes=window,
        tiers=tiers,
        **disk,
    )
    with use_backend(make_backend(kind), config=config) as manager:
        yield manager


@pytest.mark.covering(2)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("window", ["auto", 0, 200, 10**6])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_table_of_every_layer(
    kind: str, tier: str, window: int | str, view: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Two microbatches in flight, several steps; a neighbour is near in any window."""
    with manager_of(kind, tier, tmp_path, window) as manager:
        assert isinstance(manager, PipelineOffloadManager)
        device = manager.backend.device
        on, off = (Layers(is_on, view, device) for is_on in (True, False))
        for step in range(3):
            before = manager.statistics()
            inputs = make_inputs(3, step=step, length=ROWS, width=WIDTH, device=device)
            got = run_moves([on], inputs, schedule(3, 2), True)
            assert same_bits(got, run_moves([off], inputs, schedule(3, 2), False)), step
            after = manager.statistics()
            moved = after.bytes_offloaded - before.bytes_offloaded
            assert moved > 0
            assert after.bytes_reloaded - before.bytes_reloaded <= 1.02 * moved
            assert_idle(manager)


class SpoilsWhatItSaved(torch.autograd.Function):
    """Doubles; its backward uses up the tensor it was given, as some fused kernels do."""

    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return x * table

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        result = gradient * table
        table.zero_()
        return result, None


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("window", ["auto", 0])
def test_one_group_changes_what_it_was_given(kind: str, window: int | str) -> None:
    """The others have bytes of their own to come back from."""
    config = OffloadConfig(
        device_limit_bytes=None, min_offloaded_tensor_size=1, prefetch_bytes=window
    )

    with use_backend(make_backend(kind), config=config) as manager:
        (x,) = make_inputs(1, device=manager.backend.device)

        def gradient(is_on: bool, is_spoiling: bool) -> Tensor:
            leaf, table = x.clone().requires_grad_(), (x * 3).sin()
            if is_on:
                manager.reset()
                manager.init_model_chunk_offload_handler(None, None, 1)
            y = leaf
            for _ in range(3):
                with off_interface(is_on, y, "spoiled") as y:
                    y = SpoilsWhatItSaved.apply(y, table) if is_spoiling else y * table
                y = off_interface.group_commit(y, name="spoiled") if is_on else y
            del table
            manager.backend.synchronize()
            manager.statistics()  # from here on nothing is had back but from the host
            y.sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        assert torch.equal(gradient(True, True), gradient(False, False))
        assert_idle(manager)


@pytest.mark.parametrize("kind", BACKENDS)
def test_far_apart_it_does_not_stay(kind: str) -> None:
    """A tensor of the first layer and the last: no more than the window is on the device."""
    window = 2 * 4 * ROWS * WIDTH
    config = OffloadConfig(
        device_limit_bytes=None, min_offloaded_tensor_size=1, prefetch_bytes=window
    )
    with use_backend(make_backend(kind), config=config) as manager:
        unused: list[int] = []

        def first_and_last(table: Tensor, number: int) -> Tensor:
            return table if number in (0, NUM_LAYERS - 1) else torch.ones_like(table)

        model = Layers(True, first_and_last, manager.backend.device)
        (x,) = make_inputs(1, length=ROWS, width=WIDTH, device=manager.backend.device)
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
        y = model(x.requires_grad_())
        y.register_hook(lambda _: None)
        for weight in model.weights:
            weight.register_post_accumulate_grad_hook(
                lambda _: unused.append(manager.statistics().bytes_reloaded_unused)
            )
        y.sum().backward()
        assert len(unused) == NUM_LAYERS and max(unused) <= window
        del y
        assert_idle(manager)


class Residual(nn.Module):
    """As in a ResNet: what a ReLU saves, the next convolution saves as well."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.end = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x + self.second(self.relu(self.norm(self.first(x)))))


class Mlp(nn.Module):
    """Linear behind ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.relu(self.up(x)))


def resnet() -> tuple[nn.Module, dict[str, str], Callable[[int], Tensor]]:
    model = nn.Sequential(*(Residual(4) for _ in range(4)))
    groups = {part: f"*.{part}" for part in ("first", "norm", "relu", "second", "end")}
    return model, groups, lambda seed: drawn(seed, 2, 4, 8, 8)


def mlp() -> tuple[nn.Module, dict[str, str], Callable[[int], Tensor]]:
    model = nn.Sequential(*(Mlp(16) for _ in range(4)))
    return model, {part: f"*.{part}" for part in ("up", "relu", "down")}, lambda s: drawn(s, 8, 16)


def llama() -> tuple[nn.Module, dict[str, str], Callable[[int], Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=64,
        attn_implementation="eager",
    )
    parts = {"attn": "self_attn", "mlp": "mlp", "norm": "input_layernorm"}
    groups = {name: f"model.layers.*.{part}" for name, part in parts.items()}
    model = transformers.LlamaForCausalLM(config)
    return model, groups, lambda seed: torch.randint(0, 64, (2, 24), generator=seeded(seed))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(math.prod(shape), generator=seeded(seed)).view(shape)


@pytest.mark.parametrize("make", [resnet, mlp, llama])
@pytest.mark.parametrize("inline_bytes", [0, 2**18])
def test_models(make: Callable[..., tuple], inline_bytes: int) -> None:
    """Default options, 1F1B; the same bits as without, and bytes reloaded / offloaded <= 1.02."""
    backend = CpuBackend(inline_bytes=inline_bytes)
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    with use_backend(backend, config=config) as manager:
        torch.manual_seed(0)
        model, groups, inputs = make()

        def step(is_on: bool) -> list[Tensor]:
            if is_on:
                manager.reset()
            losses: list[Tensor] = []
            for seed in range(4):
                if is_on:
                    manager.init_model_chunk_offload_handler(None, None, 1)
                x = inputs(seed)
                y = model(input_ids=x, labels=x).loss if make is llama else model(x)
                losses.append(y.square().mean())
                if len(losses) == 2:
                    losses.pop(0).backward()
            losses.pop().backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            return found

        model.eval()  # batch norm changes nothing between the runs
        expected = step(False)
        with offload_modules(model, groups):
            for _ in range(3):
                assert same_bits(step(True), expected)
        statistics = manager.statistics()
        assert statistics.bytes_offloaded > 0
        assert statistics.bytes_reloaded <= 1.02 * statistics.bytes_offloaded
