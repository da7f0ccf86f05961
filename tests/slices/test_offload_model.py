"""A model whose parameters stay on the host trains as one whose parameters are on the device."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers import sliced
from helpers.sliced import (
    ROWS,
    WIDTH,
    Offload,
    Square,
    as_slices,
    both_ways,
    each_way,
    first_in_first_out,
    input_for,
    inputs_for,
    mlp,
    one_by_one,
    plain_and_offloaded,
    run_again,
    state,
    train,
)
from helpers.toy import moved, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pp_offload import OffloadActivations, OffloadConfig, OffloadError, OffloadModel
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.slices import Slice, partition
from pp_offload.backends import Backend, CpuBackend
from pp_offload.testing import SimulatedBackend


@pytest.mark.covering(1)
@pytest.mark.parametrize("offload", [as_slices, run_again])
@pytest.mark.parametrize("make", [sliced.mlp, sliced.named, sliced.images, sliced.frozen])
@pytest.mark.parametrize("num", [2, 5])
def test_microbatches(
    active: Backend, num: int, make: Callable[[], nn.Sequential], offload: Offload
) -> None:
    """Of five the last is smaller, as ``torch.chunk`` cuts them."""
    torch.manual_seed(1)
    plain, model, _ = plain_and_offloaded(make(), offload, active, num_microbatches=num)
    expected = train(plain, one_by_one, active.device, call=in_parts(plain, num))
    assert same_bits(train(model, one_by_one, active.device), expected)


def in_parts(model: Callable[[Tensor], Tensor], num: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([model(part) for part in x.chunk(num)])


@pytest.mark.parametrize(("rows", "expected"), [(8, [2] * 4), (7, [2, 2, 2, 1]), (5, [2, 2, 1])])
def test_what_has_no_batch_goes_to_every_microbatch(rows: int, expected: list[int]) -> None:
    """Tensors are cut wherever they stand, and put together again."""
    seen: list[tuple[int, str]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor, more: dict, scale: Tensor, word: str) -> dict[str, object]:
            seen.append((len(x), word))
            return {"z": (x + more["y"][0]) * scale, "n": 3}

    model = OffloadModel(nn.Sequential(Looks()), "cpu", num_slices=1, num_microbatches=4)
    x = torch.arange(float(rows))
    output = model(x, {"y": [x]}, torch.tensor(2.0), "a")
    assert torch.equal(output["z"], 4 * x) and output["n"] == 3
    assert seen == [(size, "a") for size in expected]


@each_way
def test_inside_other_hooks(activations: OffloadActivations, offload: Offload) -> None:
    """What is no parameter goes to OffloadActivations, as that of the plain model does."""
    backend = activations.stash.backend
    plain, model, _ = plain_and_offloaded(mlp(), offload, backend)

    def call(x: Tensor) -> Tensor:
        with activations:
            return model(x)

    expected = train(plain, one_by_one, backend.device)
    assert same_bits(train(model, one_by_one, backend.device, call=call), expected)
    gc.collect()
    statistics = activations.statistics()
    assert statistics.live_tensors == 0
    # Of 6 layers what Tanh gave, but for the last three.
    activation = ROWS * WIDTH * 4
    assert statistics.bytes_offloaded >= (0 if offload is run_again else 9 * 3 * activation)
    assert statistics.bytes_offloaded % activation == 0, "no parameter is among them"


@on_two_backends
@both_ways
def test_activations_are_computed_again_as_without(active: Backend, offload: Offload) -> None:
    """Recipes recognize saved tensors, whose hooks are around those for parameters."""
    layers = nn.Sequential(*(nn.Sequential(Square(), nn.GELU(), Square()) for _ in range(4)))
    results, moved_bytes = [], []
    for model in plain_and_offloaded(layers, offload, active)[:2]:
        activations = OffloadActivations(min_offload_size=1, backend=active)
        with activations:
            y = model(input_for(active))
        y.sum().backward()
        results.append([y.detach().cpu(), *state(model)])
        statistics = activations.statistics()
        moved_bytes.append((statistics.bytes_computed_again, statistics.bytes_offloaded))
    assert same_bits(*results)
    assert moved_bytes[0] == moved_bytes[1] and moved_bytes[0][0] >= 3 * ROWS * WIDTH * 4


@pytest.mark.parametrize(
    ("order", "offload", "most_forward", "after_forward", "most_backward"),
    [
        # Forward, in the slice before the last: x, and what each layer so far has given. Backward,
        # in the first layer of the last slice: x, what the layers before have given, y; the
        # gradients of y and of both layers' inputs.
        *(
            (order, as_slices, 1 + 10, 1 + 12, 1 + 10 + 1 + 3)
            for order in ("late", "eager", "random")
        ),
        # Forward: x; the input of a slice, and the outputs of its layers. Backward: x and y; the
        # inputs of the last slice and of the one before; the same gradients.
        ("eager", run_again, 1 + 3, 2, 2 + 2 + 3),
    ],
)
def test_device_memory_is_arithmetic(
    order: str, offload: Offload, most_forward: int, after_forward: int, most_backward: int
) -> None:
    """Two slices and a slice of gradients, whatever the depth, and so many activations."""
    backend, width = SimulatedBackend(order), 16
    activation = width * width * 4
    slice_bytes, config = 2 * activation, OffloadConfig(prefetch_bytes=activation)
    with backend.activate():
        layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(12)))
        model, _ = offload(layers, backend, num_slices=6, config=config)
        gc.collect()
        assert backend.device_bytes == 0, "all is on the host"
        for _ in range(3):
            x = torch.randn(width, width, requires_grad=True)
            backend.take_device_peak()
            y = model(x)
            assert backend.take_device_peak() == 2 * slice_bytes + most_forward * activation
            assert backend.device_bytes == slice_bytes + after_forward * activation
            gradient = torch.ones_like(y)
            y.backward(gradient)
            assert backend.take_device_peak() == 3 * slice_bytes + most_backward * activation
            assert backend.device_bytes == 4 * activation, "x, y, and their gradients"
            del x, y, gradient
            assert backend.device_bytes == 0
    backend.check()


def test_layers_may_change_between_steps(active: Backend) -> None:
    plain, model, _ = plain_and_offloaded(mlp(), as_slices, active)
    for step, network in product(range(4), (plain, model)):
        torch.manual_seed(step)
        if step == 1:
            network.requires_grad_(False)
            setattr(network.get_submodule("2"), "0", nn.Linear(WIDTH, WIDTH))
            network.get_submodule("2").to(active.device if network is plain else "cpu")
        if step == 2:
            network.requires_grad_(True)
            network.add_module("4", nn.Identity())
        if step == 3:
            network.double()
        network.zero_grad()
        dtype = torch.float64 if step == 3 else torch.float32
        (x,) = inputs_for(active.device, step=step, dtype=dtype)
        network(x).sum().backward()
        if network is model:
            assert same_bits(state(model), state(plain)), step


@pytest.mark.parametrize("num", [7, 5])
def test_layers_may_not_become_more_or_fewer(num: int) -> None:
    """Nothing would run one that was added, and nothing would say so."""
    model = OffloadModel(mlp(6), "cpu")
    if num == 7:
        model.add_module("6", nn.Linear(WIDTH, 2))
    else:
        del model._modules["5"]
    with pytest.raises(OffloadError, match=rf"has {num} layers, .* expected the 6 that it was"):
        model(torch.ones(2, WIDTH))


HIDDEN = SimpleNamespace(mask=torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("layer", "given", "message"),
    [
        (nn.Bilinear(2, 2, 2), [(4, 2), (6, 2)], r"first dimensions \[4, 6\]; expected .* one"),
        (nn.Identity(), [()], r"first dimensions \[\]; expected tensors"),
        (nn.L1Loss(), [(4, 2)] * 2, "an output of 2 microbatches is a tensor of 0 dimensions"),
        (nn.Identity(), [(4, 2), HIDDEN], "SimpleNamespace have tensors inside .* not be cut"),
    ],
)
def test_batches_that_cannot_be_cut(layer: nn.Module, given: list[Any], message: str) -> None:
    model = OffloadModel(nn.Sequential(layer), "cpu", num_slices=1, num_microbatches=2)
    with pytest.raises(ValueError, match=message):
        model(*(torch.zeros(each) if isinstance(each, tuple) else each for each in given))


class Forks(nn.Linear):
    """Hands a residual on: the next module takes two arguments."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(super().forward(x))


