"""A checkpoint's recomputation: scopes inside take away what they took in its forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadModel,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    offload_modules,
    use_backend,
)
from pp_offload._hooks import checkpoint_regions
from pp_offload.backends import CpuBackend

Call = Callable[[Tensor], Tensor]

anew = partial(checkpoint, use_reentrant=False)


def group(name: str, x: Tensor, function: Call, *, is_on: bool = True) -> Tensor:
    with off_interface(is_on, x, name) as x:
        y = function(x)
    return off_interface.group_commit(y, name=name) if is_on else y


def sine(x: Tensor) -> Tensor:
    return x.sin().tanh()


class Net(nn.Module):
    """Every part saves tensors, all of one shape; ``mlp`` may be a group."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mlp, self.c = nn.Tanh(), nn.Tanh(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(3 * self.mlp(2 * self.a(x)))


@pytest.fixture
def x(manager: PipelineOffloadManager) -> Tensor:
    """In a step that has begun, one microbatch."""
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    return torch.linspace(-1, 1, 12).to(manager.backend.device).requires_grad_()


@pytest.fixture(autouse=True, params=[True, False], ids=["early stop", "to the end"])
def early_stop(request: pytest.FixtureRequest) -> Iterator[bool]:
    with set_checkpoint_early_stop(request.param):
        yield request.param
    assert_no_hooks()


def gradient(function: Call, x: Tensor, run: Any = anew) -> Tensor:
    (found,) = torch.autograd.grad(run(function, x * 1).sum(), x)
    return found


