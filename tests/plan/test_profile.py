"""A profile says what a count without tapes says: bytes by hooks, memory and time by the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_pipelines import draw_pipeline
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from virtual_models import KIND, Stage

from pp_offload import OffloadConfig, recompute_layers, use_backend
from pp_offload.plan import Profile, predict, profile, profile_table, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, VirtualBackend

WIDTH, LENGTH, NUM_LAYERS = 4096, 8192, 3
H100 = DEVICES["H100"]
AT_ONCE = replace(H100, launch_s=0.0)
GROUPS = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def profiled(
    stages: list[Any], example: Tensor, config: OffloadConfig | None = None, **options: Any
) -> Profile:
    """That of a rank for each stage."""
    work = Modules(stages, example=example, loss_fn=square, **options)
    sizes = {"num_ranks": len(stages), "num_stages": len(stages)}
    order = PipelineOrder(Schedule1F1B, num_microbatches=len(stages), **sizes)
    return profile(record(order, work, H100, config), H100)


@pytest.fixture(scope="module")
def llama() -> Stage:
    return Stage("llama", WIDTH, LENGTH, NUM_LAYERS)


@pytest.fixture(scope="module")
def found(llama: Stage) -> Profile:
    """Of two stages."""
    stages = [llama, Stage("llama", WIDTH, LENGTH, NUM_LAYERS)]
    example = llama.microbatch().detach()
    config = OffloadConfig(rematerialize="none")
    return profiled(stages, example, config, groups=GROUPS, layers="layers.*")


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward, each storage once, without parameters and small tensors."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        is_parameter = any(tensor is one for one in module.parameters())
        whole = tensor if tensor._base is None else tensor._base
        is_parameter |= any(whole is one for one in module.parameters())
        if not is_parameter and tensor.numel() >= OffloadConfig().min_offloaded_tensor_size:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        use_backend(VirtualBackend(H100)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one),
    ):
        y = module(x)
        nbytes = sum(one.untyped_storage().nbytes() for one in kept.values())
        del y
    return nbytes


@contextmanager
def microbatch(stage: Stage) -> Iterator[tuple[VirtualBackend, Callable[[], Tensor]]]:
    """A device on which the stage's parameters are, and its forward."""
    backend = VirtualBackend(AT_ONCE, is_blocking=True)
    with use_backend(backend):
        for one in stage.parameters():
            backend.memory.see(one.untyped_storage())
        x = stage.microbatch()
        yield backend, lambda: stage(x)
        stage.zero_grad()


def test_a_group_saves_what_hooks_see(llama: Stage, found: Profile) -> None:
    """41 bytes a token and unit of the width: 9 of attention, 32 of a SwiGLU of 3.5 widths."""
    layer = llama.layers[1]
    for number, part in enumerate((layer.attn, layer.mlp)):
        assert found.groups[2 + number].nbytes == saved_bytes(part, llama.microbatch())
    assert [one.nbytes / (WIDTH * LENGTH) for one in found.groups] == [9, 32] * 6


def test_groups_have_their_place(found: Profile) -> None:
    places = [(one.stage, one.layer, one.name) for one in found.groups]
    layers = range(NUM_LAYERS)
    assert places == [(i, j, name) for i in range(2) for j in layers for name in GROUPS]


def test_equal_layers_are_one_row(found: Profile) -> None:
    """Backward of the very first layer asks for no gradient of its input."""
    kinds = [(one.first.name, one.stages, one.num) for one in found.kinds()]
    assert kinds == [("attn", (0,), 1), ("mlp", (0, 1), 6), ("attn", (0, 1), 5)]


def test_what_rounding_leaves_of_a_clock_makes_no_rows() -> None:
    stages = [
        nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).to("meta", torch.bfloat16)
        for _ in range(2)
    ]
    found = profiled(stages, torch.empty(2048, 1024, **KIND), groups={"linear": "*"})
    assert len({one.forward_ms for one in found.groups}) > 1, "or there is nothing to round"
    assert [one.num for one in found.kinds()] == [1, 23]


