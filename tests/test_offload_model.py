"""A model whose parameters stay on the host trains as one whose parameters are on the device."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import sliced
import torch
from conftest import BACKENDS, NO_SPARSE, make_backend, skip_on_emulated
from quick import chosen
from sliced import (
    MODELS,
    ORDERS,
    REPEATED,
    ROWS,
    WIDTH,
    adamw,
    first_in_first_out,
    inputs_for,
    mlp,
    norms,
    one_by_one,
    pair,
    sgd,
    state,
    together,
    train,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx.passes.split_module import split_module
from toy import assert_no_hooks, autograd_lets_go, moved, same_bits

from pp_offload import (
    OffloadActivations,
    OffloadConfig,
    OffloadError,
    SavedTensorModifiedError,
    VerifyError,
)
from pp_offload.backends import CpuBackend
from pp_offload.offload_model import OffloadModel
from pp_offload.testing import SimulatedBackend


def name(one) -> str:
    return getattr(one, "__name__", str(one))


def cases() -> Iterator[Any]:
    """On the host some have every pair of parameters; the others are exhaustive."""
    every = list(all_cases())
    names = "kind", "make", "again", "order"
    on_host = [index for index, (_, _, marks) in enumerate(every) if not marks]
    values = [dict(zip(names, map(name, every[index][0]), strict=True)) for index in on_host]
    quick = {on_host[index] for index in chosen(values, 2)}
    for index, (one, words, marks) in enumerate(every):
        if index in on_host and index not in quick:
            marks = pytest.mark.exhaustive
        yield pytest.param(*one, id="-".join(words), marks=marks)


def all_cases() -> Iterator[tuple[tuple[Any, ...], list[str], tuple[Any, ...]]]:
    """All orders on two backends; on the others one for each model, in turn."""
    for kind, (number, make), again in product(BACKENDS, enumerate(MODELS), [False, True]):
        is_whole = kind in ("cpu threads", "late")
        turn = ORDERS[(number + again) % len(ORDERS)]
        for order in ORDERS if is_whole else [turn]:
            one, marks = (kind, ()) if isinstance(kind, str) else (kind.values[0], kind.marks)
            words = [one, name(make), name(order), "again" * again]
            yield (one, make, again, order), words, tuple(marks)


@pytest.mark.parametrize(("kind", "make", "again", "order"), list(cases()))
def test_equal_bit_for_bit(kind: str, make, again: bool, order) -> None:
    if order is together and make in REPEATED:
        pytest.skip("sums in another order, see below")
    with pair(make, kind, checkpoint_activation=again) as (plain, model):
        assert same_bits(train(model, order, sgd), train(plain, order, sgd))
        assert model.parameter_bytes_on_device == 0
        if again:
            gc.collect()
            statistics = model._recompute.stash.statistics()
            assert statistics.bytes_offloaded > 0
            assert statistics.live_tensors == statistics.host_bytes_in_use == 0
        assert_no_hooks()


@pytest.mark.parametrize("make", REPEATED, ids=name)
def test_sums_in_another_order_are_close(make) -> None:
    with pair(make, "late") as (plain, model):
        got, expected = train(model, together, sgd, steps=1), train(plain, together, sgd, steps=1)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=name)
@pytest.mark.parametrize("num_slices", [1, 2, 7])
@pytest.mark.parametrize("kind", BACKENDS)
def test_optimizers_and_dtypes(kind: str, num_slices: int, optimizer, dtype: torch.dtype) -> None:
    with pair(norms, kind, dtype, num_slices=num_slices) as (plain, model):
        got = train(model, first_in_first_out, optimizer, dtype=dtype)
        assert same_bits(got, train(plain, first_in_first_out, optimizer, dtype=dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("make", [sliced.mlp, sliced.named, sliced.images, sliced.frozen], ids=name)
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("kind", BACKENDS)
def test_microbatches(kind: str, num: int, make, again: bool) -> None:
    options = {"checkpoint_activation": again, "num_microbatches": num}
    with pair(make, kind, **options) as (plain, model):

        def in_parts(x: Tensor) -> Tensor:
            return torch.cat([plain(part) for part in x.chunk(num)])

        expected = train(plain, one_by_one, sgd, call=in_parts)
        assert same_bits(train(model, one_by_one, sgd), expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("make", [sliced.mlp, sliced.named, sliced.images], ids=name)
@pytest.mark.parametrize("last", [7, 5, 3, 1, 0])
@pytest.mark.parametrize("kind", BACKENDS)
def test_the_last_batch_of_an_epoch_may_be_smaller(kind: str, last: int, make, again: bool) -> None:
    """As torch.chunk cuts it: 7 are 2 + 2 + 2 + 1, 5 are 2 + 2 + 1, and of 3 each is alone."""
    with pair(make, kind, checkpoint_activation=again, num_microbatches=4) as (plain, model):

        def in_parts(x: Tensor) -> Tensor:
            return torch.cat([plain(part) for part in x.chunk(4)])

        results = []
        for one, call in ((plain, in_parts), (model, model)):
            optimizer = sgd(one.parameters())
            found = []
            for _epoch, rows in product(range(2), (8, last)):
                (whole,) = inputs_for(one, 1)
                x = whole.detach()[:rows].requires_grad_()
                output = call(x)
                output.square().sum().backward()
                found += [output.detach().cpu(), x.grad.cpu(), *state(one)]
                optimizer.step()
                optimizer.zero_grad()
            results.append(found)
        assert same_bits(*results)


@pytest.mark.parametrize(("rows", "expected"), [(8, [2] * 4), (7, [2, 2, 2, 1]), (5, [2, 2, 1])])
def test_what_has_no_batch_goes_to_every_microbatch(rows: int, expected: list[int]) -> None:
    seen: list[tuple[int, float, str]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, word: str) -> Tensor:
            seen.append((len(x), scale.item(), word))
            return x

    model = OffloadModel(nn.Sequential(Looks()), "cpu", num_slices=1, num_microbatches=4)
    x = torch.arange(float(rows))
    assert torch.equal(model(x, torch.tensor(3.0), "a"), x)
    assert seen == [(one, 3.0, "a") for one in expected]


@pytest.mark.covering(2)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("make", MODELS, ids=name)
@pytest.mark.parametrize("kind", BACKENDS)
def test_gradients_of_gradients(kind: str, make, again: bool) -> None:
    if make is sliced.inner and kind in ("cuda", "emulated"):
        pytest.skip("two threads make its nodes: the plain model sums in an order that varies")
    if make in (sliced.images, sliced.waves):
        skip_on_emulated(
            make_backend(kind), "the plain model's bits there are not the host's, or vary"
        )
    with pair(make, kind, checkpoint_activation=again) as (plain, model):
        results = [twice_derived(one, one) for one in (plain, model)]
        assert same_bits(*results)


def twice_derived(model: nn.Module, call) -> list[Tensor]:
    """First and second derivatives. Of the plain model all is on the device: a copy to the host in
    between would let autograd's two threads race in it.
    """
    torch.manual_seed(0)
    (x,) = inputs_for(model, 1)
    loss = call(x).square().mean()
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [x, *wanted], create_graph=True, allow_unused=True)
    first = [g for g in found if g is not None]
    sum(g.abs().square().sum().to(x.device) for g in first).backward()
    return [x.grad.cpu(), *(g.detach().cpu() for g in first), *state(model)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("kind", BACKENDS)
def test_gradients_of_gradients_of_microbatches(kind: str, num: int, again: bool) -> None:
    options = {"checkpoint_activation": again, "num_microbatches": num}
    with pair(mlp, kind, **options) as (plain, model):
        expected = twice_derived(plain, lambda x: torch.cat([plain(part) for part in x.chunk(num)]))
        for _ in range(5):  # threads that race seldom lose each time
            assert same_bits(twice_derived(model, model), expected)
            model.zero_grad()


def test_a_slice_with_a_graph_of_its_gradients_leaves_nothing(backend) -> None:
    """Neither where the parameters' gradients are not asked for, nor where the backward fails."""
    with backend.activate():
        model = OffloadModel(mlp(), backend.device, backend=backend)
        for where in ("", "backward"):
            (x,) = inputs_for(model, 1)
            h = x * 1
            storage = weakref.ref(h.untyped_storage())
            y = model(h)
            if where:
                x.register_hook(Fails(where)._fail)
                with pytest.raises(KeyError):
                    torch.autograd.grad(y.sum(), [x, *model.parameters()], create_graph=True)
            else:
                torch.autograd.grad(y.sum(), x, create_graph=True)
            del h, y, x
            torch.ones(1, requires_grad=True).sum().backward()  # or nodes that did not run wait
            autograd_lets_go()
            gc.collect()  # an exception has frames, which have it
            assert storage() is None, f"there is no cycle through autograd {where}"
            assert model.parameter_bytes_on_device == 0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_inside_other_hooks(backend, again: bool) -> None:
    """What is no parameter goes to OffloadActivations, as that of the plain model does."""
    with backend.activate():
        plain = mlp().to(backend.device)
        model = OffloadModel(
            copy.deepcopy(plain), backend.device, backend=backend, checkpoint_activation=again
        )
        outer = OffloadActivations(
            min_offload_size=1,
            max_fwd_stash_size=2,
            config=OffloadConfig(device_limit_bytes=None),
            backend=backend,
        )

        def call(x: Tensor) -> Tensor:
            with outer:
                return model(x)

        assert same_bits(train(model, one_by_one, sgd, call=call), train(plain, one_by_one, sgd))
        gc.collect()
        assert outer.statistics().live_tensors == 0
        # Of 6 layers what Tanh gave, and all inputs but the leaf and what Tanh gave before.
        activation = ROWS * WIDTH * 4
        moved = 0 if again else (6 - 1) * activation
        assert outer.statistics().bytes_offloaded >= 9 * moved
        assert outer.statistics().bytes_offloaded % activation == 0, "no parameter is among them"