def plain(function: Call, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(function(x * 1).sum(), x)
    return found


PLACES: dict[str, Call] = {
    "start": lambda x: sine(2 * group("g", x, sine)),
    "middle": lambda x: sine(2 * group("g", sine(x), sine)),
    "end": lambda x: group("g", sine(2 * sine(x)), sine),
    "two": lambda x: sine(group("h", 2 * sine(group("g", x, sine)), sine)),
    "one in the other": lambda x: sine(2 * group("g", x, lambda x: group("h", x.cos(), sine) * x)),
    "around another": lambda x: sine(2 * group("g", x, lambda x: anew(sine, x.cos()) * x)),
    "in another": lambda x: sine(3 * anew(lambda x: sine(2 * group("g", x, sine)), x.cos())),
    "in and beside": lambda x: sine(
        group("h", anew(lambda x: sine(2 * group("g", x, sine)), x.cos()), sine)
    ),
}


@pytest.mark.parametrize("function", PLACES.values(), ids=PLACES)
def test_same_bits_and_nothing_twice(
    manager: PipelineOffloadManager, x: Tensor, function: Call
) -> None:
    loss = anew(function, x * 1).sum()
    moved = manager.statistics().bytes_offloaded
    chunk = manager.cur_forward_chunk()
    assert moved > 0 and chunk is not None
    num_groups = len(chunk.groups)
    (found,) = torch.autograd.grad(loss, x)
    del loss
    assert len(chunk.groups) == num_groups
    assert manager.statistics().bytes_offloaded == moved
    assert_idle(manager)
    manager.reset()  # without a chunk a group must fail, and so it would above
    with pytest.raises(GroupStateError, match="without a chunk"):
        function(x)
    manager.disable_offload()
    manager.init_model_chunk_offload_handler(None, None, 1)
    assert found.equal(plain(function, x))


@pytest.mark.parametrize("function", PLACES.values(), ids=PLACES)
def test_backward_again_and_again(
    manager: PipelineOffloadManager, x: Tensor, function: Call
) -> None:
    loss = anew(function, x * 1).sum()
    found = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    found += torch.autograd.grad(loss, x)
    assert same_bits(found, [plain(function, x)] * 3)


def test_by_module_name(manager: PipelineOffloadManager, x: Tensor) -> None:
    net = Net()
    expected = plain(net, x)
    with offload_modules(net, {"mlp": "mlp"}):
        assert gradient(net, x).equal(expected)
    assert manager.statistics().bytes_offloaded > 0
    assert_idle(manager)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_made_of_hooks(
    manager: PipelineOffloadManager, x: Tensor, is_first: bool, early_stop: bool
) -> None:
    """Its hook at the end of the forward comes before ours, and takes ours off."""
    net = Net()
    model = nn.Sequential(nn.Tanh(), net, nn.Tanh())
    expected = plain(model, x)
    if is_first:
        composable(net)
    inside = {"mlp": "1.mlp"} if is_first else {}  # else the group around runs again inside, too
    with offload_modules(model, {"net": "1", **inside}):
        if not is_first:
            composable(net)
        loss = model(x * 1).sum()
        assert_no_hooks()
        assert torch.autograd.grad(loss, x)[0].equal(expected)
    assert manager.statistics().bytes_offloaded > 0


@pytest.mark.parametrize("function", PLACES.values(), ids=PLACES)
def test_looking_at_a_saved_tensor(
    manager: PipelineOffloadManager, x: Tensor, function: Call
) -> None:
    """A recomputation, although no backward runs."""
    y = anew(lambda x: sine(function(x).exp()) * x, x * 1)
    moved, chunk = manager.statistics().bytes_offloaded, manager.cur_forward_chunk()
    assert chunk is not None
    num_groups = len(chunk.groups)
    y.grad_fn._saved_self  # type: ignore[union-attr] # noqa: B018
    assert len(chunk.groups) == num_groups
    assert chunk.find_next_group() is None
    assert manager.statistics().bytes_offloaded == moved
    manager.reset()
    assert manager.statistics().bytes_offloaded == moved


def other_manager(manager: PipelineOffloadManager) -> None:
    PipelineOffloadManager.OFFLOAD_MGR = other = PipelineOffloadManager(backend=CpuBackend())
    other.num_attached = 1


def next_chunk(manager: PipelineOffloadManager) -> None:
    manager.init_model_chunk_offload_handler(None, None, 1)


CHANGES = [
    PipelineOffloadManager.reset,
    PipelineOffloadManager.disable_offload,
    PipelineOffloadManager.enable_offload,
    other_manager,
    next_chunk,
]


@pytest.mark.parametrize("before", CHANGES)
@pytest.mark.parametrize("between", CHANGES)
def test_the_forward_decides(before: Any, between: Any) -> None:
    x = torch.linspace(-1, 1, 12).requires_grad_()
    with use_backend(CpuBackend()) as manager:
        manager.num_attached = 1  # without a chunk, groups do nothing
        expected = plain(PLACES["middle"], x)
        next_chunk(manager)
        before(manager)
        loss = anew(PLACES["middle"], x * 1).sum()
        between(manager)
        (found,) = torch.autograd.grad(loss, x)
    assert found.equal(expected)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_switch_that_is_turned_between_forward_and_backward(x: Tensor, is_on: bool) -> None:
    switch = [is_on]

    def function(x: Tensor) -> Tensor:
        x = 2 * group("g", sine(x), sine, is_on=switch[0])
        return sine(group("h", x, sine, is_on=not is_on))

    loss = anew(function, x * 1).sum()
    switch[0] = not is_on
    (found,) = torch.autograd.grad(loss, x)
    assert found.equal(plain(lambda x: sine(sine(2 * sine(sine(x)))), x))


def test_several_frames_of_one_layer(manager: PipelineOffloadManager, x: Tensor) -> None:
    """With a chunk, without grad inside, and disabled; backward in both orders."""
    expected, losses = plain(PLACES["middle"], x), []
    for change in (next_chunk, PipelineOffloadManager.disable_offload, next_chunk):
        change(manager)
        losses.append(anew(PLACES["middle"], x * 1).sum())
    manager.enable_offload()
    for one in (0, 2, 1):
        assert torch.autograd.grad(losses[one], x)[0].equal(expected)


def test_a_handle_removed_before_backward_is_an_error(x: Tensor) -> None:
    net = Net()
    with offload_modules(net, {"mlp": "mlp"}):
        loss = anew(net, x * 1).sum()
    with pytest.raises(GroupStateError, match=r"finds none as scope .* 'mlp', behind 1 saved"):
        loss.backward()


def test_another_name_is_an_error(x: Tensor) -> None:
    names = ["then"]
    loss = anew(lambda x: sine(group(names[0], sine(x), sine)), x * 1).sum()
    names[0] = "now"
    with pytest.raises(GroupStateError, match=r"finds 'now'.* expected 'then', behind 2 saved"):
        loss.backward()


def test_more_groups_than_in_forward_is_an_error(x: Tensor) -> None:
    names = ["first"]

    def function(x: Tensor) -> Tensor:
        for name in names:
            x = group(name, x, sine)
        return sine(x)

    loss = anew(function, x * 1).sum()
    names.append("second")
    with pytest.raises(GroupStateError, match=r"finds 'second' as scope number 2 .*expected none"):
        loss.backward()


def test_a_group_of_the_same_name_elsewhere_is_an_error(x: Tensor) -> None:
    net = nn.Sequential(*(nn.Tanh() for _ in range(4)))
    handles = [offload_modules(net, {"g": name}) for name in ("0", "1")]
    loss = anew(net, x * 1).sum()
    handles[0].remove()
    with pytest.raises(GroupStateError, match=r"'g', behind 1 saved .* expected 'g', behind 0"):
        loss.backward()


def test_an_error_in_the_recomputation_is_its_own(x: Tensor) -> None:
    errors: list[Exception] = []

    def function(x: Tensor) -> Tensor:
        y = group("g", sine(x), sine)
        for error in errors:
            raise error
        return sine(y)

    loss = anew(function, x * 1).sum()
    errors.append(ZeroDivisionError("mine"))
    with pytest.raises(ZeroDivisionError, match="mine"):
        loss.backward()


@pytest.mark.parametrize("is_retained", [True, False])
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_backward_inside_the_region(
    manager: PipelineOffloadManager, x: Tensor, where: str, is_retained: bool
) -> None:
    """The region runs again before its forward has ended."""

    def step(x: Tensor, y: Tensor, here: str) -> Tensor:
        if here != where:
            return y
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=is_retained)
        return y.detach().exp() * x + g

    def function(x: Tensor) -> Tensor:
        y = step(x, sine(x), "before")
        y = group("g", y * x, lambda y: sine(step(x, sine(y), "inside")))
        return sine(step(x, group("h", 2 * sine(y), sine), "after") * x)

    assert gradient(function, x).equal(plain(function, x))
    assert_idle(manager)


