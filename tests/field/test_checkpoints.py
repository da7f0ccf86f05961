"""Groups, the context and checkpoints, one inside the other.

Rows F12, F28, F38, F39, F53, F62, F63, F65, F66 and F69.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from helpers import sessions
from helpers.saving import Raises
from helpers.sessions import assert_idle, assert_no_hooks, begin_step, gradients, group, session
from helpers.sliced import Stack
from helpers.toy import make_inputs, same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import pp_offload
from pp_offload import (
    OffloadActivations,
    OffloadError,
    PipelineOffloadManager,
    _hooks,
    checkpoint_function,
    checkpoint_wrapper,
    offload_layers,
    offload_modules,
    recompute_layers,
)
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.torch_private import checkpoint_wrapper as torch_wrapper
from pp_offload._common.torch_private import top_hooks
from pp_offload._hooks import all_packs, is_in_backward, top_pack
from pp_offload.backends import Backend, CpuBackend
from pp_offload.checkpointing import FullACParams, SelectiveOpACParams
from pp_offload.testing import SimulatedBackend

Function = Callable[..., Tensor]
Run = Callable[..., Tensor]
"""A checkpoint: takes the function and its arguments."""

ADDMM, TOPK = "ops.aten.addmm.default", "ops.aten.topk.default"
CAST, TANH = "ops.aten._to_copy.default", "ops.aten.tanh.default"


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def torchs(stops: bool = True, **options: Any) -> Run:
    return partial(checkpoint, use_reentrant=False, early_stop=stops, **options)


def nested(stops: bool = True) -> Run:
    outer, inner = torchs(stops), torchs(stops)
    return lambda function, x: outer(lambda y: inner(function, y), x)


OFFLOADED = {"offload_inputs": True, "min_offload_size": 1}
CHECKPOINTS: dict[str, Callable[..., Run]] = {
    "torch": torchs,
    "torch, selective": partial(
        torchs, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
    ),
    "torch, nested": nested,
    "torch, reentrant": lambda stops=True: partial(checkpoint, use_reentrant=True),
    "ours": lambda stops=True: Recompute(FullACParams(early_stop=stops)),
    "ours, reentrant": lambda stops=True: Recompute(FullACParams(use_reentrant=True)),
    "ours, offloaded": lambda stops=True: Recompute(
        FullACParams(early_stop=stops, **OFFLOADED), CpuBackend()
    ),
    "ours, selective": lambda stops=True: Recompute(
        SelectiveOpACParams(save_ops_keys=[TANH, ADDMM], early_stop=stops)
    ),
}


def plainly(function: Function, x: Tensor) -> Tensor:
    return function(x)


def in_group(function: Function, x: Tensor) -> Tensor:
    return group(x, function)


# F53: a group inside a checkpoint does nothing, in forward and when the region runs again


PLACES = ("start", "middle", "end")


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hooks, "_warned", set())


def by_functions(function: Function, x: Tensor) -> Tensor:
    return sessions.by_functions(x, function)


def by_autograd_functions(function: Function, x: Tensor) -> Tensor:
    return sessions.by_autograd_functions(x, function)


def by_context(function: Function, x: Tensor) -> Tensor:
    with OffloadActivations(min_offload_size=1, backend=CpuBackend()):
        return function(x)


def behind_hooks(function: Function, x: Tensor) -> Tensor:
    """Hooks of somebody else pass what is saved on to those of a checkpoint."""
    pack, unpack = top_hooks(True) or (torch.detach, torch.detach)
    with saved_tensors_hooks(lambda t: pack(t), lambda t: unpack(t)):
        return in_group(function, x)


def body(x: Tensor, mark: Run = in_group, place: str = "middle") -> Tensor:
    """Three parts that save tensors of one shape, so that a wrong one is not noticed."""
    for name in PLACES:
        x = (mark if name == place else plainly)(lambda y: torch.tanh(y).sin() * y, 2 * x)
    return torch.tanh(x) if place != "end" else x


def leaf_of(manager: PipelineOffloadManager) -> Tensor:
    """The input of a step that begins."""
    begin_step()
    return make_inputs(1, device=manager.backend.device)[0].requires_grad_()


def assert_right(function: Function, x: Tensor, *, times: int = 1) -> None:
    """The gradient that ``x`` has is that of the function without offload."""
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    assert same_bits(gradients(x), [times * expected])


@pytest.mark.field("F53")
@pytest.mark.parametrize("backend", ["late"], indirect=True)
@pytest.mark.parametrize("stops", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_a_group_inside_a_checkpoint(
    manager: PipelineOffloadManager, way: str, stops: bool
) -> None:
    """Marked in any way; twice through one graph, and behind a look at a saved tensor."""
    run = CHECKPOINTS[way](stops)
    marks = in_group, by_functions, by_autograd_functions, by_context, behind_hooks
    for mark, place in product(marks, PLACES):
        x = leaf_of(manager)
        y = run(partial(body, mark=mark, place=place), x).exp()
        assert not all_packs()
        assert manager.statistics().bytes_offloaded == 0
        assert same_bits([y.grad_fn._saved_result], [y.detach()])
        is_twice = "selective" not in way  # which goes back once
        if is_twice:
            y.sum().backward(retain_graph=True)
        y.sum().backward()
        del y
        right = partial(body, mark=plainly, place=place)
        assert_right(lambda x, right=right: right(x).exp(), x, times=1 + is_twice)
        assert_idle(manager)


@pytest.mark.field("F53")
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_one_warning_for_each_name(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    """It names what to use instead. None where ``recompute_layers`` asked for the checkpoint."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
    recompute_layers(model, ["1"])
    with offload_modules(model, {"linear": "*.0"}):
        model(leaf_of(manager)).sum().backward()
    manager.reset()
    assert not caplog.records
    for run in (torchs(), partial(checkpoint, use_reentrant=True)):
        for name in ("a", "b"):
            run(partial(group, compute=torch.exp, name=name), leaf_of(manager)).sum().backward()
    torchs()(partial(by_context, torch.exp), leaf_of(manager)).sum().backward()
    manager.reset()
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 3
    messages = sorted(record.getMessage() for record in caplog.records)
    assert "OffloadActivations is inside a checkpoint" in messages[0]
    for message, name in zip(messages[1:], "ab", strict=True):
        assert f"group '{name}' is inside a checkpoint and does nothing" in message
        assert "pp_offload.checkpoint_wrapper(module, offload_inputs=True)" in message