def test_each_forward_is_a_microbatch_of_its_own() -> None:
    model = OffloadModel(mlp(), "cpu", checkpoint_activation=True)
    outputs = [model(x) for x in inputs_for(model, 3)]
    assert len(model._recompute.stash._step._forward) == 3
    del outputs


def test_inside_a_checkpoint(backend) -> None:
    with backend.activate():
        plain = norms().to(backend.device)
        model = OffloadModel(copy.deepcopy(plain), backend.device, backend=backend)
        for step in range(2):
            results = []
            for one in (plain, model):
                torch.manual_seed(step)
                (x,) = inputs_for(one, 1, step)
                torch.utils.checkpoint.checkpoint(one, x, use_reentrant=False).sum().backward()
                results.append([x.grad.cpu(), *state(one)])
            assert same_bits(*results)


@pytest.mark.covering(2)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("num", [1, 2])
def test_autocast(backend, num: int, again: bool) -> None:
    """With several microbatches, as without autocast's cache of casts."""
    with backend.activate():
        plain = mlp().to(backend.device)
        model = OffloadModel(
            copy.deepcopy(plain),
            backend.device,
            backend=backend,
            num_microbatches=num,
            checkpoint_activation=again,
        )

        def under(call, x: Tensor) -> Tensor:
            kind = backend.device.type
            with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=num == 1):
                return call(x)

        def in_parts(x: Tensor) -> Tensor:
            return torch.cat([plain(part) for part in x.chunk(num)])

        got = train(model, one_by_one, sgd, call=lambda x: under(model, x))
        assert same_bits(got, train(plain, one_by_one, sgd, call=lambda x: under(in_parts, x)))
        assert got[0].dtype == torch.bfloat16


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("kind", BACKENDS)
def test_two_models_in_turn(kind: str, is_shared: bool) -> None:
    backend = make_backend(kind)
    with backend.activate():
        others = [backend, backend if is_shared else CpuBackend()]
        if kind in ("cuda", "emulated") and not is_shared:
            pytest.skip("one device")
        plain = [mlp().to(backend.device), norms().to(backend.device)]
        models = [
            OffloadModel(copy.deepcopy(one), backend.device, backend=other)
            for one, other in zip(plain, others, strict=True)
        ]
        results = []
        for first, second in (plain, models):
            torch.manual_seed(5)
            x, y = inputs_for(first, 2)
            losses = [second(first(x)).sum(), first(second(y)).square().sum(), second(x).mean()]
            for index in (1, 0, 2):
                losses[index].backward()
            results.append([x.grad, y.grad, *state(first), *state(second)])
        assert same_bits(*results)