class Joins(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + y)


@on_two_backends
@pytest.mark.parametrize("offload", [as_slices, run_again])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_list_of_modules_is_the_slices(
    active: Backend, num_microbatches: int, offload: Offload
) -> None:
    torch.manual_seed(1)
    shards = [Forks(WIDTH, WIDTH), Joins(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False)]
    forks, joins, last = plain = moved(nn.ModuleList(copy.deepcopy(shards)), active.device)
    model, _ = offload(shards, active, num_slices=7, num_microbatches=num_microbatches)
    call = in_parts(lambda x: last(joins(*forks(x))), num_microbatches)
    assert same_bits(
        train(model, first_in_first_out, active.device),
        train(plain, first_in_first_out, active.device, call=call),
    )
    assert list(model.state_dict()) == list(plain.state_dict())
    expected = [sum(p.nbytes for p in shard.parameters()) for shard in shards]
    assert model.peak_parameter_bytes_on_device == max(map(sum, pairwise(expected)))


def owner() -> nn.Sequential:
    """The Sequential itself has a parameter, and a hook."""
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.register_forward_hook(print)
    return model


def tied_to_a_flat_one() -> nn.Sequential:
    """Its neighbour in memory lies between it and the last."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[0].weight = nn.Parameter(torch.ones(6, 2))
    model[1].weight.data, model[2].weight.data = model[0].weight.data[2:].split(2)
    return model


def test_parameters_stay_the_same_objects(active: Backend) -> None:
    """With what the program knows of them: an optimizer, ties, attributes, a gradient."""
    model = moved(sliced.across(), active.device)
    before, weight = list(model.parameters()), model[0][0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight.role = "shared"
    x = torch.ones(2, WIDTH, device=active.device)
    model(x).sum().backward()
    expected = [p.grad.cpu() for p in before]
    wrapped = OffloadModel(model, active.device, backend=active)
    assert all(a is b for a, b in zip(wrapped.parameters(), before, strict=True))
    assert wrapped.get_parameter("5.0.weight") is weight and weight.role == "shared"
    assert weight.is_leaf and weight.requires_grad and isinstance(weight, nn.Parameter)
    assert same_bits([p.grad for p in before], expected)
    optimizer.zero_grad()
    wrapped(x).sum().backward()
    assert same_bits([p.grad for p in before], expected)
    values = state(wrapped)
    optimizer.step()
    assert not same_bits(state(wrapped), values)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: None, {}, "the model is None; expected an nn.Sequential .*, or a list"),
        (
            lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
            {"num_slices": 1},
            "a checkpoint wrapper.* pass checkpoint_activation=True",
        ),
        (
            tied_to_a_flat_one,
            {"num_slices": 1},
            r"\('0.weight', '1.weight'\), \('0.weight', '2.weight'\).* share memory; expected",
        ),
        (owner, {}, r"itself has \['scale', '_forward_hooks'\], .* in its layers"),
        (lambda: mlp().to("meta"), {}, "are no dense tensors with data"),
        (mlp, {"offload_device": "meta"}, "offload_device is meta; expected the host"),
    ],
)
def test_bad_arguments(make, options: dict, message: str) -> None:
    options = {"device": "cpu", "backend": CpuBackend(), **options}
    with pytest.raises(ValueError, match=message):
        OffloadModel(make(), **options)


# Slices, and what is on the device of them

late = pytest.mark.parametrize("backend", ["late"], indirect=True)


def test_slices_have_about_equal_bytes() -> None:
    """With layers that have no parameters."""
    for seed in range(200):
        draw = random.Random(seed)
        sizes = [draw.choice([0, *range(10, 60)]) for _ in range(draw.randrange(1, 20))]
        layers = [{index: nbytes} for index, nbytes in enumerate(sizes)]
        for num_slices in range(1, len(layers) + 1):
            slices = partition(layers, num_slices)
            assert len(slices) == num_slices and all(slices)
            assert [i for indices in slices for i in indices] == list(range(len(layers)))
            most = max(sum(sizes[i] for i in indices) for indices in slices)
            assert most <= sum(sizes) / num_slices + max(sizes), seed


def test_a_shared_parameter_counts_once() -> None:
    layers = [{1: 8, 2: 8}, {1: 8, 2: 8}, {3: 8}, {4: 8}]
    assert partition(layers, 2) == [range(2), range(2, 4)]


RUN = nn.Module()
"""Stands for a forward."""


@pytest.fixture
def slice_() -> Slice:
    return Slice("slice 0", (nn.Parameter(torch.zeros(4)),), ())


@pytest.fixture
def cache(active: SimulatedBackend) -> SliceCache:
    return SliceCache(PlainCopies(active, OffloadConfig()))


@late
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_the_program_has_written_is_brought_again(
    cache: SliceCache, slice_: Slice, is_replaced: bool
) -> None:
    (parameter,) = slice_.parameters
    cache.use(slice_, RUN)
    for index in (None, 0):
        with torch.no_grad():
            if is_replaced:
                parameter.data = parameter + 1
            else:
                parameter.add_(1)
        (tensor,) = cache.use(slice_, RUN, index)
        assert tensor.tolist() == parameter.tolist()


@late
def test_a_slice_on_one_stream_is_brought_again_for_another(
    active: SimulatedBackend, cache: SliceCache, slice_: Slice
) -> None:
    """Its memory returns to the stream that it belongs to, which does not wait for the other."""
    (first,) = cache.use(slice_, RUN)
    with active.stream(active.new_stream("other")):
        (second,) = cache.use(slice_, RUN)
        assert second is not first and second.add(1).eq(1).all()
    active.check()


@late
@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_copies_that_are_still_queued_end_before_their_memory_is_freed(
    active: SimulatedBackend, way: str
) -> None:
    """A model may be dropped while its next slice is on the way."""
    copies = PlainCopies(active, OffloadConfig())
    getattr(copies, way)([torch.ones(4)], "parameters")
    assert active.pending == 1
    del copies
    gc.collect()
    assert active.pending == 0
    active.synchronize()  # it raises if a copy uses what was freed
    active.check()


@late
@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_memory_outlives_a_copy_that_was_cut_off(
    active: SimulatedBackend, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, copy = PlainCopies(active, OffloadConfig()), active.copy

    def and_interrupt(*args: Any) -> None:
        copy(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(active, "copy", and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(copies, way)([torch.ones(4)], "parameters")
    copies.poll()
    active.synchronize()  # it raises if a copy uses what was freed
    statistics = copies.statistics()
    assert statistics.bytes_in_flight == statistics.host_bytes_in_use == 0
    active.check()


@late
def test_bytes_in_flight_are_bounded(active: SimulatedBackend) -> None:
    copies = PlainCopies(active, OffloadConfig(max_in_flight_bytes=64))
    for _ in range(4):
        copies.copy_to_host([torch.ones(10)], "gradients")
        assert copies.statistics().bytes_in_flight <= 64
    assert active.pending == 1