def test_the_context_of_the_manager(manager: PipelineOffloadManager, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        x = fine_grained_offloading_group_start(sine(x), "g")
        with off_interface.get_context(True):
            x = sine(x)
        return sine(2 * off_interface.group_commit(x, name="g"))

    expected = plain(function, x)
    moved = manager.statistics().bytes_offloaded
    loss = anew(function, x * 1).sum()
    assert manager.statistics().bytes_offloaded > moved
    fine_grained_offloading_group_start(x, "open")
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    (found,) = torch.autograd.grad(loss, x)
    assert found.equal(expected)
    assert not chunk.groups[-1].saved_refs


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_runs_again_inside_the_context_joins_no_group(
    manager: PipelineOffloadManager, x: Tensor, use_reentrant: bool
) -> None:
    y = checkpoint(sine, x * 1, use_reentrant=use_reentrant).sum()
    fine_grained_offloading_group_start(x, "open")
    chunk = manager.cur_forward_chunk()
    with manager:
        y.backward()
    assert chunk is not None and not chunk.groups[-1].saved_refs


def test_delayed_commits(manager: PipelineOffloadManager, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        with off_interface(True, x, "g") as x:
            y = sine(x)
        y = off_interface.group_commit(sine(y), name="g", delay_offload=True)
        return sine(y)

    expected = plain(function, x)
    loss = anew(function, x * 1).sum()
    manager.flush_delayed_groups()
    moved = manager.statistics().bytes_offloaded
    assert moved > 0
    (found,) = torch.autograd.grad(loss, x)
    assert found.equal(expected)
    assert not manager.wiring.delayed
    assert manager.statistics().bytes_offloaded == moved


@pytest.mark.parametrize("checkpoint_activation", [True, False])
@pytest.mark.parametrize("is_around", [True, False])
def test_groups_in_an_offload_model(
    manager: PipelineOffloadManager, x: Tensor, checkpoint_activation: bool, is_around: bool
) -> None:
    """Its own hooks pass on what is no parameter."""

    class Layer(nn.Module):
        def __init__(self, is_on: bool) -> None:
            super().__init__()
            self.linear, self.is_on = nn.Linear(12, 12), is_on

        def forward(self, x: Tensor) -> Tensor:
            y = group("g", sine(x), lambda x: sine(self.linear(x)), is_on=self.is_on)
            return sine(2 * y)

    def run(is_on: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(*(Layer(is_on) for _ in range(3)))
        device = manager.backend.device
        if is_on:
            model = OffloadModel(
                model,
                device,
                num_slices=2,
                checkpoint_activation=checkpoint_activation,
                backend=manager.backend,
            )
        model.to(device) if not is_on else None
        loss = (anew(model, x * 1) if is_around and is_on else model(x * 1)).sum()
        found = torch.autograd.grad(loss, [x, *model.parameters()])
        return [one.cpu() for one in found]

    assert same_bits(run(True), run(False))
    assert_idle(manager)


@pytest.mark.parametrize("is_chaining", [True, False])
def test_inside_hooks_of_others(
    manager: PipelineOffloadManager, x: Tensor, is_chaining: bool
) -> None:
    """They may pass on what they get to the hooks around them, or keep it."""

    def function(x: Tensor) -> Tensor:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = hooks if is_chaining and hooks else ((lambda x: x.detach()),) * 2
        with saved_tensors_hooks(lambda x: pack(x), lambda x: unpack(x)):
            x = sine(group("g", sine(x), sine))
        return sine(2 * x)

    expected = plain(function, x)
    assert gradient(function, x).equal(expected)
    assert gradient(lambda x: sine(anew(function, x)), x).equal(
        plain(lambda x: sine(function(x)), x)
    )


@pytest.mark.parametrize("is_looking", [True, False])
def test_a_context_for_all_activations_inside(x: Tensor, is_looking: bool) -> None:
    manager = PipelineOffloadManager.get_instance()
    offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=manager.backend)

    def function(x: Tensor) -> Tensor:
        with offload:
            x = sine(group("g", sine(x), sine))
        return sine(2 * x).exp()

    expected = plain(function, x)
    moved = offload.statistics().bytes_offloaded
    y = anew(function, x * 1)
    moved, before = offload.statistics().bytes_offloaded, moved
    assert moved > before
    if is_looking:
        y.grad_fn._saved_result  # type: ignore[union-attr] # noqa: B018
    assert torch.autograd.grad(y.sum(), x)[0].equal(expected)
    assert offload.statistics().bytes_offloaded == moved


def test_unknown_hooks_of_a_checkpoint_are_left_alone(
    manager: PipelineOffloadManager, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_regions, "_is_known", False)
    for function in PLACES.values():
        expected = plain(function, x)
        before = manager.statistics().bytes_offloaded
        assert gradient(function, x).equal(expected)
        assert manager.statistics().bytes_offloaded == before


def test_the_frame_is_gone_with_its_graph(x: Tensor) -> None:
    """Nothing waits for the garbage collector."""
    frames = []

    def function(x: Tensor) -> Tensor:
        frames.append(weakref.ref(checkpoint_regions._frame_of(checkpoint_regions.top_pack())))
        return sine(group("g", sine(x), sine))

    gc.collect()
    gc.disable()
    try:
        loss = anew(function, x * 1).sum()
        assert frames[0]() is not None
        del loss
        assert frames[0]() is None
    finally:
        gc.enable()


def test_a_model_that_begins_its_own_chunks_is_run_again(manager: PipelineOffloadManager) -> None:
    """Its recomputation begins no chunk: groups of a forward that goes on keep theirs."""

    def model(x: Tensor) -> Tensor:
        off_interface.init_chunk_handler(None, None, 1)
        with off_interface(True, x, "a") as x:
            y = torch.tanh(x)
        return torch.tanh(2 * off_interface.group_commit(y, name="a"))

    x = torch.ones(3, device=manager.backend.device, requires_grad=True)
    manager.reset()
    loss = checkpoint(model, x, use_reentrant=False, early_stop=False).sum()
    manager.init_model_chunk_offload_handler(None, None, 1)
    following = manager.cur_forward_chunk()
    loss.backward()
    assert manager.cur_forward_chunk() is following


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_group_without_grad_the_first_time_only(
    manager: PipelineOffloadManager, early_stop: bool
) -> None:
    """As for a calibration: it saves nothing, so the recomputation may do without it."""

    def run(is_on: bool) -> Tensor:
        calibrated: list[Tensor] = []

        def part(x: Tensor) -> Tensor:
            with off_interface(is_on, x, "a") as x:
                y = torch.tanh(2 * x)
            return off_interface.group_commit(y, name="a") if is_on else y

        def region(x: Tensor) -> Tensor:
            if not calibrated:
                with torch.no_grad():
                    calibrated.append(part(x).mean())
            return torch.tanh(3 * part(x) * calibrated[0]).sin()

        x = torch.linspace(-1, 2, 6, device=manager.backend.device).requires_grad_()
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        checkpoint(region, x, use_reentrant=False, early_stop=early_stop).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(True), run(False))
    assert_idle(manager)
