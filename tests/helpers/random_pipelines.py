"""Pipelines drawn at random: modules, groups, options, a schedule and a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, product
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward
from torch.nn import functional as F

from pp_offload import OffloadConfig, recompute_layers
from pp_offload.config import AUTO, without_plan
from pp_offload.plan import OffloadPlan, RankPlan, RankTapes, predict, record, search
from pp_offload.plan.pipeline import NUM_PROVEN, predict_each
from pp_offload.plan.search import first_saved
from pp_offload.simulate import DEVICES, Hardware, Modules, PeerLink, PipelineOrder, PipelineStep
from pp_offload.simulate.schedules import LOOPED, SCHEDULES, V_SHAPED


class Attention(nn.Module):
    """Heads of one projection, so that queries, keys and values are views; or values alone."""

    def __init__(self, width: int, is_rotary: bool) -> None:
        super().__init__()
        self.qkv, self.is_rotary = nn.Linear(width, 3 * width), is_rotary
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(1, x.shape[0], 3, 4, -1).permute(2, 0, 3, 1, 4)
        scores = [part * 0.5 if self.is_rotary else part for part in parts[:2]]
        mixed = F.scaled_dot_product_attention(*scores, parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    """Two products, one of which decides."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Twice(nn.Module):
    """Two operators that save the same tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return self.one(y) + self.two(y) * y


class Layer(nn.Module):
    """A part with a norm before it, beside which its input goes on."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1 if draw.random() < 0.3 else 0.0)
        self.gate = draw.choice([None, None, None, "input", "normed"])
        kind = draw.choice(["attention", "gated", "plain", "twice"])
        if kind == "attention":
            self.part: nn.Module = Attention(width, is_rotary=self.gate is not None)
        elif kind == "gated":
            self.part = Gated(width, width * draw.choice([1, 2, 3]))
        elif kind == "twice":
            self.part = Twice(width)
        else:
            inner = width * draw.choice([1, 2, 4])
            self.part = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if table is not None:
            x = x * table
        normed = self.norm(x)
        y: Tensor = self.drop(self.part(normed))
        if self.gate is not None:  # which saves what another group may have saved
            y = y * (x if self.gate == "input" else normed)
        return x + y


class Stage(nn.Sequential):
    """Layers, perhaps with a tensor that all of them save, as those of rotary embeddings."""

    def __init__(self, draw: Random, *layers: Layer) -> None:
        super().__init__(*layers)
        self.has_table = draw.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        table = x.detach().exp() if self.has_table else None
        for layer in self:
            x = layer(x, table)
        return x


PATTERNS = [
    {"part": "*.part"},
    {"layer": "*"},
    {"norm": "*.norm", "part": "*.part"},
    {"layer": "*", "norm": "*.norm"},
    {"layer": "*", "inner": "*.part"},
]


@dataclass(frozen=True)
class Drawn:
    """One of them."""

    order: PipelineOrder
    work: Modules
    hardware: Hardware
    peers: PeerLink
    config: OffloadConfig
    num_steps: int

    @property
    def options(self) -> dict[str, Any]:
        """By name, of a run and of a prediction."""
        return {"config": self.config, "peers": self.peers, "num_steps": self.num_steps}


