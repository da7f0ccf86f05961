"""An interrupt leaves autograd's stack of hooks at once as it was, and parameters where they were.

The stack is looked at where the exception has reached the loop, while it is still handled and
keeps all frames alive. Interrupts come from a trace function, at each line of this package's files
that run hooks, or that put tensors on the device in the places of parameters. Were one left there,
an optimizer would change parameters that no forward uses any more, and nothing would say so.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from operator import is_
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.injected import Injected, chosen, files, interrupt_at, points_in
from helpers.products import PRODUCTS, Product
from helpers.sessions import (
    assert_no_hooks,
    begin_step,
    by_functions,
    gradients,
    group,
    make_backend,
    session,
)
from helpers.sliced import WIDTH, Inside, as_layers, as_slices, run_again
from helpers.toy import make_inputs, same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    FullACParams,
    GroupStateError,
    OffloadActivations,
    OffloadError,
    PipelineOffloadManager,
    offload_modules,
)
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._core.saved import Resident
from pp_offload._hooks import HookScope, all_packs, top_pack
from pp_offload.activations import _seeing
from pp_offload.backends import Backend, CpuBackend

Run = Callable[[nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    """Runs its part as ``run`` says."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self.part, x.sin()).exp().tanh()


def in_context(offload: OffloadActivations, part: nn.Module, x: Tensor) -> Tensor:
    with offload:
        return part(x)


RUNS: dict[str, Callable[[], Run]] = {
    "interface": lambda: (
        lambda part, x: group(x, lambda x: group(x, part, name="inner").sin(), name="outer")
    ),
    "manager": lambda: lambda part, x: by_functions(x, part),
    "modules": lambda: nn.Module.__call__,
    "activations": lambda: partial(
        in_context,
        OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=CpuBackend()),
    ),
    "checkpoint": lambda: Recompute(
        FullACParams(offload_inputs=True, min_offload_size=1), CpuBackend()
    ),
    "group around a checkpoint": lambda: (
        lambda part, x: group(x, partial(checkpoint, part, use_reentrant=False), name="around")
    ),
}
ON_THE_HOST: dict[str, Callable[[nn.Sequential, Backend], Any]] = {
    "slices": partial(as_slices, num_slices=2),
    "slices, run again": partial(run_again, num_slices=2),
    "layers": as_layers,
}
"""Where parameters wait."""

HOST_CASES = [(way, kind, kind == "late") for way in ON_THE_HOST for kind in ("cpu", "late")]
CASES = [
    *((way, "cpu", bool(number % 2), 1) for number, way in enumerate(RUNS)),
    *((*case, 4) for case in HOST_CASES),
    *(pytest.param(*case, 1, marks=pytest.mark.exhaustive) for case in HOST_CASES),
]
"""Ways, their device, whether somebody else has hooks around, and of so many lines one is hit."""