# F12: what is recomputed is what was computed


def recompute_for(backend: Backend, **options: Any) -> Recompute:
    """Keeps the outputs of chosen operators, in the stash if they are to be offloaded."""
    return Recompute(SelectiveOpACParams(min_offload_size=1, **options), backend)


class Routed(nn.Module):
    """Two experts, one for each token; where both score the same, whoever is asked decides."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.whims: Iterator[float] = cycle([1e-6, -1e-6])

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.stack([x.mean(-1), x.mean(-1) + next(self.whims)], dim=-1)
        weight, chosen = scores.topk(1, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = torch.where(chosen == number, expert(x), y)
        return (y * weight.sigmoid()).square()


@pytest.mark.field("F12")
@pytest.mark.parametrize("backend", ["late"], indirect=True)
def test_what_is_recomputed_is_what_was_computed(active: Backend) -> None:
    """Routes do not flip; with PyTorch's checkpoints they do."""
    results = []
    recompute = recompute_for(active, offload_ops_keys=[TOPK])
    for run in (recompute, plainly, partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(1)
        model = Routed().to(active.device)
        x = torch.randn(6, 8).to(active.device).requires_grad_()
        run(model, x).square().sum().backward()
        results.append(gradients(x, *model.parameters()))
    assert same_bits(results[0], results[1])
    assert not same_bits(results[2], results[1])


# F38 and F39: what a checkpoint keeps, between forward and backward


def held_bytes(run: Run, chain: Callable[[Run, Tensor], Tensor], backend: Any) -> int:
    """Device bytes between forward and backward, but for what the caller has."""
    x = torch.ones(4, 8, requires_grad=True) * 1
    before = backend.device_bytes
    loss = chain(run, x)
    held = backend.device_bytes - before - loss.nbytes
    loss.backward()
    return int(held)


@pytest.mark.field("F38")
@pytest.mark.parametrize("keep_inputs", [True, False])
@pytest.mark.parametrize(
    ("where", "min_offload_size", "is_saved"),
    [("save_ops_keys", 1, True), ("offload_ops_keys", 1, False), ("offload_ops_keys", 129, True)],
)
def test_outputs_that_pass_no_hook_are_offloaded_or_counted(
    where: str, min_offload_size: int, is_saved: bool, keep_inputs: bool
) -> None:
    """Held per layer: its input but for the first, which is the caller's; its product if saved."""
    backend, nbytes = SimulatedBackend("eager"), 4 * 8 * 4
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(5)]

    def chain(run: Run, x: Tensor) -> Tensor:
        for layer in layers:
            x = run(layer, x)
        return x.sum()

    options = {"offload_inputs": not keep_inputs, "min_offload_size": min_offload_size}
    with backend.activate():
        recompute = Recompute(SelectiveOpACParams(**options, **{where: [ADDMM]}), backend)
        held_bytes(recompute, chain, backend)  # makes gradients
        held = held_bytes(recompute, chain, backend)
    counts, moved = recompute.counts, 2 * 5 * nbytes
    expected = (moved, 0) if is_saved else (0, moved)
    assert (counts.saved_bytes, counts.offloaded_bytes) == expected
    if min_offload_size == 1:
        assert held == (4 * nbytes if keep_inputs else 0) + (5 * nbytes if is_saved else 0)