def slices_of(width: int = 16, depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def test_forward_and_backward_have_two_slices_on_the_device(backend) -> None:
    """While a layer computes, the slice that comes next is on its way."""
    with backend.activate():
        model = OffloadModel(slices_of(), backend.device, backend=backend, num_slices=3)
        one = 2 * 16 * 16 * 4
        seen: list[int] = []
        for layer in model.children():
            layer.register_forward_hook(lambda *_: seen.append(model.parameter_bytes_on_device))
            layer.register_full_backward_hook(
                lambda *_: seen.append(model.parameter_bytes_on_device)
            )
        x = torch.randn(4, 16).to(backend.device).requires_grad_()
        y = model(x)
        assert seen == [2 * one] * 4 + [one] * 2
        assert model.parameter_bytes_on_device == one, "the last stays, for it comes first"
        del seen[:]
        y.sum().backward()
        assert seen == [2 * one] * 4 + [one, 0], "the hook of the first runs when it is done"
        assert model.parameter_bytes_on_device == 0
        assert model.peak_parameter_bytes_on_device == 2 * one
        moved = model.statistics()
        assert moved.bytes_reloaded == 3 * one + 2 * one
        assert moved.bytes_offloaded == 3 * one
        assert moved.bytes_in_flight == 0


def test_backward_brings_only_what_it_asks_for(backend) -> None:
    """Inputs want no gradient, so the first weight is not saved; the frozen slice only is read."""
    with backend.activate():
        model = OffloadModel(slices_of(), backend.device, backend=backend, num_slices=6)
        one = 16 * 16 * 4
        list(model.parameters())[3].requires_grad_(False)
        model(torch.randn(4, 16).to(backend.device)).sum().backward()
        assert model.statistics().bytes_reloaded == 6 * one + 4 * one
        assert model.statistics().bytes_offloaded == 5 * one


@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_device_memory_is_arithmetic(order: str) -> None:
    """Two slices and a slice of gradients, whatever the depth; activations as without."""
    backend = SimulatedBackend(order)
    depth, width, rows = 12, 16, 4
    weight, activation = width * width * 4, rows * width * 4
    with backend.activate():
        model = OffloadModel(slices_of(width, depth), "cpu", backend=backend, num_slices=6)
        one = 2 * weight
        gc.collect()
        assert backend.device_bytes == 0, "all is on the host"
        for _ in range(3):
            x = torch.randn(rows, width, requires_grad=True)
            backend.take_device_peak()
            y = model(x)
            # In the slice before the last: x, and what each layer so far has given.
            assert backend.take_device_peak() == 2 * one + (1 + depth - 2) * activation
            assert backend.device_bytes == one + (1 + depth) * activation
            gradient = torch.ones_like(y)
            y.backward(gradient)
            # In the first layer of the last slice: x, what the layers before have given, y; the
            # gradients of y and of both layers' inputs; the gradients of both weights.
            inside = 1 + (depth - 2) + 1 + 1 + 2
            assert backend.take_device_peak() == 3 * one + inside * activation
            assert backend.device_bytes == 4 * activation, "x, y, and their gradients"
            del x, y, gradient
            assert backend.device_bytes == 0
    backend.check()


def test_device_memory_when_run_again_is_arithmetic() -> None:
    backend = SimulatedBackend("eager")
    depth, width, rows = 12, 16, 16
    weight, activation = width * width * 4, rows * width * 4
    with backend.activate():
        model = OffloadModel(
            slices_of(width, depth),
            "cpu",
            backend=backend,
            num_slices=6,
            checkpoint_activation=True,
            config=OffloadConfig(prefetch_bytes=activation),
        )
        one = 2 * weight
        for _ in range(3):
            x = torch.randn(rows, width, requires_grad=True)
            backend.take_device_peak()
            y = model(x)
            # x; what goes into a slice, and what its layers give.
            assert backend.take_device_peak() == 2 * one + (1 + 3) * activation
            assert backend.device_bytes == one + 2 * activation, "x and y"
            gradient = torch.ones_like(y)
            y.backward(gradient)
            # In the first layer of the last slice: x and y; the inputs of this slice and of the one
            # before; the gradients of y and of both layers' inputs; the gradients of both weights.
            assert backend.take_device_peak() == 3 * one + (2 + 2 + 3) * activation
            del x, y, gradient
            assert backend.device_bytes == 0
    backend.check()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=name)