def draw_pipeline(seed: int, *, schedules: Sequence[type] | None = None) -> Drawn:
    """The pipeline of a seed: of at least two ranks with two stages each, and one of these
    ``schedules``; or of any whose backwards are whole.
    """
    draw = Random(seed)
    num_ranks = draw.choice([1, 2, 3, 4] if schedules is None else [2, 2, 3, 4])
    names = ["1f1b", "1f1b", "gpipe"]
    if num_ranks > 1:
        names += ["interleaved1f1b", "loopedbfs"]
    some = [SCHEDULES[name] for name in names]
    schedule = draw.choice(some if schedules is None else list(schedules))
    is_looped = schedule in LOOPED.values()
    num_stages = num_ranks * (2 if is_looped or schedule in V_SHAPED.values() else 1)
    rounds = draw.choice([1, 2, 3])
    num_microbatches = num_ranks * rounds if is_looped else num_ranks + draw.choice([0, 0, 1, 3, 6])
    if schedule is SCHEDULES["dualpipev"]:
        num_microbatches = 2 * num_ranks + draw.choice([0, 2])
    width, length = draw.choice([32, 64, 128]), draw.choice([16, 100, 256])
    with torch.device("meta"):
        stages = [
            Stage(draw, *(Layer(draw, width) for _ in range(draw.choice([1, 2, 3])))).bfloat16()
            for _ in range(num_stages)
        ]
        example = torch.empty(length, width, dtype=torch.bfloat16)
    chunk_bytes = 8 * length * width * 4
    options = {
        "min_offloaded_tensor_size": draw.choice([1, 1000, 5000, 20000]),
        "max_in_flight_bytes": draw.choice(["auto", "auto", 0, 1, chunk_bytes // 4, chunk_bytes]),
        "prefetch_bytes": draw.choice(["auto", "auto", 1, chunk_bytes // 4, chunk_bytes, 2**40]),
    }
    draw.choice(range(4))  # so that a seed draws what it always drew
    config = OffloadConfig(
        device_limit_bytes=None,
        **options,
        activation_offload_fraction=draw.choice([1.0, 1.0, 1.0, 0.5]),
        delta_offload_bytes_across_pp_ranks=draw.choice([0, 0, chunk_bytes // 3]),
    )
    hardware = replace(
        DEVICES["H100"],
        link_bytes_per_s=10 ** draw.uniform(7, 11),
        launch_s=draw.choice([0.0, 1e-6, 1e-5]),
        copy_latency_s=draw.choice([0.0, 1e-6, 1e-5]),
        matmul_flops=10 ** draw.uniform(11, 14),
        memory_bytes_per_s=10 ** draw.uniform(9, 12),
        num_queued_launches=draw.choice([4, 30, 1024]),
        memory_bytes=draw.choice([2**40, 10 * chunk_bytes]),
        d2h_slowdown=(slowdown := draw.choice([0.0, 0.0, 0.2])),
        h2d_slowdown=slowdown / 2,
    )
    if draw.random() < 0.3:
        hardware = replace(hardware, both_links_bytes_per_s=1.3 * hardware.link_bytes_per_s)
    peers = PeerLink(bytes_per_s=10 ** draw.uniform(8, 11))
    work = Modules(stages, example=example, loss_fn=lambda y: y.sum(), groups=draw.choice(PATTERNS))
    if schedules is not None:
        config = replace(config, split_backward=draw.choice(["reload", "keep"]))
    order = PipelineOrder(
        schedule, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )
    return Drawn(order, work, hardware, peers, config, num_steps=draw.choice([1, 2, 3, 4]))


@contextmanager
def some_recomputed(drawn: Drawn, seed: int) -> Iterator[None]:
    """Meanwhile backward recomputes about half of the layers."""
    draw = Random(seed)
    with ExitStack() as stack:
        for stage in drawn.work.stages:
            names = [name for name, _ in stage.named_children() if draw.random() < 0.5]
            stack.enter_context(recompute_layers(stage, names))
        yield


@contextmanager
def ordered_parts() -> Iterator[None]:
    """Meanwhile the second part of a backward has the same order in each run.

    PyTorch keeps parameters, and nodes of the graph that their gradients begin at, in sets: so they
    come in the order of addresses, and two runs of the same pipeline differ by some launches.
    """
    unordered = _backward.get_param_groups

    def ordered(inputs: Any, params: Any, reverse_edges: Any) -> Any:
        nodes = {node: number for number, node in enumerate(reverse_edges)}
        numbers = {param: number for number, param in enumerate(params)}
        groups = unordered(inputs, params, reverse_edges)
        for group in groups:
            group["params"] = sorted(group["params"], key=numbers.__getitem__)
            group["intermediates"] = sorted(
                group["intermediates"], key=lambda node: nodes.get(node, -1)
            )
        return sorted(groups, key=lambda group: numbers[group["params"][0]])

    with patch.object(_backward, "get_param_groups", ordered):
        yield


# Those whose options leave to a plan what stays


def planned(
    seed: int,
    *,
    layers: str | None = None,
    schedules: Sequence[type] | None = None,
    rematerialize: str = "cheap",
) -> tuple[Drawn, list[RankTapes]]:
    """A pipeline, and its tapes; ``layers`` is a pattern of what may be recomputed."""
    drawn = draw_pipeline(seed, schedules=schedules)
    drawn.work.layers = layers
    config = replace(
        drawn.config,
        activation_offload_fraction=1.0,
        delta_offload_bytes_across_pp_ranks=0,
        rematerialize=rematerialize,
    )
    drawn = replace(drawn, config=config)
    return drawn, record(drawn.order, drawn.work, drawn.hardware, config)


def with_host_memory(
    drawn: Drawn, tapes: list[RankTapes], part: float
) -> tuple[Drawn, list[RankTapes]]:
    """The same with so much of what the fullest rank would take on the host."""
    how = drawn.order, tapes, drawn.hardware
    step = predict(*how, peers=drawn.peers, config=drawn.config)
    most = max(rank.host_peak_bytes for rank in step.ranks)
    config = replace(drawn.config, host_budget_bytes=int(part * most))
    return replace(drawn, config=config), tapes


def limits(drawn: Drawn, tapes: list[RankTapes], num: int) -> list[int]:
    """From what is needed where all leaves to what is needed where nothing does."""
    how = drawn.order, tapes, drawn.hardware
    none = predict(*how, peers=drawn.peers, num_steps=1)
    least = predict(*how, peers=drawn.peers, config=drawn.config)
    low, high = (max(rank.peak_bytes for rank in step.ranks) for step in (least, none))
    return [low + (high - low) * part // (num - 1) for part in range(num)]


# Every choice of groups and layers of a small pipeline, whichever of them are equal


@dataclass(frozen=True)
class Choice:
    """What stays on each rank, within which bounds."""

    step: PipelineStep
    """One, in which optimizers have a state."""

    follow: Callable[[], list[PipelineStep]]
    """Predicts what an engine does that follows it from the first step on."""

    @property
    def tried(self) -> tuple[int, float]:
        """The peak and the time of that step."""
        return _highest([self.step]), self.step.seconds

    @cached_property
    def followed(self) -> tuple[int, float]:
        """The larger ones of what is tried and of what an engine does. They differ where steps that
        follow each other do, and where host memory is laid out in another way.
        """
        steps = [self.step, *self.follow()]
        return _highest(steps), max(self.step.seconds, steps[-1].seconds)


def _highest(steps: Sequence[PipelineStep]) -> int:
    return max(rank.peak_bytes for step in steps for rank in step.ranks)


def choices(drawn: Drawn, tapes: list[RankTapes]) -> Iterator[Choice]:
    """Each of them, also with smaller bounds than an engine chooses by itself."""
    places = [(n, group.place) for n, rank in enumerate(tapes) for group in first_saved(rank)]
    plain = without_plan(drawn.config)

    def config_of(resident: set[Any], bounds: Sequence[tuple[int, int]]) -> OffloadConfig:
        ranks = []
        for number, (tape, (in_flight, ahead)) in enumerate(zip(tapes, bounds, strict=True)):
            groups = tape.planned([place for rank, place in resident if rank == number])
            limits = {"max_in_flight_bytes": in_flight, "prefetch_bytes": ahead}
            ranks.append(RankPlan(groups, **limits))
        return replace(plain, plan=OffloadPlan("", 0, 0.0, 0.0, tuple(ranks)))

    def choice_of(config: OffloadConfig) -> Choice:
        how = drawn.hardware, config, drawn.peers
        (step,) = predict_each(drawn.order, [rank.with_state() for rank in tapes], *how, 1)
        return Choice(step, lambda: predict_each(drawn.order, tapes, *how, NUM_PROVEN))

    how = drawn.order, tapes, drawn.hardware
    own = [rank.bounds for rank in predict(*how, config=plain, peers=drawn.peers).ranks]
    is_free = AUTO in (plain.max_in_flight_bytes, plain.prefetch_bytes)
    for part in search.BOUNDS if is_free else [1]:
        bounds = [(max(1, int(part * flying)), max(1, int(part * ahead))) for flying, ahead in own]
        for bits in product([False, True], repeat=len(places)):
            yield choice_of(config_of(set(compress(places, bits)), bounds))


def each_number(tapes: list[RankTapes]) -> Iterator[list[RankTapes]]:
    """With each number of recomputed layers."""
    for nums in product(*(range(rank.num_layers + 1) for rank in tapes)):
        yield [rank.recomputing(num) for rank, num in zip(tapes, nums, strict=True)]
