"""A model whose layers run under a checkpoint, with groups in and around it: what F53 runs.

    model, activations = build(case, backend, is_on=True)
    run(model, ORDERS["1F1B"], inputs, bytes_moved)

What it is compared with is the same model without groups and without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from field_checks import hook_depth
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager, offload_modules
from pp_offload import fine_grained_offloading_group_start as group_start
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._checkpoint.selective import OpPolicy
from pp_offload.backends import Backend
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    FullACParams,
    SelectiveOpACParams,
)

WIDTH = 6
ROWS = 4

Compute = Callable[[Tensor], Tensor]
Mark = Callable[[Compute, Tensor], Tensor]


def without_mark(compute: Compute, x: Tensor) -> Tensor:
    return compute(x)


# The model


class Markable(nn.Module):
    """Its forward may be a group."""

    def __init__(self) -> None:
        super().__init__()
        self.mark: Mark = without_mark

    def forward(self, x: Tensor) -> Tensor:
        return self.mark(self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        """What is in the group."""
        raise NotImplementedError


class Part(Markable):
    """Saves tensors that have all one shape, or are of two shapes."""

    def __init__(self, is_wide: bool, drops: bool, inner: Markable | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH) if is_wide else nn.Identity()
        self.down = nn.Linear(2 * WIDTH, WIDTH) if is_wide else nn.Identity()
        self.inner = inner
        self.chance = 0.25 if drops else 0.0

    def compute(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x * self.scale)))
        if self.inner is not None:
            y = self.inner(2 * y)
        return nn.functional.dropout(torch.sin(2 * y), self.chance, training=self.chance > 0)


class Body(Markable):
    """What the checkpoint runs again."""

    def __init__(self, is_wide: bool, drops: bool) -> None:
        super().__init__()
        self.a = Part(is_wide, drops)
        self.mlp = Part(False, drops, Part(is_wide, False))
        self.c = Part(is_wide, drops)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.c(3 * self.mlp(2 * self.a(x))))


class Layer(Markable):
    """A body under a checkpoint."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        # The input of a first stage needs no gradient, and an older checkpoint wants one that does.
        self.scale = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.box = nn.Sequential(body)
        self.run: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__

    def compute(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.run(self.box, torch.cos(x * self.scale)))


# Where the groups are

PLACES: Mapping[str, Mapping[str, str]] = {
    "start": {"a": "box.0.a"},
    "middle": {"mlp": "box.0.mlp"},
    "end": {"c": "box.0.c"},
    "around": {"layer": ""},
    "two": {"a": "box.0.a", "c": "box.0.c"},
    "nested": {"mlp": "box.0.mlp", "inner": "box.0.mlp.inner"},
    "everything": {"body": "box.0"},
    "around and inside": {"layer": "", "mlp": "box.0.mlp"},
}
"""For each place the groups of a layer and the modules that they are."""

# What makes a group of a module


def by_interface(name: str, compute: Compute, x: Tensor) -> Tensor:
    with off_interface(True, x, name) as x:
        y = compute(x)
    return off_interface.group_commit(y, name=name)


def by_manager(name: str, compute: Compute, x: Tensor) -> Tensor:
    group_start(x, name)
    with off_interface.get_context(True):
        y = compute(x)
    return off_interface.group_commit(y, name=name)


def by_activations(context: OffloadActivations, compute: Compute, x: Tensor) -> Tensor:
    with context:
        return compute(x)


MARKINGS = ("markers", "context", "modules", "attach", "activations")


def mark(model: nn.Sequential, case: Case, activations: OffloadActivations) -> None:
    """Make groups; those of ``attach`` are made when it is called."""
    groups = PLACES[case.place]
    if case.marking == "modules":
        offload_modules(model, patterns(case))
    if case.marking in ("modules", "attach"):
        return
    marks = {"markers": by_interface, "context": by_manager}
    for layer, (name, path) in product(model, groups.items()):
        is_named = case.marking in marks
        module: Any = layer.get_submodule(path)
        module.mark = partial(
            *(marks[case.marking], name) if is_named else (by_activations, activations)
        )