def test_without_gradients_nothing_stays(backend, mode) -> None:
    if mode is torch.inference_mode:
        skip_on_emulated(backend, "a linear layer of it fails in inference mode, in any model")
    with backend.activate():
        plain = norms().eval().to(backend.device)
        model = OffloadModel(copy.deepcopy(plain), backend.device, backend=backend)
        (x,) = inputs_for(model, 1)
        with mode():
            y = model(x)
            assert torch.equal(y, plain(x))
        assert not y.requires_grad
        assert model.parameter_bytes_on_device == 0
        model(x.detach()).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_state_is_that_of_the_plain_model(backend, tmp_path) -> None:
    with backend.activate():
        plain = sliced.named()
        model = OffloadModel(copy.deepcopy(plain), backend.device, backend=backend)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert all(p.is_leaf and p.device.type == "cpu" for p in model.parameters())
        for one in (plain, model):
            train(one.to("cpu") if one is plain else one, one_by_one, sgd, steps=1)
        torch.save(model.state_dict(), tmp_path / "state")
        fresh = sliced.named()
        fresh.load_state_dict(torch.load(tmp_path / "state"))
        assert same_bits(list(fresh.state_dict().values()), list(model.state_dict().values()))


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_state_is_computed_with(backend, assign: bool) -> None:
    with backend.activate():
        model = OffloadModel(mlp(), backend.device, backend=backend)
        other = mlp()
        (x,) = inputs_for(model, 1)
        model(x).sum().backward()
        model.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(model(x), other.to(backend.device)(x))


def test_writes_through_data_are_seen_by_the_next_forward(backend) -> None:
    with backend.activate():
        model = OffloadModel(mlp(), backend.device, backend=backend, num_slices=1)
        (x,) = inputs_for(model, 1)
        before = model(x)
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        assert not torch.equal(model(x), before)
        expected = model(x)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("layer", [1, 3, 5])
def test_a_parameter_changed_before_backward_is_an_error(backend, layer: int, again: bool) -> None:
    with backend.activate():
        model = OffloadModel(mlp(), backend.device, backend=backend, checkpoint_activation=again)
        (x,) = inputs_for(model, 1)
        y = model(x).sum()
        with torch.no_grad():
            model.get_submodule(f"{layer}.0").weight.add_(1)
        with pytest.raises(SavedTensorModifiedError, match=f"'slice {layer // 2}' is at version"):
            y.backward()
        expected = copy.deepcopy(nn.Sequential(*model.children())).to(backend.device)
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()
        expected(x.detach()).sum().backward()
        wanted = [p.grad.cpu() for p in expected.parameters() if p.grad is not None]
        assert not wanted or same_bits([p.grad for p in model.parameters()], wanted)