def make(way: str, backend: Backend) -> nn.Module:
    torch.manual_seed(1)
    if way in RUNS:
        run = RUNS[way]()
        return nn.Sequential(Layer(run), Layer(run))
    layers = nn.Sequential(Inside(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layers[1].weight = layers[0].weight
    model: nn.Module = ON_THE_HOST[way](layers, backend)[0]
    return model


CHECKPOINT = "_gradient_checkpointing_func"


def exchanged(model: nn.Module) -> list[Any]:
    """Whatever may be exchanged: parameters, and functions that checkpoint."""
    values = [parameter for module in model.modules() for parameter in module._parameters.values()]
    return values + [vars(m)[CHECKPOINT] for m in model.modules() if CHECKPOINT in vars(m)]


@pytest.fixture(autouse=True)
def hooks_of_this_test_only() -> Iterator[None]:
    assert all_packs() == []
    yield
    while all_packs():
        torch._C._autograd._pop_saved_tensors_default_hooks()


FILES = files(
    *("_hooks", "_megatron/interface", "_megatron/manager"),
    *("activations", "_checkpoint/recompute", "modules", "offload_model", "_slices/*"),
)


@pytest.mark.parametrize(("way", "kind", "has_others", "every"), CASES)
def test_an_interrupt_at_each_line(way: str, kind: str, has_others: bool, every: int) -> None:
    backend = make_backend(kind)

    def forward() -> Tensor:
        begin_step()
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(backend.device).requires_grad_()
        return model(x).square().sum()

    def step() -> list[Tensor]:
        loss = forward()
        return [loss.detach(), *torch.autograd.grad(loss, model.parameters())]

    theirs = saved_tensors_hooks(lambda x: x.detach(), lambda x: x) if has_others else nullcontext()
    groups = {"layer": "*", "part": "*.part"}
    with session(backend):
        model = make(way, backend)
        handle = offload_modules(model, groups) if way == "modules" else None
        expected = step()
        wrong = []
        with theirs:
            before, own = all_packs(), exchanged(model)
            points = chosen(points_in(FILES, forward), every=every)
            for point in points:
                try:
                    with interrupt_at(point.number, FILES):
                        forward()
                except Injected:
                    if all_packs() != before:
                        wrong.append(str(point))
                        while len(all_packs()) > len(before):
                            torch._C._autograd._pop_saved_tensors_default_hooks()
                assert all(map(is_, exchanged(model), own)), f"something else is there: {point}"
                assert same_bits(step(), expected), str(point)
        assert len(points) > 10 and not wrong, wrong
        assert same_bits(step(), expected)
        assert not _seeing, "modules are met for a context that nobody is in, which it keeps alive"
        del handle


# Scopes


def test_a_scope_takes_off_what_is_above_it_and_no_hooks_of_others() -> None:
    outer, inner = HookScope(), HookScope()
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        top = top_pack()
        outer.enter(partial(Resident), outer)
        inner.enter(partial(Resident), inner)
        for scope in (outer, inner, outer):
            scope.leave()
            assert top_pack() is top
        outer.enter(partial(Resident), outer)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        outer.leave()
        assert top_pack() is top
    assert_no_hooks()


@on_two_backends
def test_what_was_entered_is_left_once(
    manager: PipelineOffloadManager, activations: OffloadActivations
) -> None:
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, torch.ones(3), "twice"):
        pass
    scope = off_interface(True, torch.ones(3), "twice")
    with scope, pytest.raises(GroupStateError, match="'twice' is entered again.*one object"):
        scope.__enter__()
    with pytest.raises(GroupStateError, match="did not enter.*with statement"):
        manager.__exit__(None, None, None)
    with pytest.raises(OffloadError, match="did not enter.*with statement"):
        activations.__exit__(None, None, None)
    assert_no_hooks()


# A copy of a weight that layers save with every microbatch is no activation, and stays
#
# The modules of Transformer Engine here are stand-ins: they have the names that its layers and its
# two generations of offload use, and compute on the CPU.

ROWS, LAYERS, MICROBATCHES = 16, 2, 2
INPUT_BYTES = ROWS * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH


class Library(ModuleType):
    """Its own offload has a switch; while that is on, it flags what belongs to a weight."""

    def __init__(self, switch: str, off: object, flag: str) -> None:
        super().__init__("transformer_engine.pytorch.cpu_offload")
        self.switch, self.flag = switch, flag
        setattr(self, switch, off)

    def is_on(self) -> bool:
        return bool(getattr(self, self.switch))


LIBRARIES = {
    "version 1.x": ("CPUOffloadEnabled", False, "weight_offloading"),
    "as of version 2.10": ("OFFLOAD_SYNCHRONIZER", None, "_TE_do_not_offload"),
    "unknown": ("another_switch", False, "another_flag"),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = Library(*LIBRARIES[request.param])
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    assert not module.is_on(), "the switch is as it was"


class Quantized(torch.autograd.Function):
    """A linear layer that computes with a copy of the weight of eight bits, and saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, copy: Tensor, library: Any) -> Tensor:
        if library.is_on():
            setattr(copy, library.flag, True)
        ctx.save_for_backward(x, copy)
        return x @ copy.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, copy = ctx.saved_tensors
        return grads[0] @ copy.float().T, x.T @ grads[0], None, None


class Linear(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        quantized = self.weight.detach().clamp(-1, 1) * 127
        self.workspaces = [quantized.to(torch.int8)]  # neither a parameter nor a buffer
        self.library = library

    def forward(self, x: Tensor) -> Tensor:
        return Quantized.apply(x, self.weight, self.workspaces[0], self.library)


def train(library: Any, product: Any) -> tuple[list[Tensor], list[int]]:
    """Gradients, and the bytes that each step offloads."""
    device = product.backend.device
    with device:
        torch.manual_seed(0)
        layers = [nn.Sequential(OrderedDict(mlp=Linear(library))) for _ in range(LAYERS)]
        net = nn.Sequential(OrderedDict(layers=nn.Sequential(*layers)))  # as products ask for
    net = product.inside(net)
    product.outside(net)
    moved = [0]
    for step in range(3):
        product.begin_step()
        losses = []
        for x in make_inputs(MICROBATCHES, step=step, length=ROWS, width=WIDTH, device=device):
            with product.forward():
                losses.append(net(x.requires_grad_()).sum())
        while losses:
            losses.pop().backward()
        statistics = product.statistics()
        moved.append(statistics.bytes_offloaded if statistics else 0)
    steps = [after - before for before, after in zip(moved, moved[1:], strict=False)]
    return gradients(*net.parameters()), steps


@on_two_backends
@pytest.mark.parametrize("name", ["context", "groups", "markers"])
def test_a_copy_of_a_weight_stays(name: str, library: Any, manager: Any, backend: Backend) -> None:
    expected, _ = train(library, Product(backend))
    grads, steps = train(library, PRODUCTS[name](backend))
    assert same_bits(grads, expected)
    first = LAYERS * MICROBATCHES * INPUT_BYTES
    later = first if name == "context" else first - INPUT_BYTES  # the last group stays
    if library.flag == "another_flag":  # the second microbatch shows that it is no activation
        first += LAYERS * WEIGHT_BYTES * MICROBATCHES
    assert steps == [first, later, later]


@on_two_backends
def test_the_switch_is_restored_after_an_exception(
    library: Any, manager: Any, backend: Backend
) -> None:
    offload = PRODUCTS["context"](backend).forward()
    with suppress(RuntimeError), offload, offload:
        assert library.is_on() is (library.flag != "another_flag")
        raise RuntimeError
    assert not library.is_on()
    off, theirs = getattr(library, library.switch), object()
    setattr(library, library.switch, theirs)
    with offload:
        pass
    assert getattr(library, library.switch) is theirs
    setattr(library, library.switch, off)
