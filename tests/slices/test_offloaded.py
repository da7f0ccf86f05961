"""Parameters on the host, in slices or in layers: same bits, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import make_backend, on_two_backends, skip_on_emulated
from helpers.sessions import assert_no_hooks, autograd_lets_go
from helpers.sliced import (
    MODELS,
    ORDERS,
    REPEATED,
    WIDTH,
    Offload,
    Square,
    across,
    as_layers,
    as_slices,
    both_ways,
    each_way,
    input_for,
    mlp,
    norms,
    one_by_one,
    plain_and_offloaded,
    run_again,
    same_training,
    state,
    together,
    train,
)
from helpers.toy import moved, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pp_offload import OffloadConfig, OffloadError, SavedTensorModifiedError, VerifyError
from pp_offload.backends import Backend

late = pytest.mark.parametrize("backend", ["late"], indirect=True)


def name(case: Any) -> str:
    return getattr(case, "__name__", str(case))


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ORDERS, ids=name)
@each_way
@pytest.mark.parametrize("make", MODELS, ids=name)
def test_equal_bit_for_bit(active: Backend, make: Any, offload: Offload, order: Any) -> None:
    if order is together and make in REPEATED:
        pytest.skip("sums in another order, see docs/offload-model.md")
    torch.manual_seed(1)
    plain, model, figures = plain_and_offloaded(make(), offload, active)
    assert same_bits(train(model, order, active.device), train(plain, order, active.device))
    assert figures.parameter_bytes_on_device == figures.statistics().bytes_in_flight == 0
    assert_no_hooks()


@each_way
def test_gradients_of_gradients_of_inputs_alone(active: Backend, offload: Offload) -> None:
    """Those of parameters' gradients are refused, and leave nothing behind."""
    plain, model, figures = plain_and_offloaded(mlp(), offload, active)

    def run(network: nn.Module) -> list[Tensor]:
        x = input_for(active)
        (slope,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        results = [x.grad.cpu(), *state(network)]
        network.zero_grad()
        return results

    assert same_bits(run(plain), run(model))
    with pytest.raises(OffloadError, match="create_graph=True came to parameters of"):
        torch.autograd.backward(model(input_for(active)).sum(), create_graph=True)
    autograd_lets_go()
    assert figures.parameter_bytes_on_device == 0
    model.zero_grad()
    assert same_training(plain, model, active)


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return model(x)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "autocast": in_autocast,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant checkpoint": partial(checkpoint, use_reentrant=True),
}


@on_two_backends
@both_ways
@pytest.mark.parametrize("way", CALLS)
def test_called_by_others(active: Backend, offload: Offload, way: str) -> None:
    make = mlp if way == "autocast" else norms  # norms give float32 on some devices
    plain, model, _ = plain_and_offloaded(make(), offload, active)
    expected, got = (
        train(network, one_by_one, active.device, call=partial(CALLS[way], network))
        for network in (plain, model)
    )
    assert same_bits(got, expected)
    assert got[0].dtype == (torch.bfloat16 if way == "autocast" else torch.float32)