class Fails(nn.Module):
    """Raises forward or backward, when told to."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyError("forward")
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._fail)
        return x * 1

    def _fail(self, gradient: Tensor) -> None:
        raise KeyError("backward")


@pytest.mark.covering(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_step_that_fails_leaves_nothing_to_the_next(kind: str, again: bool, where: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*mlp(3), Fails(), *mlp(3))

    with pair(make, kind, checkpoint_activation=again) as (plain, model):
        for step in range(2):
            (x,) = inputs_for(model, 1)
            model.get_submodule("3").where = where
            with pytest.raises(KeyError) as failure:  # it has the frames, and what they hold
                loss = model(x).sum()
                loss.backward()
            model.get_submodule("3").where = ""
            assert_no_hooks()
            autograd_lets_go()
            assert model.parameter_bytes_on_device == 0
            with torch.no_grad():  # no copy is under way that would be disturbed
                for parameter in (*model.parameters(), *plain.parameters()):
                    parameter.mul_(1.1)
            del failure
            model.zero_grad()
            plain.zero_grad()
            assert same_bits(
                train(model, first_in_first_out, sgd, steps=1),
                train(plain, first_in_first_out, sgd, steps=1),
            ), step
            assert model.parameter_bytes_on_device == 0
            assert model.statistics().bytes_in_flight == 0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_a_backward_that_stops_early_leaves_nothing_under_way(backend, again: bool) -> None:
    """What it foresaw is not asked for; the program may write it."""
    with backend.activate():
        model = OffloadModel(
            mlp(), backend.device, backend=backend, num_slices=6, checkpoint_activation=again
        )
        (x,) = inputs_for(model, 1)
        loss = model(x).sum()
        last = model.get_parameter("4.0.weight")
        (found,) = torch.autograd.grad(loss, last, retain_graph=True)
        assert model.parameter_bytes_on_device == 0
        with torch.no_grad():
            model.get_parameter("3.0.weight").mul_(2)
        assert found.abs().sum() > 0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_a_graph_that_is_dropped_leaves_nothing(backend, again: bool) -> None:
    with backend.activate():
        model = OffloadModel(mlp(), backend.device, backend=backend, checkpoint_activation=again)
        (x,) = inputs_for(model, 1)
        h = x * 1
        storage = weakref.ref(h.untyped_storage())
        y = model(h)
        del h, x
        assert storage() is not None or again
        assert model.parameter_bytes_on_device > 0
        del y
        if again:  # what went into slices may still be on its way to the host
            backend.synchronize()
            model._recompute.stash.statistics()
        assert storage() is None, "there is no cycle"
        assert model.parameter_bytes_on_device == 0
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None


def test_an_optimizer_inside_backward(backend) -> None:
    """A parameter is written as soon as its gradient is there."""
    with backend.activate():
        plain = moved(sliced.across(), backend.device)
        model = OffloadModel(copy.deepcopy(plain), backend.device, backend=backend)

        def update(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for one in (plain, model):
            for parameter in one.parameters():
                parameter.register_post_accumulate_grad_hook(update)
            for step in range(3):
                (x,) = inputs_for(one, 1, step)
                one(x).sum().backward()
        assert same_bits(state(model), state(plain))


def test_layers_may_change_between_steps(backend) -> None:
    with backend.activate():
        plain = mlp().to(backend.device)
        model = OffloadModel(copy.deepcopy(plain), backend.device, backend=backend)
        for step, one in ((s, m) for s in range(4) for m in (plain, model)):
            torch.manual_seed(step)
            if step == 1:
                one.requires_grad_(False)
                setattr(one.get_submodule("2"), "0", nn.Linear(WIDTH, WIDTH))
                one.get_submodule("2").to(backend.device if one is plain else "cpu")
            if step == 2:
                one.requires_grad_(True)
                one.add_module("4", nn.Identity())
            if step == 3:
                one.double()
            one.zero_grad()
            dtype = torch.float64 if step == 3 else torch.float32
            (x,) = inputs_for(one, 1, step, dtype)
            one(x).sum().backward()
            if one is model:
                assert same_bits(state(model), state(plain)), step


def _add(model: OffloadModel) -> None:
    model.add_module("6", nn.Linear(WIDTH, 2))


def _delete(model: OffloadModel) -> None:
    del model._modules["5"]


def _set_to_none(model: OffloadModel) -> None:
    model.register_module("5", None)


@pytest.mark.parametrize("as_list", [False, True], ids=["sequential", "list"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize(("change", "num"), [(_add, 7), (_delete, 5), (_set_to_none, 5)])
def test_layers_may_not_become_more_or_fewer(
    backend, change: Callable[[OffloadModel], None], num: int, again: bool, as_list: bool
) -> None:
    """Nothing would run one that was added, and nothing would say so."""
    with backend.activate():
        layers = list(mlp(6))
        model = OffloadModel(
            layers if as_list else nn.Sequential(*layers),
            backend.device,
            checkpoint_activation=again,
            backend=backend,
        )
        (x,) = inputs_for(model, 1)
        expected = model(x)
        change(model)
        match = rf"has {num} layers, .* expected the 6 that it was made of.*make a new OffloadModel"
        with pytest.raises(OffloadError, match=match):
            model(x)
        model._modules.update({str(i): one for i, one in enumerate(layers)})
        model._modules.pop("6", None)
        assert same_bits([model(x)], [expected])


def test_a_copy_trains_on_its_own(backend) -> None:
    with backend.activate():
        plain = norms().to(backend.device)
        model = OffloadModel(copy.deepcopy(plain), backend.device, backend=backend)
        other = copy.deepcopy(model)
        expected = train(plain, one_by_one, sgd)
        before = state(other)
        assert same_bits(train(model, one_by_one, sgd), expected)
        assert same_bits(state(other), before)
        assert same_bits(train(other, one_by_one, sgd), expected)


def test_modules_have_their_mode(backend) -> None:
    with backend.activate():
        model = norms().eval()
        assert not OffloadModel(model, backend.device, backend=backend).training
        taken = OffloadModel(model, backend.device, backend=backend).train()
        assert all(layer.training for layer in taken.modules())


def test_inputs_are_cut_wherever_they_stand() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, more: dict, scale: Tensor, flag: bool) -> dict[str, object]:
            assert flag and len(x) == len(more["y"][0])
            return {"z": (x + more["y"][0]) * scale, "n": 3}

    model = OffloadModel(nn.Sequential(Takes()), "cpu", num_slices=1, num_microbatches=2)
    x = torch.arange(8.0).view(4, 2)
    output = model(x, {"y": [x]}, torch.tensor(2.0), True)
    assert torch.equal(output["z"], 4 * x) and output["n"] == 3


class Scalar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("layers", "shapes", "message"),
    [
        ([nn.Bilinear(2, 2, 2)], [(4, 2), (6, 2)], r"first dimensions \[4, 6\]; expected .* one"),
        ([nn.Identity()], [()], r"first dimensions \[\]; expected tensors"),
        ([Scalar()], [(4, 2)], "an output of 2 microbatches is a tensor of 0 dimensions"),
    ],
)
def test_batches_that_cannot_be_cut(layers, shapes, message: str) -> None:
    model = OffloadModel(nn.Sequential(*layers), "cpu", num_slices=1, num_microbatches=2)
    with pytest.raises(ValueError, match=message):
        model(*(torch.zeros(shape) for shape in shapes))


class Residual(nn.Module):
    """Not a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


def sharded(model: nn.Module, num: int) -> list[nn.Module]:
    """As a sharder makes it of any model that can be traced: graphs, the one behind the other.

    A residual is handed on: each returns a tuple, and the next takes two arguments.
    """
    seen = iter(range(100))
    cut = split_module(
        torch.fx.symbolic_trace(model), model, lambda node: min(num - 1, next(seen) // 5)
    )
    return list(cut.children())


@pytest.mark.covering(2)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("as_list", [list, nn.ModuleList], ids=name)
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_list_of_modules_is_the_slices(
    kind: str, as_list, num_microbatches: int, again: bool
) -> None:
    backend = make_backend(kind)
    with backend.activate():
        torch.manual_seed(1)
        plain = Residual()
        shards = sharded(copy.deepcopy(plain), 3)
        assert len(shards) == 3 and all(list(one.parameters()) for one in shards)
        plain.to(backend.device)
        model = OffloadModel(
            as_list(shards),
            backend.device,
            num_slices=7,
            checkpoint_activation=again,
            num_microbatches=num_microbatches,
            backend=backend,
        )

        def in_parts(x: Tensor) -> Tensor:
            return torch.cat([plain(part) for part in x.chunk(num_microbatches)])

        assert same_bits(
            train(model, first_in_first_out, sgd),
            train(plain, first_in_first_out, sgd, call=in_parts),
        )
        assert list(model.children()) == shards
        expected = [sum(p.nbytes for p in one.parameters()) for one in shards]
        assert model.peak_parameter_bytes_on_device == max(map(sum, pairwise(expected)))


def test_a_list_has_the_names_and_the_mode_of_its_modules() -> None:
    layers = [nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2))]
    names = list(nn.ModuleList(layers).state_dict())
    for given in (layers, tuple(layers), nn.ModuleList(layers)):
        assert list(OffloadModel(given, "cpu").state_dict()) == names
    assert OffloadModel(layers, "cpu").training
    evaluated = [one.eval() for one in layers]
    assert not OffloadModel(evaluated, "cpu").training
    assert not OffloadModel(nn.ModuleList(evaluated).eval(), "cpu").training


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


