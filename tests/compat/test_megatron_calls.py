"""Calls as Megatron-LM's main writes them: bit for bit without offload, with bytes moved.

Where a group begins and where it is closed, what is named to be released and which commits may be
delayed is written after transformer_layer.py, attention.py and experts.py; what is called once a
microbatch after gpt_model.py, and once a step after schedules.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.saving import KeepsSaved
from helpers.sessions import assert_idle, gradients, session
from helpers.toy import Event, make_model, manager_of, same_bits
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from pp_offload import (
    ConfigError,
    CpuBackend,
    OffloadError,
    fine_grained_offloading_backward_record,
    fine_grained_offloading_forward_record,
)
from pp_offload import PipelineOffloadManager as IntroducedManager
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.compat.megatron import PipelineOffloadManager
from pp_offload.testing.streams import unwatched

WIDTH = 16
GROUPS = ("attn_norm", "core_attn", "expert_fc1", "moe_act")


class Layer(nn.Module):
    """Attention and experts; no group is on without offload."""

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on
        self.may_delay = False
        self.attn_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.attention(x))

    def attention(self, x: Tensor) -> Tensor:
        residual = x
        norm_group = off_interface(self.is_on, x, "attn_norm")
        with norm_group as x:
            normed = self.attn_norm(x)
        query, key, value = self.qkv(normed).chunk(3, dim=-1)
        group = off_interface(self.is_on and self.training, query, "core_attn")
        with group as query:
            scores = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
            attended = scores @ value
        attended = group.group_offload(attended, forced_released_tensors=[query, key, value])
        return norm_group.group_offload(attended + residual, forced_released_tensors=[residual])

    def experts(self, x: Tensor) -> Tensor:
        group = off_interface(self.is_on, x, "expert_fc1")
        with group as x:
            hidden = self.fc1(x)
        hidden = group.group_offload(
            hidden, forced_released_tensors=[x], delay_offload=self.may_delay
        )
        group = off_interface(self.is_on, hidden, "moe_act")
        with group as hidden:
            gate, up = hidden.chunk(2, dim=-1)
            activated = functional.silu(gate) * up
        return group.group_offload(
            self.fc2(activated), forced_released_tensors=[hidden], delay_offload=self.may_delay
        )

    def replay(self, x: Tensor) -> Tensor:
        """As a layer of which a graph has the attention: what earlier layers delayed comes next."""
        if self.may_delay:
            off_interface.enter_replay()
        try:
            x = self.attention(x)
            if self.may_delay:
                off_interface.flush_delayed_groups()
            return self.experts(x)
        finally:
            if self.may_delay:
                off_interface.exit_replay()


class Model(nn.Module):
    """Layers; each forward is a microbatch's, and begins its chunk."""

    def __init__(self, device: torch.device, is_on: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(is_on) for _ in range(2)).to(device)
        self.is_on = is_on
        self.is_replaying = False
        self.options: dict[str, Any] = {"pp_rank": 0, "min_offloaded_tensor_size": 1}

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            off_interface.init_chunk_handler(**self.options)
            for parameter in self.parameters():
                off_interface.mark_not_offload(parameter)
        for layer in self.layers:
            x = layer.replay(x) if self.is_replaying else layer(x)
        return x

    def delay(self) -> None:
        """From now on layers are replayed, with delayed commits."""
        self.is_replaying = True
        for layer in self.layers:
            layer.may_delay = True


def models(manager: IntroducedManager, **options: Any) -> tuple[Model, Model]:
    """With offload and without."""
    device = manager.backend.device
    on, off = Model(device), Model(device, is_on=False)
    on.options.update(options)
    return on, off