ARGUMENTS: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "positional": lambda run, x: run(lambda x: x.sin().cos(), x),
    "by name": lambda run, x: run(lambda *, hidden: hidden.sin().cos(), hidden=x),
    "in a dict": lambda run, x: run(lambda inputs: inputs["h"].sin().cos(), {"h": x, "length": 3}),
    "twice": lambda run, x: run(lambda inputs, y: inputs["h"].sin() * y, {"h": x}, y=x),
}


@pytest.mark.field("F39")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", ARGUMENTS)
def test_arguments_are_offloaded_wherever_they_stand(way: str, use_reentrant: bool) -> None:
    """Each once, and between forward and backward the device has none of them."""

    def chain(run: Run, x: Tensor) -> Tensor:
        for _ in range(6):
            x = ARGUMENTS[way](run, x)
        return x.sum()

    params = FullACParams(use_reentrant=use_reentrant, **OFFLOADED)
    for backend in (SimulatedBackend("late"), SimulatedBackend("eager")):
        recompute = Recompute(params, backend)
        with backend.activate():
            (x,) = make_inputs(1)
            chain(recompute, x.requires_grad_()).backward()
            assert_right(partial(chain, lambda f, *args, **named: f(*args, **named)), x)
            assert recompute.stash.statistics().bytes_offloaded == 6 * x.nbytes
            held = held_bytes(recompute, chain, backend)
    assert held == 0


# F69: errors in checkpoints


def fails(x: Tensor) -> Tensor:
    raise ZeroDivisionError


FAILURES: dict[str, Function] = {
    "forward": fails,
    "recomputation": lambda x: fails(x) if is_in_backward() else x.sin(),
    "backward": lambda x: Raises.apply(x, ZeroDivisionError),
}