@on_two_backends
@both_ways
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=name)
def test_without_gradients_nothing_stays(active: Backend, offload: Offload, mode: Any) -> None:
    if mode is torch.inference_mode:
        skip_on_emulated(active, "a linear layer of it fails in inference mode, in any model")
    plain, model, figures = plain_and_offloaded(norms().eval(), offload, active)
    x = input_for(active)
    with mode():
        y = model.eval()(x)
        assert torch.equal(y, plain(x)) and not y.requires_grad
    assert figures.parameter_bytes_on_device == 0
    model(x.detach()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def write(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1)


def exchange(parameter: Tensor) -> None:
    parameter.data = parameter.data.clone()


@each_way
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (write, SavedTensorModifiedError, "is at version"),
        (exchange, OffloadError, "was given other memory through .data between"),
    ],
)
def test_a_parameter_changed_before_backward_is_an_error(
    active: Backend, offload: Offload, change: Any, error: type[Exception], message: str
) -> None:
    plain, model, _ = plain_and_offloaded(mlp(), offload, active)
    loss = model(input_for(active)).sum()
    change(list(model.parameters())[4])
    with pytest.raises(error, match=message):
        loss.backward()
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    model.zero_grad()
    assert same_training(plain, model, active)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("where", "error"),
    [("forward", KeyError), ("forward", KeyboardInterrupt), ("backward", KeyError)],
)
@each_way
def test_a_step_that_fails_leaves_nothing_to_the_next(
    active: Backend, offload: Offload, where: str, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    def fail_in_backward(module: nn.Module, args: object, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(fail)

    fails = nn.Identity()
    layers = nn.Sequential(*mlp(3), nn.Sequential(Square(), fails), *mlp(3))
    plain, model, figures = plain_and_offloaded(layers, offload, active)
    for _ in range(2):
        hook = fails.register_forward_hook(fail if where == "forward" else fail_in_backward)
        with pytest.raises(error) as failure:  # it has the frames, and what they hold
            model(input_for(active)).sum().backward()
        hook.remove()
        assert_no_hooks()
        autograd_lets_go()
        assert figures.parameter_bytes_on_device == 0
        with torch.no_grad():  # no copy is under way that would be disturbed
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(1.1)
        del failure
        model.zero_grad()
        plain.zero_grad()
        assert same_training(plain, model, active, steps=1)
    assert figures.statistics().bytes_in_flight == 0


@each_way
def test_a_backward_that_stops_early_leaves_nothing_under_way(
    active: Backend, offload: Offload
) -> None:
    """What it foresaw is not asked for; the program may write it."""
    _, model, figures = plain_and_offloaded(mlp(), offload, active)
    parameters = list(model.parameters())
    loss = model(input_for(active)).sum()
    (gradient,) = torch.autograd.grad(loss, parameters[8], retain_graph=True)
    assert figures.parameter_bytes_on_device == 0
    write(parameters[6])
    assert gradient.abs().sum() > 0


@both_ways
def test_a_graph_that_is_dropped_leaves_nothing(active: Backend, offload: Offload) -> None:
    _, model, figures = plain_and_offloaded(mlp(), offload, active)
    h = input_for(active) * 1
    storage = weakref.ref(h.untyped_storage())
    y = model(h)
    del h
    assert storage() is not None and figures.parameter_bytes_on_device > 0
    del y
    assert storage() is None, "there is no cycle"
    assert figures.parameter_bytes_on_device == 0
    reference = weakref.ref(model)
    del model, figures
    gc.collect()
    assert reference() is None


@both_ways
def test_an_optimizer_inside_backward(active: Backend, offload: Offload) -> None:
    """A parameter is written as soon as its gradient is there."""

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    plain, model, _ = plain_and_offloaded(across(), offload, active)
    for network in (plain, model):
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            network(input_for(active, step)).sum().backward()
    assert same_bits(state(model), state(plain))


@on_two_backends
@both_ways
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_state_is_computed_with(active: Backend, offload: Offload, assign: bool) -> None:
    """And so is what is written through ``.data``."""
    plain, model, _ = plain_and_offloaded(mlp(), offload, active)
    x = input_for(active)
    model(x)
    values = [torch.randn_like(value, device="cpu") for value in model.state_dict().values()]
    for network in (plain, model):
        state_dict = dict(zip(network.state_dict(), values, strict=True))
        network.load_state_dict(state_dict, assign=assign and network is model)
    assert torch.equal(model(x), plain(x))
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(0.5)
    assert torch.equal(model(x), plain(x))


@on_two_backends
@both_ways
def test_a_copy_trains_on_its_own(active: Backend, offload: Offload) -> None:
    plain, model, figures = plain_and_offloaded(norms(), offload, active)
    other, before = copy.deepcopy(model), state(model)
    expected = train(plain, one_by_one, active.device)
    assert same_bits(train(model, one_by_one, active.device), expected)
    assert same_bits(state(other), before)
    nbytes = figures.statistics().bytes_reloaded
    assert same_bits(train(other, one_by_one, active.device), expected)
    assert figures.statistics().bytes_reloaded > nbytes, "it is offloaded, too"


class Scales(nn.Module):
    """Reads an attribute of its parameter, and writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.scale = 1 + getattr(self.weight, "scale", 2.0)
        return x * self.weight * self.weight.scale


@on_two_backends
@both_ways
def test_a_parameter_has_its_attributes_in_a_forward(active: Backend, offload: Offload) -> None:
    layers = nn.Sequential(*(Scales() for _ in range(3)))
    plain, model, _ = plain_and_offloaded(layers, offload, active)
    results = []
    for network in (plain, model):
        for parameter in network.parameters():
            parameter.__dict__.clear()  # a move or a copy has lost some
        results.append([network(input_for(active)).detach().cpu() for _ in range(2)])
        assert [vars(p) for p in network.parameters()] == [{"scale": 4.0}] * 3
    assert same_bits(*results)


class Writes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "in place":
                self.scale.clamp_(max=0.5)
            elif self.how == "other memory":
                self.scale.data = x.std(0)
            else:
                self.scale = nn.Parameter(x.std(0))
        return x * self.scale


@both_ways
@pytest.mark.parametrize("how", ["in place", "other memory", "another"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_layer_that_writes_its_parameters_is_an_error(
    active: Backend, offload: Offload, how: str, mode: Any
) -> None:
    model, _ = offload(nn.Sequential(*mlp(2), Writes(how)), active)
    with mode(), pytest.raises(OffloadError, match="changed one of its parameters in its forward"):
        model(input_for(active))
    assert torch.equal(list(model.parameters())[-1], torch.ones(WIDTH))


class Caches(Square):
    """Rounds its weight once for each version of it."""

    def forward(self, x: Tensor) -> Tensor:
        if vars(self).get("version") != self.weight._version:
            self.version, self.rounded = self.weight._version, self.weight.detach().bfloat16()
        return super().forward(x) + x @ self.rounded.float()


@both_ways
@on_two_backends
def test_a_layer_that_compares_versions_of_its_weight(active: Backend, offload: Offload) -> None:
    layers = nn.Sequential(*(Caches() for _ in range(3)))
    plain, model, _ = plain_and_offloaded(layers, offload, active)
    assert same_training(plain, model, active)


@both_ways
@on_two_backends
def test_gradients_of_another_dtype_than_the_parameter(active: Backend, offload: Offload) -> None:
    layers = mlp(3).bfloat16()
    if not hasattr(layers[0][0].weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    plain, model, _ = plain_and_offloaded(layers, offload, active)
    for parameter in [*plain.parameters(), *model.parameters()]:
        parameter.grad_dtype = torch.float32
    for network in (plain, model):
        network(input_for(active).bfloat16()).sum().backward()
    assert same_bits(*[[p.grad.cpu() for p in each.parameters()] for each in (plain, model)])


@both_ways
def test_sparse_gradients_are_an_error(active: Backend, offload: Offload) -> None:
    skip_on_emulated(active, "it has no sparse tensors")
    layers = nn.Sequential(nn.Embedding(4, WIDTH, sparse=True), *mlp(2))
    model, _ = offload(layers, active)
    y = model(torch.tensor([1, 2]).to(active.device))
    with pytest.raises(OffloadError, match="torch.sparse_coo; expected a dense one"):
        y.sum().backward()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_take_host_memory_in_the_first_step_alone(
    active: Backend, set_to_none: bool
) -> None:
    """Later steps use it again, and all of it is free when no gradient is left."""
    model, figures = as_slices(norms(), active)
    in_use_bytes, allocations = figures.statistics().host_bytes_in_use, []
    for _ in range(4):
        model(input_for(active)).sum().backward()
        allocations.append(figures.statistics().host_allocations)
        model.zero_grad(set_to_none=set_to_none)
    # Zeroed gradients are added to, so two of each are there from the second step on.
    assert len(set(allocations[0 if set_to_none else 1 :])) == 1
    model.zero_grad(set_to_none=True)
    autograd_lets_go()
    gc.collect()
    active.synchronize()
    assert figures.statistics().host_bytes_in_use == in_use_bytes


@both_ways
def test_a_view_of_a_gradient_keeps_its_memory(active: Backend, offload: Offload) -> None:
    """Gradients of later steps are in other memory than one of which a view is left."""
    plain, model, _ = plain_and_offloaded(mlp(), offload, active)
    views = []
    for network in (plain, model):
        for step in range(3):
            network(input_for(active, step)).square().sum().backward()
            views.append(next(network.parameters()).grad[1:].t())
            network.zero_grad(set_to_none=True)
    assert same_bits([view.cpu() for view in views[:3]], views[3:])


def test_anomalies_are_those_of_the_plain_model(active: Backend) -> None:
    """Memory in which NaN stood is used again, and looked at before the copy was waited for."""
    plain, model, _ = plain_and_offloaded(mlp(), as_slices, active)
    for step in range(3):
        x = input_for(active, step)
        (model(x).sum() * float("nan")).backward()
        model.zero_grad()
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            for network in (model, plain):
                network(x).square().sum().backward()
        assert same_bits(state(model), state(plain))
        model.zero_grad()
        plain.zero_grad()


@late
def test_gradients_over_the_budget_are_in_ordinary_memory(active: Backend, caplog: Any) -> None:
    """Parameters are in memory of the backend, whatever the budget is."""
    layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    config = OffloadConfig(host_budget_bytes=1)
    plain, model, figures = plain_and_offloaded(layers, as_slices, active, config=config)
    placed = figures.statistics()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert placed.host_bytes_reserved >= placed.host_bytes_in_use == parameter_bytes
    for network in (plain, model):
        network(torch.ones(2, 128)).sum().backward()
    assert same_bits(state(model), state(plain))
    (message,) = [r.message for r in caplog.records if "gradients for which" in r.message]
    assert "ordinary memory" in message and message.endswith("raise host_budget_bytes")
    assert figures.statistics().host_bytes_reserved == placed.host_bytes_reserved


@pytest.mark.parametrize("which", ["slice 1", "gradients"])
@pytest.mark.parametrize("backend", ["cpu threads"], indirect=True)
def test_verify_finds_what_comes_wrong(active: Backend, which: str, monkeypatch: Any) -> None:
    copy_right, wrong = active.copy, []

    def copy_wrong(stream: Any, targets: list[Tensor], sources: Any, label: str) -> None:
        is_sent = stream is active.d2h
        is_wrong = is_sent if which == "gradients" else label == which and not is_sent
        if is_wrong and not wrong:
            wrong.append(label)
            sources = [source + 1 for source in sources]
        copy_right(stream, targets, sources, label)
        active.synchronize()  # while the sources are there

    config = OffloadConfig(verify=True)
    plain, model, _ = plain_and_offloaded(mlp(), as_slices, active, config=config)
    assert same_training(plain, model, active)
    with monkeypatch.context() as patch:
        patch.setattr(active, "copy", copy_wrong)
        with pytest.raises(VerifyError, match="a tensor of slice . with shape .* checksum"):
            model(input_for(active)).sum().backward()
    assert wrong
    model.zero_grad()
    plain.zero_grad()
    assert same_training(plain, model, active)


@each_way
def test_one_thread_at_a_time(offload: Offload) -> None:
    """The layers' parameters are exchanged meanwhile, so two would exchange each other's."""
    backend, entered, go_on = make_backend("cpu threads"), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        entered.set()
        assert go_on.wait(60)

    with backend.activate():
        layers = mlp(3)
        layers[2][0].register_forward_hook(wait)
        model, _ = offload(layers, backend)
        x = input_for(backend)
        other = threading.Thread(target=model, args=(x.detach(),), name="other")
        other.start()
        assert entered.wait(60)
        with pytest.raises(OffloadError, match="in whose forward thread 'other' is"):
            model(x)
        go_on.set()
        other.join()
        model(x).sum().backward()


@both_ways
@pytest.mark.parametrize("make_copy", [lambda model: model, copy.deepcopy])
@late
def test_a_file_has_the_bytes_of_what_is_saved_alone(
    active: Backend, offload: Offload, make_copy: Callable[[nn.Module], nn.Module]
) -> None:
    """Parameters of a slice are in one allocation; those that are empty, of two bytes, or
    transposed, too.
    """
    layer = nn.Linear(128, 128)
    layer.spread = nn.Parameter(torch.randn(3, 128).t())
    layer.empty = nn.Parameter(torch.randn(0, 3))
    layer.shift = nn.Parameter(torch.randn(5).bfloat16())
    layers = nn.Sequential(layer, nn.Identity(), nn.Identity())
    plain, model, _ = plain_and_offloaded(layers, offload, active)
    networks, file = (plain, make_copy(model)), io.BytesIO()
    small = [[p for p in each.parameters() if p.numel() < 128**2] for each in networks]
    torch.save(small[1], file)
    assert file.tell() < 128**2
    file.seek(0)
    assert same_bits(torch.load(file), [parameter.cpu() for parameter in small[0]])


# Parameters that a forward did not use: nobody hears of them in backward


class Experts(nn.Module):
    """Each row goes to the expert that its first element names; ``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0].detach().abs())](x).sin() + x