def batches(device: torch.device, num: int = 4, seed: int = 0) -> list[Tensor]:
    """Inputs of a step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, WIDTH, generator=generator).to(device) for _ in range(num)]


def step(model: Model, inputs: Sequence[Tensor]) -> list[Tensor]:
    """1F1B with two forwards ahead: losses, and gradients of inputs and parameters."""
    waiting: list[Tensor] = []
    losses: list[Tensor] = []
    leaves = [x.clone().requires_grad_() for x in inputs]

    def backward() -> None:
        losses.append(waiting.pop(0))
        losses[-1].backward()

    for leaf in leaves:
        waiting.append(model(leaf * 1).square().mean())
        if len(waiting) > 2:
            backward()
    while waiting:
        backward()
    if model.is_on:
        off_interface.reset(process_group=None)
    return [*(loss.detach() for loss in losses), *gradients(*leaves, *model.parameters())]


def begin(most: int | None = None) -> None:
    """A microbatch, with at most so many offloads in flight."""
    off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0, most)


def in_group(
    x: Tensor, compute: Callable[[Tensor], Tensor], name: str = "act", **offload: Any
) -> Tensor:
    """``compute(x)`` as a group that is closed at once."""
    group = off_interface(True, x, name)
    with group as inside:
        y = compute(inside)
    return group.group_offload(y, **offload)


# Steps and their captures; and what main has beside the calls of a layer


@pytest.mark.parametrize("is_replaying", [False, True])
@pytest.mark.parametrize("most", [None, 0, 1])
def test_steps(manager: IntroducedManager, most: int | None, is_replaying: bool) -> None:
    """Behind the first, replays with delayed groups."""
    on, off = models(manager, max_inflight_offloads=most)
    for seed in range(4):
        inputs = batches(manager.backend.device, seed=seed)
        assert same_bits(step(on, inputs), step(off, inputs)), seed
        if is_replaying:
            on.delay()
    assert manager.offload_summary_bytes.keys() <= set(GROUPS)
    assert manager.offload_summary_total_bytes > 0
    if most is not None:  # else sources that are still there may be taken back
        assert manager.statistics().bytes_reloaded > 0
    assert_idle(manager)


@pytest.mark.parametrize("in_replay", [False, True])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_commits_are_delayed_in_a_replay(
    manager: IntroducedManager, in_replay: bool, is_given_up: bool
) -> None:
    """Else bytes leave with the commit. A replay ends where its step is given up."""
    begin()
    x = torch.ones(9).to(manager.backend.device).requires_grad_()
    if in_replay:
        off_interface.enter_replay()
    if is_given_up:
        manager.abort()
        begin()
    y = in_group(x, lambda y: (y * 2).exp(), delay_offload=True)
    assert (manager.statistics().bytes_offloaded > 0) is (is_given_up or not in_replay)
    off_interface.exit_replay()
    off_interface.flush_delayed_groups()
    assert manager.statistics().bytes_offloaded > 0
    y.sum().backward()


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (0, 0), (1, 1), (2, 2)])
def test_so_many_offloads_of_a_name_are_in_flight(most: int | None, expected: int) -> None:
    """Of each name: what has another one is not waited for."""
    with manager_of("late", rematerialize="none") as (manager, _):
        begin(most)
        queue = manager.offloader.engine.mover.in_flight.queue
        y = torch.ones(9, requires_grad=True) * 1
        for name in ("a", "a", "a"):
            y = in_group(y, torch.sin, name)
        assert len(queue) == expected
        other = in_group(y, torch.sin, "b")
        assert len(queue) == (0 if most == 0 else expected + 1)
        other.sum().backward()


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("delta", [0, 1000])
def test_options_of_the_plan_do_what_those_of_the_config_do(fraction: float, delta: int) -> None:
    plans = []
    options = {
        "delta_offload_bytes_across_pp_ranks": delta,
        "activation_offload_fraction": fraction,
    }
    for is_given in (True, False):
        with manager_of("late", **({} if is_given else options)) as (manager, device):
            model, _ = models(manager, pp_rank=2, **(options if is_given else {}))
            for seed in range(2):
                step(model, batches(device.device, seed=seed))
            plans.append((manager.offloader.plan.staying, manager.statistics().bytes_offloaded))
    assert plans[0] == plans[1]
    assert plans[0][0]


@pytest.mark.parametrize("pp_rank", ["1", -3, 1.5, True])
def test_a_rank_that_is_none_is_refused(pp_rank: Any) -> None:
    with manager_of("late") as (manager, _):
        with pytest.raises(ValueError, match="pp_rank is .* expected an integer of at least 0"):
            models(manager, pp_rank=pp_rank)[0](torch.ones(9, requires_grad=True))


def test_a_rank_that_the_plan_lacks_is_refused() -> None:
    plan = OffloadPlan("a test", 0, 0.0, 0.0, (RankPlan(()),))
    with manager_of("late", plan=plan) as (manager, device):
        with pytest.raises(ConfigError, match="for 1 pipeline ranks, and here is a rank 1"):
            step(models(manager, pp_rank=1)[0], batches(device.device))
            off_interface.reset()


@pytest.mark.parametrize("is_filled_again", [False, True])
def test_what_is_discarded_before_its_copy_is_an_error(is_filled_again: bool) -> None:
    """Also where it is back before anybody looks: the copy may have read what others had there."""
    with manager_of("late"):
        begin()
        x = torch.ones(9, requires_grad=True) * 1
        y = in_group(x, lambda x: x * x, "qkv_linear")
        x.untyped_storage().resize_(0)
        others = [torch.full((9,), 7.0) for _ in range(20)]
        if is_filled_again:
            with unwatched():  # else the simulated device would report the race itself
                x.untyped_storage().resize_(2 * x.nbytes)  # elsewhere
                x.detach().fill_(1)
        with pytest.raises(OffloadError, match="'qkv_linear'.*its storage emptied"):
            y.sum().backward()
        del others


# Captures


@pytest.mark.parametrize("order", ["late", "eager", "random"])
@pytest.mark.parametrize("most", [0, 1])
def test_captures(order: str, most: int) -> None:
    """Of a step, where nothing can be asked whether it is over: main counts offloads in flight."""
    with manager_of(order) as (manager, device):
        on, off = models(manager, max_inflight_offloads=most)
        inputs = batches(device.device, 2)
        expected = step(off, inputs)
        assert same_bits(step(on, inputs), expected), "host memory is made"
        before = manager.statistics()
        for _ in range(2):
            with device.capture():
                got = step(on, inputs)
                off_interface.forward_record()
            assert same_bits(got, expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded


def test_the_event_is_recorded_where_the_copies_are_joined() -> None:
    """At the end of a captured forward and of a captured backward; without CUDA, with no event."""
    with manager_of("late") as (manager, device):
        assert off_interface.cuda_graph_event() is None
        assert off_interface.cuda_graph_stream() is device.current_stream()
        begin()
        leaf = torch.ones(9, requires_grad=True)
        y = in_group(leaf * 1, torch.sin)
        assert device.pending > 0
        off_interface.forward_record()
        assert device.pending == 0
        y.sum().backward()
        manager.graph_event = event = Event()
        with device.capture():
            begin(0)
            y = in_group(off_interface.backward_record(leaf) * 1, torch.sin)
            off_interface.forward_record()
            in_forward = event.at
        with device.capture():
            y.sum().backward()
            assert event.at is not in_forward


def forward_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients, eagerly."""
    leaf = x.clone().requires_grad_()
    loss = model(leaf).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [leaf, *model.parameters()])]