def patterns(case: Case, body: str = "box.0") -> dict[str, str]:
    """What ``offload_modules`` takes, for layers whose body has that name."""
    paths = {name: path.replace("box.0", body) for name, path in PLACES[case.place].items()}
    return {name: f"*.{path}".rstrip(".") for name, path in paths.items()}


def name_of_body(model: nn.Module) -> str:
    """A wrapper is part of it."""
    names = [name for name, module in model.named_modules() if isinstance(module, Body)]
    return names[0][names[0].index("box.") :]


# The checkpoints

PRODUCTS = torch.ops.aten.addmm.default, torch.ops.aten.tanh.default
SAVED = ["ops.aten.addmm.default", "ops.aten.tanh.default"]


def keep_some(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and tanh are saved, the rest is recomputed."""
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def torchs(layer: Layer, stops: bool, backend: Backend, **options: Any) -> None:
    layer.run = partial(checkpoint, use_reentrant=False, early_stop=stops, **options)


def torchs_selective(layer: Layer, stops: bool, backend: Backend) -> None:
    contexts = partial(create_selective_checkpoint_contexts, keep_some)
    torchs(layer, stops, backend, context_fn=contexts)


def torchs_reentrant(layer: Layer, stops: bool, backend: Backend) -> None:
    layer.run = partial(checkpoint, use_reentrant=True)


def wrapped(layer: Layer, stops: bool, backend: Backend) -> None:
    inner = checkpoint_wrapper(layer.box[0], CheckpointImpl.NO_REENTRANT, early_stop=stops)
    layer.box = nn.Sequential(inner)


def ours(layer: Layer, stops: bool, backend: Backend, **options: Any) -> None:
    layer.run = Recompute(early_stop=stops, **options)


def ours_with_stash(layer: Layer, stops: bool, backend: Backend) -> None:
    stash = ActivationStash("inputs", min_offload_size=1, backend=backend)
    ours(layer, stops, backend, stash=stash)


def applied(
    layer: Layer, stops: bool, backend: Backend, params: FullACParams, number: int = 0
) -> None:
    ActivationCheckpointing.apply_activation_checkpointing_(
        list(ActivationCheckpointingVariants)[number],
        "box",
        layer,
        replace(params, early_stop=stops and not params.use_reentrant),
        backend=backend,
    )


WAYS: Mapping[str, Callable[[Layer, bool, Backend], None]] = {
    "torch": torchs,
    "wrapper": wrapped,
    "selective": torchs_selective,
    "reentrant": torchs_reentrant,
    "ours": ours,
    "ours, stash": ours_with_stash,
    "ours, selective": partial(ours, policy=OpPolicy(frozenset(PRODUCTS))),
    "ours, reentrant": partial(ours, use_reentrant=True),
    "applied": partial(applied, params=FullACParams()),
    "applied, offload": partial(
        applied, params=FullACParams(offload_inputs=True, min_offload_size=1)
    ),
    "applied, by operator": partial(
        applied, params=SelectiveOpACParams(save_ops_keys=SAVED[:1]), number=2
    ),
}
REENTRANT = {"reentrant", "ours, reentrant"}
"""They run their function without grad first, so that groups in them do nothing."""

ONCE = {"selective", "ours, selective", "applied, by operator", *REENTRANT}
"""They have no backward in two parts, or not twice through a region."""

# Cases


@dataclass(frozen=True)
class Case:
    """One program."""

    place: str
    way: str
    stops: bool
    """Whether a recomputation ends as soon as it may."""
    kind: str
    """Of backend."""
    marking: str
    is_wide: bool
    """Whether what is saved has two shapes, so that a wrong one is noticed."""
    drops: bool
    order: str

    def __str__(self) -> str:
        words = {"stops": "early", "is_wide": "wide", "drops": "dropout"}
        said = [value for value in astuple(self) if isinstance(value, str)]
        return "-".join(said + [word for name, word in words.items() if getattr(self, name)])


def covering(kinds: Sequence[str]) -> Iterator[Case]:
    """Every place with every checkpoint, stopping early or not; of all the rest, every pair.

    The full product has 30,000 cases. For each of the 176 that must be there, the rest is chosen
    in turn, so that as many pairs of values as possible come up for the first time.
    """
    rests = list(product(kinds, MARKINGS, (False, True), (False, True), ORDERS))
    seen: set[tuple[Any, ...]] = set()
    for first in product(PLACES, WAYS, (True, False)):
        possible = [(*first, *rest) for rest in rests if is_possible(*first, *rest)]
        if not possible:
            continue
        best = max(possible, key=lambda values: len(pairs(values) - seen))
        seen |= pairs(best)
        # The one that was taken is the last to be taken again.
        rests.append(rests.pop(rests.index(best[3:])))
        yield Case(*best)


def is_possible(place: str, way: str, stops: bool, kind: str, marking: str, *rest: object) -> bool:
    """Whether PyTorch can do it. An older checkpoint has no early stop."""
    return (stops or way not in REENTRANT) and not ("zero bubble" in rest and way in ONCE)


def pairs(values: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return set(combinations(enumerate(values), 2))


def build(case: Case, backend: Backend, is_on: bool) -> tuple[nn.Sequential, OffloadActivations]:
    """Two layers, the same each time; without groups and checkpoints if not ``is_on``."""
    torch.manual_seed(2)
    layers = [Layer(Body(case.is_wide, case.drops)) for _ in range(2)]
    model = nn.Sequential(*layers).to(backend.device)
    activations = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=backend)
    if is_on:
        mark(model, case, activations)
        for layer in layers:
            WAYS[case.way](layer, case.stops, backend)
    return model, activations


# Steps

ORDERS: Mapping[str, Sequence[tuple[str, int]]] = {
    "1F1B": [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)],
    "zero bubble": [
        *[("F", 0), ("F", 1), ("I", 0), ("I", 1), ("W", 0), ("F", 2)],
        *[("I", 2), ("W", 1), ("W", 2)],
    ],
}
"""Forwards, backwards, and the parts of a backward that comes in two."""

Moved = Callable[[], int]


def run(
    model: nn.Module,
    order: Sequence[tuple[str, int]],
    inputs: Sequence[Tensor],
    moved: Moved | None,
) -> list[Tensor]:
    """Losses and all gradients of a step; a backward must move nothing out.

    Args:
        model: What is trained.
        order: Of its microbatches' parts.
        inputs: One for each microbatch.
        moved: How many bytes have left the device; None without offload.
    """
    leaves: dict[int, Tensor] = {}
    losses: dict[int, Tensor] = {}
    parts: dict[int, Any] = {}
    found: list[Tensor] = []
    for what, m in order:
        if what == "F":
            if moved is not None:
                begin_chunk()
            leaves[m] = inputs[m].clone().requires_grad_()
            losses[m] = model(leaves[m]).square().sum()
            assert hook_depth() == 0
            continue
        before = None if moved is None else moved()
        if what == "B":
            losses[m].backward()
        if what == "I":
            weights = iter(list(model.parameters()))
            grads, parts[m] = stage_backward_input([losses[m]], None, [leaves[m]], weights)
            found += [grad for grad in grads if grad is not None]
        if what == "W":
            stage_backward_weight(iter(list(model.parameters())), parts.pop(m))
        if what in "BW":
            gradient = leaves.pop(m).grad
            found += [losses.pop(m).detach(), *([] if gradient is None else [gradient])]
        assert hook_depth() == 0
        assert moved is None or moved() == before, f"{what}{m} moved something out"
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def begin_chunk() -> None:
    off_interface.init_chunk_handler(None, None, 1)


def bytes_moved() -> int:
    return PipelineOffloadManager.get_instance().statistics().bytes_offloaded