class CallsThem(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def with_own_parameter() -> nn.Sequential:
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


def with_hook() -> nn.Sequential:
    model = mlp()
    model.register_forward_hook(print)
    return model


def tied_by_data() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


def tied_to_a_flat_one() -> nn.Sequential:
    """Its neighbour in memory lies between it and the last."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[0].weight = nn.Parameter(torch.ones(6, 2))
    model[1].weight.data, model[2].weight.data = model[0].weight.data[2:].split(2)
    return model


def with_gaps() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.ones(2, 4)[:, ::2])
    return model


def test_layers_of_one_model_can_go_to_another(backend) -> None:
    """Where their parameters lie side by side in one allocation."""
    with backend.activate():
        first = OffloadModel(mlp().to(backend.device), backend.device, backend=backend)
        again = nn.Sequential(*first.children())
        second = OffloadModel(again, backend.device, num_slices=2, backend=backend)
        assert [p.nbytes for p in second.parameters()] == [p.nbytes for p in mlp().parameters()]


def test_parameters_stay_the_same_objects(backend) -> None:
    """With what the program knows of them: an optimizer, ties, hooks, attributes, a gradient."""
    with backend.activate():
        model = moved(sliced.across(), backend.device)
        before, weight = list(model.parameters()), model[0][0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[str] = []
        weight.role = "shared"
        weight.register_hook(lambda gradient: told.append("hook"))
        handle = weight.register_post_accumulate_grad_hook(lambda one: told.append("accumulated"))
        (x,) = [torch.ones(2, WIDTH, device=backend.device)]
        model(x).sum().backward()
        expected = [p.grad.cpu() for p in before]
        one = OffloadModel(model, backend.device, backend=backend)
        assert all(a is b for a, b in zip(one.parameters(), before, strict=True))
        assert one.get_parameter("5.0.weight") is weight and weight.role == "shared"
        assert weight.is_leaf and weight.requires_grad and isinstance(weight, nn.Parameter)
        assert same_bits([p.grad for p in before], expected)
        optimizer.zero_grad()
        told.clear()
        one(x).sum().backward()
        assert told == ["hook", "accumulated"]
        assert same_bits([p.grad for p in before], expected)
        handle.remove()
        one(x).sum().backward()
        assert told == ["hook", "accumulated", "hook"]
        values = state(one)
        optimizer.step()
        assert not same_bits(state(one), values)


def test_a_parameter_that_cannot_be_moved_is_an_error(backend) -> None:
    """PyTorch exchanges memory across a plug-in's devices only where nothing else knows of it."""
    with backend.activate():
        model = mlp().to(backend.device)
        reference = weakref.ref(model[0][0].weight)
        if torch._has_compatible_shallow_copy_type(reference(), torch.ones(1)):
            OffloadModel(model, backend.device, backend=backend)
            assert reference().is_cpu
            return
        with pytest.raises(ValueError, match=r"shape \(8, 8\) on .* weak reference .* build the"):
            OffloadModel(model, backend.device, backend=backend)


def test_memory_exchanged_before_backward_is_an_error(backend) -> None:
    for checkpoint_activation in (False, True):
        with backend.activate():
            model = OffloadModel(
                nn.Sequential(nn.Linear(2, 2)).to(backend.device),
                backend.device,
                num_slices=1,
                checkpoint_activation=checkpoint_activation,
                backend=backend,
            )
            x = torch.ones(3, 2, device=backend.device, requires_grad=True)
            loss = model(x).sum()
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            with pytest.raises(OffloadError, match="was given other memory through .data between"):
                loss.backward()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {}, "is a Linear; expected an nn.Sequential .*, or a list"),
        (lambda: None, {}, "is a NoneType; expected an nn.Sequential .*, or a list"),
        (lambda: [], {}, "the list of slices is empty; expected at least one module"),
        (lambda: nn.ModuleList(), {}, "the list of slices is empty"),
        (lambda: [nn.Tanh(), nn.Tanh, 3], {}, r"slices \[1, 2\] are no modules: a type, 3; exp"),
        (lambda: [[nn.Tanh()]], {}, r"slices \[0\] are no modules.*nn.Sequential\(\*layers\)"),
        (lambda: CallsThem([nn.Tanh()]), {}, "is a CallsThem; expected an nn.Sequential"),
        (lambda: [nn.Linear(2, 2)], {"num_slices": 0}, "num_slices is 0"),
        (lambda: [checkpoint_wrapper(nn.Linear(2, 2))], {}, "a checkpoint wrapper"),
        (lambda: Reversed(nn.Linear(2, 2)), {}, "is a Reversed; expected an nn.Sequential"),
        (
            lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
            {"num_slices": 1},
            "a checkpoint wrapper; expected .* pass checkpoint_activation=True",
        ),
        (tied_by_data, {"num_slices": 1}, r"\('0.weight', '1.weight'\).* share memory; expected"),
        (
            tied_to_a_flat_one,
            {"num_slices": 1},
            r"\('0.weight', '1.weight'\), \('0.weight', '2.weight'\).* share memory; expected",
        ),
        (with_gaps, {"num_slices": 1}, r"\['0.weight'\] have gaps in memory"),
        (with_own_parameter, {}, r"itself has \['scale'\]; expected .* in its layers only"),
        (with_hook, {}, "itself has hooks.*register them on the OffloadModel"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), {"num_slices": 1}, r"parameters \['0.weight'"),
        (lambda: mlp().to("meta"), {}, "are no dense tensors with data"),
        (lambda: nn.Sequential(OffloadModel(mlp(), "cpu")), {}, "a layer is, or has"),
        (mlp, {"num_slices": 0}, "num_slices is 0; expected 1 to 6, the number of layers"),
        (mlp, {"num_slices": 7}, "num_slices is 7; expected 1 to 6"),
        (nn.Sequential, {}, "the model has no layers; expected at least one module"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "num_slices is 3; expected 1, the number of"),
        (mlp, {"num_microbatches": 0}, "num_microbatches is 0, expected an integer of at least 1"),
        (mlp, {"device": "meta"}, "device is meta, but the backend's is cpu"),
        (mlp, {"offload_device": "meta"}, "offload_device is meta; expected the host"),
    ],
)
def test_bad_arguments(make, options: dict, message: str) -> None:
    options = {"device": "cpu", "backend": CpuBackend(), **options}
    with pytest.raises(ValueError, match=message):
        OffloadModel(make(), **options)