def test_compute_is_that_of_each_module_alone() -> None:
    """In backward with the sums of gradients, which all microbatches but the first have."""
    widths = (1024, 2048, 4096, 1024)
    sizes = list(zip(widths, widths[1:], strict=False))
    layers = [nn.Sequential(nn.Linear(*size), nn.GELU()) for size in sizes]
    last = nn.Linear(1024, 1024)
    stages = [nn.Sequential(*layers), last]
    for one in stages:
        one.to("meta", torch.bfloat16)
    example = torch.empty(2048, 1024, **KIND)
    found = profiled([nn.Sequential(last), stages[0]], example, groups={"layer": "*"})
    mine = [one for one in found.groups if one.stage == 1]
    for layer, one, (width, _) in zip(layers, mine, sizes, strict=True):
        forward_ms, backward_ms = alone_ms(layer, example.new_empty(2048, width))
        assert one.forward_ms == pytest.approx(forward_ms, rel=1e-9)
        assert one.backward_ms == pytest.approx(backward_ms, rel=1e-9)
    stage = found.stages[1]
    assert sum(one.forward_ms for one in mine) < stage.forward.ms, "or the loss takes no time"


def alone_ms(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Of a forward, and of a backward that is not the first."""
    backend = VirtualBackend(AT_ONCE)
    with use_backend(backend):
        for _ in range(2):
            begin_s = backend.compute.busy_s
            y = layer(x.detach().requires_grad_())
            between_s = backend.compute.busy_s
            y.backward(torch.empty_like(y))
        end_s = backend.compute.busy_s
    layer.zero_grad()
    return (between_s - begin_s) * 1e3, (end_s - between_s) * 1e3


def test_copies_take_the_rate_of_the_link_and_a_latency_each(found: Profile) -> None:
    attn = found.groups[0]  # input, normed, queries, keys, values and output
    expected_s = 6 * H100.copy_latency_s + attn.nbytes / H100.link_bytes_per_s
    assert attn.copy_ms == pytest.approx(expected_s * 1e3, rel=1e-9)
    assert attn.bytes_per_ms == attn.nbytes / attn.forward_ms
    assert found.link_bytes_per_ms == H100.link_bytes_per_s / 1e3


def test_memory_of_a_microbatch_is_that_of_the_device(llama: Stage, found: Profile) -> None:
    """A stage that is sent its input: it is in a buffer that is there all the time."""
    with microbatch(llama) as (backend, forward):
        begin = backend.memory.live_bytes
        backend.memory.take_peak()
        y = forward()
        loss = square(y)
        held = backend.memory.live_bytes - begin
        one = found.stages[1].forward
        assert (one.resident_bytes, one.transient_peak_bytes) == (
            held,
            backend.memory.take_peak() - begin,
        )
        del y, loss


def test_peaks_are_those_that_are_predicted_without_offload() -> None:
    """Of one microbatch on one rank: the fuller one of its two actions."""
    for seed in range(12):
        drawn = draw_pipeline(seed)
        work = Modules(
            drawn.work.stages[:1],
            example=drawn.work.samples[0],
            loss_fn=drawn.work.loss_fn,
            groups=drawn.work.groups,
        )
        order = PipelineOrder(Schedule1F1B, num_ranks=1, num_stages=1, num_microbatches=1)
        tapes = record(order, work, drawn.hardware, drawn.config)
        (stage,) = profile(tapes, drawn.hardware).stages
        (ran,) = predict(order, tapes, drawn.hardware, num_steps=1).ranks
        forward, backward = stage.forward, stage.first_backward
        peaks = forward.transient_peak_bytes, forward.resident_bytes + backward.transient_peak_bytes
        assert ran.peak_bytes == tapes[0].resident_bytes + max(peaks), f"seed {seed}"


def test_a_backward_leaves_nothing_but_the_first_gradients(llama: Stage, found: Profile) -> None:
    gradients = sum(-(-one.nbytes // 512) * 512 for one in llama.parameters())
    first = found.stages[0]
    assert first.forward.resident_bytes + first.backward.resident_bytes == 0
    assert first.forward.resident_bytes + first.first_backward.resident_bytes == gradients
    assert found.resident_bytes[0] >= gradients, "as many parameters"


def test_recomputation_costs_and_frees_what_it_does_on_the_device(
    llama: Stage, found: Profile
) -> None:
    figures = []
    for names in ([], [f"layers.{i}" for i in range(NUM_LAYERS)]):
        with recompute_layers(llama, names), microbatch(llama) as (backend, forward):
            begin = backend.memory.live_bytes
            y = forward()
            held, forward_s = backend.memory.live_bytes - begin, backend.compute.busy_s
            Stage.backward(y)
            figures.append((held, backend.compute.busy_s - forward_s))
    (held, backward_s), (held_less, longer_s) = figures
    for stage in found.stages:
        assert stage.num_layers == NUM_LAYERS
        assert stage.recompute_frees_bytes == (held - held_less) / NUM_LAYERS
        expected_ms = (longer_s - backward_s) / NUM_LAYERS * 1e3
        assert stage.recompute_ms == pytest.approx(expected_ms, rel=1e-9)


class Both(nn.Module):
    """A part in the other one, which saves what that has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return self.outer(y) + self.inner(y)


def test_groups_in_groups_and_what_they_share() -> None:
    stages = [nn.Sequential(nn.Tanh(), Both()).to("meta", torch.bfloat16)]
    example = torch.empty(64, 64, **KIND)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    groups = {"outer": "1", "inner": "1.inner"}
    found = profiled(stages, example, config, groups=groups)
    outer, inner = found.groups
    assert (outer.name, outer.shared_with) == ("outer", ("inner",))
    assert (inner.name, inner.shared_with) == ("inner", ("outer",))
    whole = profiled(stages, example, config, groups={"outer": "1"})
    together_ms = outer.forward_ms + inner.forward_ms
    assert together_ms == pytest.approx(whole.groups[0].forward_ms, rel=1e-9)
    assert whole.groups[0].shared_with == ()
    alone = alone_ms(stages[0][1].inner, example)
    assert inner.forward_ms == pytest.approx(alone[0], rel=1e-9)
    assert "shares with inner" in profile_table(found)


def test_the_tables(found: Profile) -> None:
    rows = profile_table(found).splitlines()
    assert rows[3].split() == "mlp 0-1 6 1024.0 5.35 11.13 21.53 191.5".split()
    assert "The link carries 47.7" in profile_table(found)
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.47 3.85 3.91 0.55 22.89 48.35 5.94 1.22".split()


def test_without_layers_nothing_is_said_of_recomputation(llama: Stage) -> None:
    found = profiled([llama], llama.microbatch().detach(), groups=GROUPS)
    assert (found.stages[0].num_layers, found.stages[0].recompute_ms) == (0, None)
    assert profile_table(found).count(" - ") == 1


def test_hardware_is_asked_for() -> None:
    with pytest.raises(TypeError, match="hardware is 'H100', expected a Hardware"):
        profile([], "H100")  # type: ignore[arg-type]


def test_a_backward_in_two_parts_is_both() -> None:
    kind = {"device": "meta", "dtype": torch.bfloat16}
    sizes = {"num_ranks": 2, "num_stages": 4, "num_microbatches": 4}
    found = []
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        stages = [nn.Sequential(nn.Linear(4096, 4096, **kind), nn.Tanh()) for _ in range(4)]
        example = torch.empty(4096, 4096, **kind)
        work = Modules(stages, example=example, loss_fn=square, groups={"part": "*"})
        order = PipelineOrder(schedule, **sizes)
        found.append(profile(record(order, work, AT_ONCE), AT_ONCE))
    one, two = found
    assert [each.nbytes for each in two.groups] == [each.nbytes for each in one.groups]
    for whole, parts in zip(one.stages[1:], two.stages[1:], strict=True):
        assert parts.forward == whole.forward
        assert parts.backward.ms == pytest.approx(whole.backward.ms, rel=1e-9)
        assert parts.first_backward.ms == pytest.approx(whole.first_backward.ms, rel=1e-9)