OFFLOADS: dict[str, Offload] = {
    "slices": partial(as_slices, num_slices=2),
    "again": partial(run_again, num_slices=2),
    "parts": partial(as_slices, num_slices=2, num_microbatches=2),
    "layers": as_layers,
    "checkpointed": as_layers,
}


def bits(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.detach().cpu().numpy().tobytes()


def listen(parameter: nn.Parameter, events: list[Any]) -> Any:
    """Note whatever hooks a parameter can have are given."""
    parameter.register_hook(lambda gradient: events.append(("gradient", bits(gradient))))
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_prehook(lambda given: events.append(("before", bits(given[0]))))
    accumulator.register_hook(lambda *_: events.append(("after", None)))
    parameter.register_post_accumulate_grad_hook(lambda p: events.append(("there", bits(p.grad))))
    return accumulator  # which the parameter does not hold


Backward = Callable[[nn.Module, Tensor], object]


def by_backward(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


def twice(model: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def towards_some(model: nn.Module, loss: Tensor) -> list[bytes | None]:
    """Hooks of tensors are called here as well; those of accumulators are not."""
    wanted = [*model.parameters()][::2]
    return [bits(gradient) for gradient in torch.autograd.grad(loss, wanted, allow_unused=True)]


def run(kind: str, backend: Backend, backward: Backward, is_on: bool) -> tuple[Any, list[Any]]:
    """Events of each parameter, and gradients; None where there is none."""
    torch.manual_seed(0)
    layers = nn.Sequential(Experts(), Experts())
    model = OFFLOADS[kind](layers, backend)[0] if is_on else moved(layers, backend.device)
    events: list[list[Any]] = [[] for _ in model.parameters()]
    accumulators = [*map(listen, model.parameters(), events)]
    gradients: list[Any] = []
    for step, experts in enumerate([(0, 0), (1, 2), (1, 1), (2, 0)]):
        x = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(step)) / 8
        for number, expert in enumerate(experts):
            x[2 * number, 0] += expert
        x = x.to(backend.device)
        if kind == "parts" and not is_on:
            x = torch.cat([model(part) for part in x.chunk(2)])
        elif kind == "checkpointed" and is_on:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
        else:
            x = model(x)
        gradients.append(backward(model, x.square().sum()))
    gradients += [bits(parameter.grad) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a gradient with a graph refers to its parameter
    del accumulators
    return events, gradients


@pytest.mark.parametrize("backward", [by_backward, twice, towards_some])
@pytest.mark.parametrize("kind", OFFLOADS)
def test_hooks_are_called_as_of_the_plain_model(
    active: Backend, kind: str, backward: Backward
) -> None:
    """Each as often, with the same values; and who has no gradient has none."""
    events, gradients = run(kind, active, backward, is_on=True)
    assert (events, gradients) == run(kind, active, backward, is_on=False)
    assert any(events) and None in gradients[4:], "nobody used the spare ones"