def test_a_model_that_was_moved_says_so() -> None:
    model = OffloadModel(norms(), "cpu").to("meta")
    with pytest.raises(OffloadError, match=r"parameter '0.weight' is on meta, expected cpu.*build"):
        model(torch.zeros(2, WIDTH))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=0.5)
        return x * self.scale


def test_a_layer_that_writes_its_parameters_is_an_error(backend) -> None:
    with backend.activate():
        model = OffloadModel(nn.Sequential(Writes()), backend.device, num_slices=1, backend=backend)
        (x,) = inputs_for(model, 1)
        for mode in (torch.enable_grad, torch.no_grad):
            with (
                mode(),
                pytest.raises(OffloadError, match="changed one of its parameters in place"),
            ):
                model(x)
        assert torch.equal(model.get_parameter("0.scale"), torch.ones(WIDTH))


def test_sparse_gradients_are_an_error(backend) -> None:
    skip_on_emulated(backend, NO_SPARSE)
    with backend.activate():
        layer = nn.Embedding(4, WIDTH, sparse=True)
        model = OffloadModel(nn.Sequential(layer), backend.device, num_slices=1, backend=backend)
        y = model(torch.tensor([1, 2]).to(backend.device))
        with pytest.raises(OffloadError, match="torch.sparse_coo; expected a dense one"):
            y.sum().backward()


def test_parameters_and_gradients_are_in_one_allocation_and_apart() -> None:
    """In memory of the backend, where the device is not the host."""
    backend = SimulatedBackend("late")
    with backend.activate():
        model = OffloadModel(sliced.across(), "cpu", backend=backend)
        assert backend.num_host_allocations == model.statistics().host_allocations == 1
        assert model.statistics().live_tensors == len([*model.parameters()])
        (x,) = inputs_for(model, 1)
        model(x).sum().backward()
        assert backend.num_host_allocations == model.statistics().host_allocations
        for parameter in model.parameters():  # to be saved apart, for instance
            for one in (parameter, parameter.grad):
                assert one.untyped_storage().nbytes() == parameter.nbytes