@pytest.mark.field("F69")
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("place", FAILURES)
@pytest.mark.parametrize("way", ["torch", "torch, reentrant", "ours", "ours, reentrant"])
@pytest.mark.parametrize("mark", [in_group, by_context])
def test_an_error_in_a_checkpoint_takes_no_hook_away(
    manager: PipelineOffloadManager, mark: Run, way: str, place: str
) -> None:
    """Nor when it is forgotten later."""
    run = CHECKPOINTS[way]()
    x = leaf_of(manager)
    with pytest.raises(ZeroDivisionError) as error:
        mark(partial(run, lambda x: run(FAILURES[place], x.sin())), x.sin()).sum().backward()
    assert_no_hooks()

    def forgets(x: Tensor) -> Tensor:
        nonlocal error
        before = top_pack()
        del error
        gc.collect()
        assert top_pack() is before, "the checkpoint that failed took the hooks of this one"
        return x.exp()

    x = leaf_of(manager)
    y = mark(partial(run, torch.exp), by_context(forgets, x.sin()).sin())
    y.sum().backward()
    del y
    assert_right(lambda x: x.sin().exp().sin().exp(), x)
    assert_idle(manager)


# F62: a layer that waits on the host comes as often with a checkpoint around it as without


AROUND: dict[str, Run] = {
    "none": plainly,
    "torch": torchs(),
    "torch, reentrant": partial(checkpoint, use_reentrant=True),
    "ours": pp_offload.checkpoint,
}
"""Called with a layer."""

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch's wrapper": torch_wrapper,
    "our wrapper, offloaded": partial(checkpoint_wrapper, **OFFLOADED),
}
"""In the place of a layer."""


def stack(way: str) -> Stack:
    """Six layers, each under a checkpoint."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(6)]
    return Stack(map(WRAPPERS.get(way, lambda layer: layer), layers), run=AROUND.get(way, plainly))


@pytest.mark.field("F62")
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("num_resident", [1, 4])
@pytest.mark.parametrize("way", [*AROUND, *WRAPPERS][1:])
def test_a_checkpoint_brings_no_layer_more_often(
    way: str, num_resident: int, is_frozen: bool
) -> None:
    """Two microbatches in flight, over two steps, with the same gradients."""

    def train(way: str) -> tuple[int, list[Tensor]]:
        backend = SimulatedBackend("late")
        with backend.activate():
            model = stack(way).requires_grad_(not is_frozen)
            handle = offload_layers(model, "layers", num_resident=num_resident, backend=backend)
            leaves = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
            for _ in range(2):
                losses = [model(leaf).square().sum() for leaf in leaves]
                while losses:
                    losses.pop().backward()
            assert handle.parameter_bytes_on_device == 0
            assert handle.peak_parameter_bytes_on_device <= num_resident * 2 * (8 + 1) * 8 * 4
            return handle.statistics().bytes_reloaded, gradients(*leaves, *model.parameters())

    nbytes, results = train(way)
    nbytes_without, results_without = train("none")
    assert nbytes <= nbytes_without
    assert same_bits(results, results_without)


# F63: calls without end, of which the last of each forward saves only what stays


def calls_of(product: str, layer: nn.Module) -> tuple[Function, Function]:
    """The two calls of a step, of which the second has a parameter as its input, which stays."""
    options = {"offload_inputs": True, "backend": CpuBackend()}
    if product == "wrapper":
        return checkpoint_wrapper(layer, **options), checkpoint_wrapper(nn.Tanh(), **options)
    context = OffloadActivations(backend=CpuBackend())
    runs: dict[str, Run] = {
        "context": lambda function, x: context(function)(x),
        "groups": in_group,
        "function": checkpoint_function(**options),
        "function, reentrant": checkpoint_function(use_reentrant=True, **options),
    }
    return partial(runs[product], layer), partial(runs[product], torch.sin)


def count_objects() -> Counter[type]:
    """Those of the package and of PyTorch, and the containers that they have."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    mine = ("pp_offload", "torch", "builtins")
    return Counter({k: n for k, n in kinds.items() if str(k.__module__).partition(".")[0] in mine})


@pytest.mark.field("F63")
@pytest.mark.parametrize(
    "product", ["function", "function, reentrant", "wrapper", "context", "groups"]
)
def test_nothing_grows_with_each_call(product: str) -> None:
    """After 300 calls, in steps of two, there are as many objects as after 60."""
    torch.manual_seed(1)
    scale = nn.Parameter(torch.randn(1024))
    with session(CpuBackend()):
        first, last = calls_of(product, nn.Sequential(nn.Linear(16, 16), nn.Tanh()))

        def steps(num: int) -> None:
            for _ in range(num):
                begin_step()
                x = torch.randn(64, 16, requires_grad=True)
                (first(x).sum() * last(scale).sum()).backward()

        steps(30)
        count_objects()  # which itself fills caches of abc at first
        before = count_objects()
        steps(120)
        grown = {kind: num for kind, num in (count_objects() - before).items() if num > 50}
        assert not grown