@pytest.mark.gpu
def test_a_launch_on_a_gpu_with_other_inputs() -> None:
    """Of a captured forward and a captured backward, as they were introduced."""
    with session("cuda") as manager:
        device = str(manager.backend.device)
        on = make_model(width=64, device=device)
        off = make_model(width=64, groups=(), device=device)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                manager.reset()
                manager.init_model_chunk_offload_handler(None, None, 1)
                forward_backward(on, torch.randn(8, 64, device=device))
        torch.cuda.synchronize()
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
        static = torch.zeros(8, 64, device=device, requires_grad=True)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            x = fine_grained_offloading_backward_record(static, torch.cuda.Event())
            loss = on(x).square().mean()
            fine_grained_offloading_forward_record(torch.cuda.Event())
        with torch.cuda.graph(backward, pool=forward.pool()):
            gradients = torch.autograd.grad(loss, [static, *on.parameters()])
        assert manager.statistics().bytes_reloaded > 0
        for step in range(3):
            torch.manual_seed(step)
            inputs = torch.randn(8, 64, device=device)
            with torch.no_grad():
                static.copy_(inputs)
            forward.replay()
            backward.replay()
            assert same_bits([loss.detach(), *gradients], forward_backward(off, inputs)), step


# What main has beside the calls of a layer