@pytest.mark.parametrize("keeps", [True, False], ids=["zeroed", "none"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_gradients_ask_the_system_in_the_first_step_alone(kind: str, keeps: bool) -> None:
    """And their memory is the tier's again when nobody has them."""
    with pair(norms, kind) as (_, model):
        (x,) = inputs_for(model, 1)
        placed = model.statistics()
        asked = [placed.host_allocations]
        for _ in range(4):
            model(x).sum().backward()
            asked.append(model.statistics().host_allocations)
            assert model.statistics().host_bytes_in_use >= placed.host_bytes_in_use + sum(
                p.grad.nbytes for p in model.parameters()
            )
            model.zero_grad(set_to_none=not keeps)
        assert 0 < asked[1] and len(set(asked[2 if keeps else 1 :])) == 1
        model.zero_grad(set_to_none=True)
        autograd_lets_go()
        gc.collect()
        model._cache.copies.backend.synchronize()
        model._cache.copies.poll()
        assert model.statistics().host_bytes_in_use == placed.host_bytes_in_use


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_gradient_that_is_kept_stays_as_it_is(kind: str) -> None:
    """A view of one, too; the memory of others is used again."""
    with pair(mlp, kind) as (plain, model):
        expected, kept = [], []
        for seed in range(3):
            for one, gradients in ((plain, expected), (model, kept)):
                torch.manual_seed(seed)
                one(*inputs_for(one, 1)).square().sum().backward()
                gradients.append(next(one.parameters()).grad[1:].t())
                one.zero_grad(set_to_none=True)
        assert same_bits(kept, [one.cpu() for one in expected])


def test_a_gradient_that_is_resized_is_not_that_of_a_neighbour() -> None:
    with pair(mlp, "cpu threads") as (_, model):
        model(*inputs_for(model, 1)).sum().backward()
        first, second, *_ = [p.grad for p in model.parameters()]
        before = second.clone()
        with suppress(RuntimeError):  # PyTorch does not resize what others own
            first.resize_(first.shape[0], first.shape[1] + 1).zero_()
        assert same_bits([second], [before])


@pytest.mark.parametrize("kind", BACKENDS)
def test_anomalies_are_those_of_the_plain_model(kind: str) -> None:
    """Memory in which NaN stood is used again, and looked at before the copy was waited for."""
    with pair(mlp, kind) as (plain, model):
        for seed in range(3):
            torch.manual_seed(seed)
            (x,) = inputs_for(model, 1)
            (model(x).sum() * float("nan")).backward()
            model.zero_grad()
            gradients = []
            with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
                for one in (model, plain):
                    one(x).square().sum().backward()
                    gradients.append([p.grad.cpu() for p in one.parameters()])
                    one.zero_grad()
            assert same_bits(*gradients)


@pytest.mark.parametrize("kind", ["cpu", "cpu threads", "late"])
def test_a_backward_in_inference_mode(kind: str) -> None:
    with pair(mlp, kind) as (plain, model):
        gradients = []
        for one in (model, plain):
            torch.manual_seed(3)
            loss = one(*inputs_for(one, 1)).square().sum()
            with torch.inference_mode():
                loss.backward()
            gradients.append([p.grad for p in one.parameters()])
        assert same_bits(*gradients)
        model.zero_grad()
        plain.zero_grad()
        assert same_bits(train(model, one_by_one, sgd), train(plain, one_by_one, sgd))


def test_an_input_that_lives_on_does_not_keep_the_engine() -> None:
    backend = make_backend("cpu threads")
    with backend.activate():
        model = OffloadModel(mlp(), "cpu", backend=backend)
        h = inputs_for(model, 1)[0].requires_grad_() * 2
        for _ in range(3):
            model(h).sum().backward(retain_graph=True)
        engine = weakref.ref(model._cache.copies)
        del model
        gc.collect()
        assert engine() is None
        h.sum().backward()


class Held(nn.Module):
    """Waits in its forward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.entered, self.let_go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        self.let_go.wait()
        return self.linear(x)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_one_thread_at_a_time(again: bool) -> None:
    """The layers' parameters are exchanged meanwhile, so two would exchange each other's."""
    backend = make_backend("cpu threads")
    with backend.activate(), ThreadPoolExecutor(1, "second") as second:
        held = Held()
        layers = [nn.Linear(WIDTH, WIDTH), held]
        options = {"num_slices": 2, "checkpoint_activation": again}
        model = OffloadModel(nn.Sequential(*layers), "cpu", backend=backend, **options)
        before = list(model.parameters())
        x = torch.ones(ROWS, WIDTH)
        held.let_go.set()
        loss = model(x).sum()
        held.let_go.clear()
        held.entered.clear()
        try:
            running = second.submit(model, x)
            held.entered.wait()
            with pytest.raises(OffloadError, match="'MainThread' .* 'second_0' is; expected one"):
                model(x)
            if again:
                with pytest.raises(OffloadError, match="one at a time"):
                    loss.backward()
        finally:
            held.let_go.set()
        assert running.result().requires_grad
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        model(x).sum().backward()


def test_gradients_over_the_budget_are_in_ordinary_memory(caplog) -> None:
    """Parameters are in memory of the backend."""
    with pair(partial(slices_of, 128), "late", config=OffloadConfig(host_budget_bytes=1)) as (
        plain,
        model,
    ):
        placed = model.statistics()
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert placed.host_bytes_reserved >= placed.host_bytes_in_use == parameter_bytes
        for one in (plain, model):
            one(torch.ones(2, 128)).sum().backward()
        expected = [parameter.grad for parameter in plain.parameters()]
        assert same_bits([parameter.grad for parameter in model.parameters()], expected)
        (said,) = [r.message for r in caplog.records if "gradients for which" in r.message]
        assert "ordinary memory" in said and said.endswith("raise host_budget_bytes")
        assert model.statistics().host_bytes_reserved == placed.host_bytes_reserved


@pytest.mark.parametrize("which", ["slice 1", "gradients"])
@pytest.mark.parametrize("kind", ["cpu", "cpu threads"])
def test_verify_finds_what_comes_wrong(kind: str, which: str, monkeypatch) -> None:
    with pair(mlp, kind, config=OffloadConfig(verify=True)) as (plain, model):
        assert same_bits(train(model, one_by_one, sgd), train(plain, one_by_one, sgd))
        backend, wrong = model._cache.copies.backend, []
        copy_right = backend.copy

        def copy_wrong(stream: Any, targets: list[Tensor], sources: Any, label: str) -> None:
            is_sent = stream is backend.d2h
            is_wrong = is_sent if which == "gradients" else label == which and not is_sent
            if is_wrong and not wrong:
                wrong.append(label)
                sources = [one + 1 for one in sources]
            copy_right(stream, targets, sources, label)
            backend.synchronize()  # while the sources are there

        monkeypatch.setattr(backend, "copy", copy_wrong)
        with pytest.raises(VerifyError, match="a tensor of slice . with shape .* checksum"):
            model(*inputs_for(model, 1)).sum().backward()
        assert wrong
        monkeypatch.undo()
        model.zero_grad()
        plain.zero_grad()
        assert same_bits(train(model, one_by_one, sgd), train(plain, one_by_one, sgd))


def test_memory_that_cannot_be_pinned_is_replaced(caplog) -> None:
    backend = SimulatedBackend("eager")

    def refuse(nbytes: int) -> Tensor:
        raise MemoryError("locked memory is used up")

    backend.allocate_host = refuse
    with backend.activate():
        plain = mlp()
        model = OffloadModel(copy.deepcopy(plain), "cpu", backend=backend)
        assert "no pinned memory for" in caplog.text and "ulimit -l" in caplog.text
        assert same_bits(train(model, one_by_one, sgd), train(plain, one_by_one, sgd))