# F65: other tensors in the places of parameters, for a forward


@pytest.mark.field("F65")
@pytest.mark.covering(2)
@pytest.mark.parametrize("make", [torch.clone, nn.Parameter], ids=["tensors", "parameters"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", [way for way in CHECKPOINTS if way.startswith("ours")])
def test_a_functional_call_computes_again_with_what_it_was_given(
    way: str, is_frozen: bool, make: Callable[[Tensor], Tensor]
) -> None:
    """The model's own parameters stand there when backward comes."""

    def run_with(run: Run) -> list[Tensor]:
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model = Stack([block], run=run)
        parameters = {
            name: make(2 * p.detach()).requires_grad_(not is_frozen)
            for name, p in model.named_parameters()
        }
        buffers = {name: buffer + 1 for name, buffer in model.named_buffers()}
        x = torch.randn(6, 8, requires_grad=True)
        y = functional_call(model, {**parameters, **buffers}, x)
        own = {name: id(p) for name, p in model.named_parameters()}
        y.square().sum().backward()
        assert own == {name: id(p) for name, p in model.named_parameters()}
        assert all(p.grad is None for p in model.parameters())
        return [*gradients(x, *([] if is_frozen else parameters.values())), *buffers.values()]

    assert same_bits(run_with(CHECKPOINTS[way]()), run_with(plainly))


@pytest.mark.field("F65")
def test_given_tensors_that_are_gone() -> None:
    model = Stack([nn.Linear(8, 8)], run=Recompute(FullACParams()))
    x = torch.randn(6, 8, requires_grad=True)
    y = functional_call(model, {"layers.0.weight": torch.ones(8, 8)}, x)
    with pytest.raises(OffloadError, match="'weight' of a Linear is another .*keep the tensors"):
        y.sum().backward()


# F66: autocast, whose cache decides which casts run


@pytest.mark.field("F66")
@pytest.mark.covering(2)
@pytest.mark.parametrize("ops", [[ADDMM], [CAST], [CAST, ADDMM]], ids=lambda ops: "+".join(ops))
@pytest.mark.parametrize("option", ["save_ops_keys", "offload_ops_keys"])
@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold cache", "warm cache"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["backward behind", "backward inside"])
def test_by_operator_under_the_cache_of_autocast(
    option: str, ops: list[str], num_forwards: int, is_warm: bool, is_inside: bool
) -> None:
    """Forwards in one ``autocast``, whose weights another forward may have cast before."""

    def run_with(run: Run) -> list[Tensor]:
        torch.manual_seed(1)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(num_forwards)]

        def layers(x: Tensor) -> Tensor:
            return torch.tanh(second(torch.tanh(first(x)).float()).float())

        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            warm = [first(torch.ones(4, 4)).float().sum()] if is_warm else []
            losses = [run(layers, x).square().sum() for x in leaves] + warm
            if not is_inside:
                stack.close()
            for loss in losses:
                loss.backward()
        return gradients(*leaves, *first.parameters(), *second.parameters())

    run = recompute_for(CpuBackend(), **{option: ops})
    assert same_bits(run_with(run), run_with(plainly))
    assert run.counts.recomputed_calls == num_forwards


@pytest.mark.field("F66")
def test_without_a_cache_casts_are_kept() -> None:
    run = recompute_for(CpuBackend(), save_ops_keys=[CAST])
    for context in (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.enable_grad(),
    ):
        before = run.counts.saved_outputs
        with context:
            y = run(lambda x: nn.Linear(4, 4)(x.double().float()), torch.ones(4, 4)).sum()
        y.backward()
        assert run.counts.saved_outputs > before