@pytest.fixture
def face() -> Iterator[PipelineOffloadManager]:
    """The manager as main sees it, with a chunk begun, for tensors of any size."""
    with session(CpuBackend()):
        begin()
        yield PipelineOffloadManager.get_instance()


# Flags on tensors


class Quantized(TwoTensor):
    """A pair that tells its parts as quantized tensors of Transformer Engine do."""

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        return None, self.b


def ones() -> Tensor:
    return torch.ones(3, 3)


@pytest.mark.parametrize(
    ("flag", "stays"),
    [(None, False), ("_TE_do_not_offload", True), ("_do_not_offload", True), ("_unknown", False)],
)
@pytest.mark.parametrize("flagged", ["tensor", "whole", "part"])
def test_what_is_flagged_stays(
    face: PipelineOffloadManager, flagged: str, flag: str | None, stays: bool
) -> None:
    """A tensor, one that is made of tensors, or one of these."""
    saved: Any = ones() if flagged == "tensor" else Quantized(ones(), ones())
    if flag is not None:
        setattr(saved.b if flagged == "part" else saved, flag, True)
    x = torch.ones(3, requires_grad=True)
    in_group(x, lambda y: KeepsSaved.apply(y, saved)).sum().backward()
    assert same_bits([getattr(KeepsSaved.seen.pop(), "a", ones())], [ones()])
    assert (face.statistics().bytes_offloaded == 0) is stays


def test_what_is_flagged_is_not_released(face: PipelineOffloadManager) -> None:
    x = torch.ones(9, requires_grad=True) * 1
    x._do_not_offload = True  # type: ignore[attr-defined]
    in_group(x, lambda inside: (inside * 2).exp(), forced_released_tensors=[x])
    face.statistics()
    assert x.untyped_storage().nbytes() == 36


def test_marking_none_does_nothing(face: PipelineOffloadManager) -> None:
    off_interface.mark_not_offload(None)
    marked = torch.ones(9)
    off_interface.mark_not_offload(marked)
    assert not face.cur_forward_chunk().tensor_need_offloading_checker(marked[3:])
    assert not hasattr(marked, "_do_not_offload")


# Groups by name


def test_groups_are_committed_by_name(face: PipelineOffloadManager) -> None:
    chunk = face.cur_forward_chunk()
    outer, inner = (chunk.on_group_start_forward(name) for name in ("outer", "inner"))
    assert chunk.offload_groups == [outer, inner]
    assert chunk.find_group_with_name(chunk.offload_groups, "inner") is inner
    assert chunk.find_group_with_name(chunk.offload_groups, "outer", 1) is None
    assert chunk.should_bulk_offload(outer)
    chunk.bulk_offload("outer", None)
    assert [group.name for group in chunk.open_groups] == ["inner"]
    chunk.bulk_offload_group(inner)
    assert not chunk.open_groups
    chunk.on_group_start_forward("last")
    chunk.on_group_commit_forward("last", [])


def test_a_hook_that_waits_keeps_no_tensor_alive(face: PipelineOffloadManager) -> None:
    called: list[Any] = []
    dropped, held = torch.ones(9), torch.ones(9)
    gone = weakref.ref(dropped)
    face.push_offload_groups(lambda _, tensors: called.append(tensors), "act", [dropped, held])
    IntroducedManager.get_instance().push_offload_groups(called.append, [dropped, held])
    del dropped
    assert gone() is None
    off_interface.flush_delayed_groups()
    assert [[tensor is held for tensor in tensors] for tensors in called] == [[True], [True]]
