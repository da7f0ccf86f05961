"""Saved tensors live as long as autograd needs them: F06, F16, F17, F20, F29, F43, F49, F50."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from conftest import NO_SPARSE, on_two_backends, skip_on_emulated
from helpers.scenarios import (
    Chain,
    Compute,
    begin,
    check_steps,
    make_inputs,
    manager_on,
    ordered,
    part,
    schedule,
)
from helpers.sessions import gradients, group
from helpers.toy import assert_idle, same_bits
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager
from pp_offload.backends import Backend

# F06: views of what came back

VIEWS: dict[str, Compute] = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t.as_strided((6, 6), (1, 5)),
    "row expanded": lambda t: t[2].expand(6, 6),
}


class GivesView(torch.autograd.Function):
    """The sum of x times a view of h. Its gradient for x is that view, and no copy."""

    @staticmethod
    def forward(ctx: Any, view: Compute, x: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        ctx.view = view
        return (x * view(h)).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.view(ctx.saved_tensors[0]), None


class Poisons(torch.autograd.Function):
    """Identity. Its backward takes whatever memory was freed before, and leaves NaN there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        blocks = [torch.full((36,), torch.nan, device=gradient.device) for _ in range(20)]
        blocks.clear()
        return gradient


@pytest.mark.field("F06")
@ordered
@pytest.mark.parametrize("way", ["groups", "context", "context, checkpointed"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_gradient_that_is_a_view_of_what_came_back(
    manager: PipelineOffloadManager, activations: OffloadActivations, view: Compute, way: str
) -> None:
    """It is read when other groups, and another step, came back."""
    activations.stash.max_tensors = 1
    device = manager.backend.device

    def run(is_on: bool, step: int) -> list[Tensor]:
        if is_on:
            manager.reset()
        begin(is_on)
        views: list[Tensor] = []
        leaves = make_inputs(4, length=6, step=step, device=device)
        total = torch.zeros((), device=device)
        for number, leaf in enumerate(leaves):
            h, x = leaf.detach() * 2, Poisons.apply(leaf.requires_grad_())
            x.register_hook(views.append)
            give = partial(GivesView.apply, view, x)
            with activations if is_on and way != "groups" else nullcontext():
                if "checkpointed" in way:
                    y = checkpoint(give, h, use_reentrant=False)
                else:
                    y = group(h, give, is_on and way == "groups", f"{number}")
            total = total + Poisons.apply(y)
            del h, x, give, y
        total.backward()
        return [*views, *gradients(*leaves)]

    got = [run(True, step) for step in range(3)]
    assert all(same_bits(got[step], run(False, step)) for step in range(3))
    owner = manager if way == "groups" else activations
    assert owner.statistics().bytes_offloaded > 0
    got.clear()
    assert_idle(owner)


# F16 and F29: a backward of any kind, of groups or in the context

Backward = Callable[[Tensor, Tensor, Sequence[Tensor]], list[Tensor]]


def once(loss: Tensor, leaf: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    loss.backward()
    return []


def three_times(loss: Tensor, leaf: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The last of them frees what is saved."""
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def input_then_weight(loss: Tensor, leaf: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    (of_input,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return [of_input, *torch.autograd.grad(loss, list(weights))]


def of_gradients(loss: Tensor, leaf: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    (second.sum() + first.sum() + loss).backward()
    return [first.detach(), second.detach()]


def parts_of_pipelining(loss: Tensor, leaf: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    of_input, parts = stage_backward_input([loss], None, [leaf], iter(weights))
    stage_backward_weight(iter(weights), parts)
    return [t for t in of_input if t is not None]


@pytest.mark.field("F16")
@pytest.mark.field("F29")
@pytest.mark.covering(2)
@ordered
@pytest.mark.parametrize("is_context", [False, True], ids=["groups", "context"])
@pytest.mark.parametrize(
    "backward",
    [once, three_times, input_then_weight, of_gradients, parts_of_pipelining],
)
def test_backward_of_any_kind(
    manager: PipelineOffloadManager,
    activations: OffloadActivations,
    backward: Backward,
    is_context: bool,
) -> None:
    """Two microbatches in flight."""
    chain = Chain("a", 3, device=manager.backend.device)
    moves = [(move.is_forward, move.microbatch) for move in schedule(4, 2)]

    def step(is_on: bool, number: int) -> list[Tensor]:
        chain.is_on = is_on and not is_context
        leaves = make_inputs(4, step=number, device=manager.backend.device)
        losses: dict[int, Tensor] = {}
        results: list[Tensor] = []
        for is_forward, m in moves:
            if is_forward:
                begin(chain.is_on)
                with activations if is_on and is_context else nullcontext():
                    losses[m] = chain(leaves[m].requires_grad_()).square().mean()
            else:
                loss = losses.pop(m)
                results += [loss.detach(), *backward(loss, leaves[m], list(chain.weights))]
        return results + gradients(*leaves, *chain.weights)

    check_steps(activations if is_context else manager, step)


@pytest.mark.field("F29")
@on_two_backends
def test_in_the_context_each_microbatch_in_flight_is_on_the_host(
    activations: OffloadActivations, backend: Backend
) -> None:
    """But for what is kept of the last, whose backward comes next."""
    chain = Chain("a", 3, is_on=False, device=backend.device)
    held, losses = [0], []
    for x in make_inputs(3, device=backend.device):
        with activations:
            losses.append(chain(x.requires_grad_()).square().mean())
        held.append(activations.statistics().host_bytes_in_use)
    grown = [after - before for before, after in zip(held, held[1:], strict=False)]
    assert grown[0] > 0
    assert all(more > grown[0] for more in grown[1:]), "each sends what the one before it kept"
    losses.clear()
    assert_idle(activations)


# F17: never unpacked

Forward = Callable[[Chain, Tensor, int], Tensor | None]
"""The loss of a microbatch, or None if it is dropped. The number counts microbatches."""


def unused_branch(chain: Chain, x: Tensor, number: int) -> Tensor:
    """Every second microbatch computes a branch that its loss does not need."""
    h = chain(x)
    branch = part("branch", h, chain.weights[0], chain.is_on)
    return (h if number % 2 else h * branch).square().mean()


def dropped_loss(chain: Chain, x: Tensor, number: int) -> Tensor | None:
    """As for a microbatch that is skipped because its loss is not finite."""
    loss = chain(x).square().mean()
    return loss if number % 3 else None


def expert_off_the_path(chain: Chain, x: Tensor, number: int) -> Tensor:
    """All experts compute; the router takes the outputs of one or two of them."""
    h = chain(x)
    experts = [part(f"expert {i}", h, w, chain.is_on) for i, w in enumerate(chain.weights)]
    chosen = {number % len(experts), (number // 2) % len(experts)}
    return sum((experts[i] for i in chosen), start=h).square().mean()


def recomputed(chain: Chain, x: Tensor, number: int) -> Tensor:
    """Backward runs a forward again; not all it saves then is asked for."""

    def twice(x: Tensor) -> Tensor:
        y = chain(x)
        chain(y)
        return y

    return checkpoint(twice, chain(x), use_reentrant=bool(number % 2)).square().mean()


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.field("F17")
@pytest.mark.parametrize("backend", ["late"], indirect=True)
@pytest.mark.parametrize("is_context", [False, True], ids=["groups", "context"])
@pytest.mark.parametrize("forward", [unused_branch, dropped_loss, expert_off_the_path, recomputed])
def test_what_backward_never_asks_for_leaves_nothing(
    manager: PipelineOffloadManager,
    activations: OffloadActivations,
    forward: Forward,
    is_context: bool,
) -> None:
    """The same experts are on the path in every eighth step; then there is as much as before."""
    engine: Any = activations if is_context else manager
    chain = Chain(layers=2, device=manager.backend.device)

    def run(is_on: bool, step: int) -> list[Tensor]:
        chain.is_on = is_on and not is_context
        inputs, losses = make_inputs(3, step=step), []
        for index, x in enumerate(inputs):
            begin(chain.is_on)
            with activations if is_on and is_context else nullcontext():
                losses.append(forward(chain, x.requires_grad_(), step * 3 + index))
        for loss in losses:
            if loss is not None:
                loss.backward()
        return gradients(*(t for t in (*inputs, *chain.weights) if t.grad is not None))

    amounts = []
    for step in range(16):
        check_steps(engine, lambda is_on, _, step=step: run(is_on, step), steps=1)
        if step in (7, 15):
            manager.backend.synchronize()
            offloader = activations.stash._offloader if is_context else manager.offloader
            offloader.engine.shared.forget_dead()  # as the next step or forward would
            statistics = engine.statistics()
            reserved, peak = statistics.host_bytes_reserved, statistics.host_bytes_peak
            amounts.append((living_tensors(), reserved, peak))
    assert amounts[0] == amounts[1], "tensors, host bytes reserved, most host bytes in use"


# F20: any order of groups

NAMES = "abcd"


def crossed(x: Tensor, weights: Sequence[Tensor], is_on: bool) -> Tensor:
    """Groups of two branches in turns: forward is a1 b1 a2 b2, backward b2 b1 a2 a1."""
    first = part("a", x, weights[0], is_on)
    second = part("b", x * 2, weights[1], is_on)
    first = part("a", first, weights[2], is_on)
    second = part("b", second, weights[3], is_on)
    return first.sum() * 3 + second.sum()


def branch_used_late(x: Tensor, weights: Sequence[Tensor], is_on: bool) -> Tensor:
    """The first group's output meets the others only at the end; it is the first in backward."""
    first = h = part("a", x, weights[0], is_on)
    for name, weight in zip(NAMES[1:], weights[1:], strict=True):
        h = part(name, h, weight, is_on)
    return (h * first.sin()).square().mean()


@pytest.mark.field("F20")
@ordered
@pytest.mark.parametrize("prefetch_bytes", [0, 300, 2**20])
def test_groups_in_any_order(backend: Backend, prefetch_bytes: int) -> None:
    """Of two branches, and of four branches whose gradients are asked for one by one.

    Nothing is in flight when backward begins, so every tensor is reloaded.
    """
    with manager_on(backend, prefetch_bytes=prefetch_bytes, max_in_flight_bytes=0) as manager:
        device = backend.device
        weights = [nn.Parameter(w / 2) for w in make_inputs(4, length=6, device=device)]

        def branches(is_on: bool, number: int, program: Callable[..., Tensor]) -> list[Tensor]:
            losses = []
            for x in make_inputs(2, step=number, device=device):
                begin(is_on)
                losses.append(program(x.requires_grad_(), weights, is_on))
            while losses:
                losses.pop(0).backward()
            return gradients(*weights)

        for program in (crossed, branch_used_late):
            check_steps(manager, partial(branches, program=program))

        def apart(is_on: bool, number: int, order: tuple[int, ...]) -> list[Tensor]:
            begin(is_on)
            (x,) = make_inputs(1, device=device)
            outputs = [part(NAMES[i], x * (i + 1), weights[i], is_on).sum() for i in range(4)]
            return [torch.autograd.grad(outputs[i], weights[i])[0] for i in order]

        for order in permutations(range(4)):
            check_steps(manager, partial(apart, order=order), steps=1)
        assert manager.statistics().bytes_reloaded > 0


# F43: a weight pass that comes late


@pytest.mark.field("F43")
@ordered
@pytest.mark.parametrize("delay", [1, 3, 5])
def test_host_copies_stay_for_a_weight_pass_that_is_late(
    manager: PipelineOffloadManager, delay: int
) -> None:
    """By some microbatches; they go then, although the losses are kept."""
    chain, losses_of_steps = Chain(device=manager.backend.device), []

    def step(is_on: bool, number: int) -> list[Tensor]:
        chain.is_on = is_on
        held: list[int] = []
        leaves = make_inputs(5, step=number, device=manager.backend.device)
        losses, waiting, results = [], [], []

        def weight_pass() -> None:
            held.append(manager.statistics().host_bytes_in_use)
            stage_backward_weight(chain.parameters(), waiting.pop(0))

        for leaf in leaves:
            begin(is_on)
            losses.append(chain(leaf.requires_grad_()).square().mean())
        losses_of_steps.append(losses)
        for leaf, loss in zip(leaves, losses, strict=True):
            of_input, parts = stage_backward_input([loss], None, [leaf], chain.parameters())
            results += [g for g in of_input if g is not None]
            waiting.append(parts)
            if len(waiting) > delay:
                weight_pass()
        while waiting:
            weight_pass()
        assert not is_on or all(held), "there for the weights"
        return results + gradients(*chain.parameters()) + [loss.detach() for loss in losses]

    check_steps(manager, step)


# F49: microbatches in any order


def sum_of_losses(losses: list[Tensor]) -> None:
    sum(losses[1:], start=losses[0]).backward()


def last_in_first_out(losses: list[Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def shuffled(losses: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(len(losses))
    for index in torch.randperm(len(losses), generator=generator).tolist():
        losses[index].backward()


def first_forgotten(losses: list[Tensor]) -> None:
    for loss in losses[1:]:
        loss.backward()


@pytest.mark.field("F49")
@ordered
@pytest.mark.parametrize("num_managers", [1, 2])
@pytest.mark.parametrize("num_models", [1, 2])
def test_microbatches_in_any_order(backend: Backend, num_models: int, num_managers: int) -> None:
    """Of one model or two in turns, with groups of the same names; the order changes every step.

    With two managers, tensors of one come back while the other is the current one.
    """
    config = OffloadConfig(min_offloaded_tensor_size=1)
    managers = [PipelineOffloadManager(config=config, backend=backend) for _ in range(num_managers)]
    models = [
        Chain(names, 2, device=backend.device, seed=seed)
        for seed, names in enumerate(("ab", "ba")[:num_models])
    ]
    with manager_on(backend):
        orders = (sum_of_losses, last_in_first_out, shuffled, first_forgotten, last_in_first_out)
        for number, order in enumerate(orders):

            def step(is_on: bool, _: int, order: Any = order, number: int = number) -> list[Tensor]:
                for manager in managers:
                    manager.reset()
                leaves, losses = [], []
                for m, x in enumerate(make_inputs(3 + number % 2, device=backend.device)):
                    for place, model in enumerate(models):
                        PipelineOffloadManager.OFFLOAD_MGR = managers[(m + place) % num_managers]
                        model.is_on = is_on
                        begin(is_on)
                        leaves.append(x.clone().requires_grad_())
                        losses.append(model(leaves[-1]).square().mean())
                order(losses)
                return gradients(*leaves, *(p for model in models for p in model.parameters()))

            for manager in managers:
                check_steps(manager, step, steps=1)


# F50: what PyTorch promises of hooks


class Token:
    """Something to refer to weakly."""


@pytest.fixture
def x(manager: PipelineOffloadManager) -> Iterator[Tensor]:
    """An input of a microbatch that has begun."""
    begin()
    yield make_inputs(1, device=manager.backend.device)[0].requires_grad_()


@pytest.mark.field("F50")
@on_two_backends
def test_saved_tensors_are_read_outside_backward(
    manager: PipelineOffloadManager, x: Tensor
) -> None:
    """An input, a leaf and an output, which does not keep its node alive by a cycle."""
    h = x * 2
    y = group(h, torch.sin)
    node = y.grad_fn
    assert same_bits([node._saved_self.detach()], [h.detach()])
    assert node._saved_self.requires_grad and node._saved_self.grad_fn is h.grad_fn
    y.sum().backward()
    assert same_bits([x.grad], [2 * (x.detach() * 2).cos()])
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_self
    assert group(x, torch.sin).grad_fn._saved_self.is_leaf
    y = group(x * 2, torch.exp)
    saved = y.grad_fn._saved_result
    assert saved is not y and saved.grad_fn is y.grad_fn
    assert same_bits([saved.detach()], [y.detach()])
    token = Token()
    y.grad_fn.metadata["token"] = token  # lives as long as the node
    alive = weakref.ref(token)
    gc.disable()
    try:
        del y, saved, token, node
        assert alive() is None
    finally:
        gc.enable()
    assert_idle(manager)


def of_sparse(h: Tensor) -> Tensor:
    """Sparse tensors of two layouts are saved; a gradient goes through another."""
    mask = torch.ones(4, 4, device=h.device).tril()
    y = torch.sparse.mm(mask.to_sparse(), h) * torch.sparse.mm(mask.to_sparse_csr(), h.sin())
    return y + torch.sparse.mm((h @ h.t()).to_sparse(), h).sin()


def under_vmap(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * row.exp())(h)


def plainly(h: Tensor) -> Tensor:
    return (h.sin() * h).exp()


@pytest.mark.field("F50")
@on_two_backends
@pytest.mark.parametrize("compute", [of_sparse, under_vmap, plainly])
def test_derivatives_of_any_order(manager: PipelineOffloadManager, compute: Compute) -> None:
    if compute is of_sparse:
        skip_on_emulated(manager.backend, NO_SPARSE)

    def step(is_on: bool, number: int) -> list[Tensor]:
        x = make_inputs(1, step=number, device=manager.backend.device)[0].requires_grad_()
        begin(is_on)
        results = [group(x * 1.5, compute, is_on)]
        for _ in range(3 if compute is plainly else 1):
            results += torch.autograd.grad(results[-1].sum(), x, create_graph=compute is plainly)
        return [result.detach() for result in results]

    check_steps(manager, step)
