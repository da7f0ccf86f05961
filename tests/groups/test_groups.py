"""Groups: open, then offloaded or kept; whom they keep alive; and where operators are recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import BEFORE_2_13, make_backend, on_two_backends
from helpers.sessions import (
    assert_no_hooks,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    gradients,
    group,
    session,
    settle,
)
from helpers.toy import Net, batches, inputs, make_model, run_step, train
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadTensorGroup,
    PipelineOffloadManager,
    checkpoint,
    release_host_memory,
)
from pp_offload._core.group import GroupState
from pp_offload._megatron.chunk import ChunkOffloadHandler
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import Backend, cpu


def test_a_pushed_tensor_is_popped_by_its_tag_once() -> None:
    group = OffloadTensorGroup("mlp")
    tensor, other = torch.ones(2), torch.zeros(2)
    group.push_tensor((1, 2), tensor)
    group.push_tensor("other", other)
    assert group.pop_tensor((1, 2)) is tensor and group.pop_tensor("other") is other
    group.push_tensor("forgotten", tensor)
    group.move_to(GroupState.KEPT)
    for tag in ((1, 2), "forgotten"):
        with pytest.raises(KeyError):
            group.pop_tensor(tag)


@pytest.mark.parametrize(("kind", "other"), [("offload", "reload"), ("reload", "offload")])
def test_an_event_recorded_on_one_stream_is_waited_for_by_another(kind: str, other: str) -> None:
    group, copying, compute = OffloadTensorGroup("mlp"), Mock(), Mock()
    getattr(group, f"record_{kind}_event")(copying)
    getattr(group, f"wait_{other}_event")(compute)
    assert not compute.wait_event.called, "the events are not confused"
    getattr(group, f"wait_{kind}_event")(compute)
    compute.wait_event.assert_called_once_with(copying.record_event())


@on_two_backends
def test_a_group_leaves_when_a_user_of_the_reference_says_so(chunk: ChunkOffloadHandler) -> None:
    x = torch.ones(4, 4).to(chunk.offloader.backend.device)
    saved = chunk.on_group_start_forward("sent").pack(x * 2)
    chunk.bulk_offload_group()
    chunk.on_group_start_forward("empty")
    chunk.on_group_commit_forward(None)
    assert [group.state for group in chunk.groups] == [GroupState.OFFLOADED, GroupState.KEPT]
    with pytest.raises(GroupStateError, match="'sent' is offloaded and cannot become kept"):
        chunk.groups[0].move_to(GroupState.KEPT)
    assert_same([saved.unpack()], [x * 2])


@on_two_backends
@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("none", [GroupState.OPEN, GroupState.OFFLOADED]),
        ("inner", [GroupState.OPEN]),
        ("outer", [GroupState.OFFLOADED]),
    ],
)
def test_a_group_in_a_group_of_the_same_name(
    left_out: str, expected: list[GroupState], manager: PipelineOffloadManager, chunk: Any
) -> None:
    """The inner commit is the inner group's; offload may be switched for one of them."""
    x = torch.ones(4, 4).to(manager.backend.device).requires_grad_()
    switch = {True: manager.disable_offload, False: manager.enable_offload}
    switch[left_out == "outer"]()
    with off_interface(True, x, "a"):
        switch[left_out == "inner"]()
        with off_interface(True, x, "a"):
            y = x.sin()
        manager.enable_offload()
        off_interface.group_commit(y, name="a")
        assert [group.state for group in chunk.groups] == expected
        assert (manager.statistics().bytes_offloaded == 0) is (left_out == "inner")
    assert_no_hooks()
    off_interface.group_commit(y, name="a")
    assert not chunk.open_groups
    assert all(group.state is not GroupState.OPEN for group in chunk.groups)
    y.sum().backward()
    assert_same(gradients(x), [x.cos()])


# Who keeps what alive: graphs, open groups, idle memory


@on_two_backends
def test_what_a_dropped_graph_saved_may_change_and_is_not_moved(
    manager: PipelineOffloadManager,
) -> None:
    device = manager.backend.device
    weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).to(device))
    x = torch.linspace(0, 1, 40).view(5, 8).to(device).requires_grad_()

    def compute(h: Tensor) -> Tensor:
        (h * h).sum().item()  # a graph nobody keeps
        return h.mul_(2) @ weight

    begin_step()
    got = torch.autograd.grad(group(x * 1, compute).sum(), [x, weight])
    assert manager.statistics().bytes_offloaded == 160, "h alone, for the weight's gradient"
    assert_same(got, torch.autograd.grad(compute(x * 1).sum(), [x, weight]))


@on_two_backends
def test_host_memory_is_returned_and_the_next_step_is_right(
    manager: PipelineOffloadManager,
) -> None:
    """And a living graph keeps what it needs."""
    device = manager.backend.device
    xs = [x.to(device) for x in batches(2)]
    expected = run_step(make_model(groups=(), device=str(device)), xs, offload=False)
    gc.collect()  # engines of other tests, or they would go meanwhile
    assert release_host_memory() == 0
    before = reserved_bytes()
    for _ in range(2):
        assert_same(run_step(make_model(device=str(device)), xs), expected)
        manager.reset()
        held = reserved_bytes() - before
        assert held > 0
        assert release_host_memory() == held
        assert manager.statistics().host_bytes_reserved == 0
    begin_step()
    x = xs[0].requires_grad_()
    y = group(x * 2, torch.sin).sum()
    assert release_host_memory() == 0, "a graph is alive"
    assert_same(torch.autograd.grad(y, x), torch.autograd.grad((x * 2).sin().sum(), x))


@pytest.mark.parametrize("how", ["reset_instance", "use_backend"])
def test_a_manager_that_goes_gives_its_idle_memory_back(how: str) -> None:
    gc.collect()  # engines of other tests, or they would go meanwhile
    before = reserved_bytes()
    with session("cpu") as manager:
        train(Net(), inputs(2), True)
        assert reserved_bytes() > before
        if how == "reset_instance":
            PipelineOffloadManager.reset_instance()
            assert reserved_bytes() == before
    assert reserved_bytes() == before
    assert manager.statistics().host_bytes_reserved == 0


def test_a_copy_that_fails_on_its_thread_never_gives_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such memory")

    x = torch.linspace(-1, 1, 40).requires_grad_()
    with session("threads") as manager:
        begin_step()
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "foreach_copy_", fail)
            loss = group(x * 1, torch.sin).sum()
            with pytest.raises(RuntimeError, match="no such memory"):
                manager.backend.synchronize()
        manager.statistics()
        got = torch.autograd.grad(loss, x)
        assert_same(got, torch.autograd.grad((x * 1).sin().sum(), x))  # the source is still there


@pytest.mark.parametrize("kind", ["late", "random"])
def test_host_memory_goes_behind_the_copies_that_read_it(kind: str) -> None:
    """Compute has waited for them, and the host has not."""
    backend = make_backend(kind)
    with backend.activate():
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)
        x = torch.ones(2, 4, requires_grad=True)
        with context:
            y = (x * 2).sin().cos()
        backend.synchronize()  # or what leaves would be taken back
        context.statistics()
        y.sum().backward()
        assert context.statistics().bytes_reloaded > 0
        del y, context
        gc.collect()
        backend.check()


@on_two_backends
def test_of_a_chunk_whose_backward_is_over_a_record_is_kept(
    manager: PipelineOffloadManager,
) -> None:
    """When that of a later chunk begins; not if its tensors are alive, for they may be used."""
    model = make_model(device=manager.backend.device.type)
    losses, groups = [], []
    for x in batches(4):
        begin_microbatch()
        losses.append(model(x.to(manager.backend.device)).sum())
        chunk = manager.cur_forward_chunk()
        assert chunk is not None
        groups.append([weakref.ref(group) for group in chunk.groups])
    del chunk
    manager.end_chunk()
    for number, loss in enumerate(losses):
        loss.backward(retain_graph=number == 1)
        is_alive = [any(ref() is not None for ref in refs) for refs in groups]
        assert is_alive == [number == 0, number < 3, number < 3, True]
        losses[1] = losses[1] if number < 2 else losses[2]  # frees its graph
    assert manager.step.num_chunks == 4
    manager.reset()
    assert len(manager.offloader.plan.names) == 4 and manager.offload_summary_bytes


@on_two_backends
@pytest.mark.parametrize("case", ["all", "last unused", "auxiliary loss", "failed", "dropped"])
def test_a_step_is_complete_if_backward_came_through_each_chunk(
    manager: PipelineOffloadManager, case: str
) -> None:
    """A loss need not need all groups. In flight is what backward still needs, kept or not."""
    is_complete = case not in ("failed", "dropped")
    for _ in range(3):
        begin_step()
        states = [inputs(1)[0].to(manager.backend.device).requires_grad_()]
        for _ in range(4):
            states.append(group(states[-1], lambda x: x.sin().cos()))
        loss = states[3 if case == "last unused" else 4].sum()
        if case == "failed":
            states[2].register_hook(Mock(side_effect=ZeroDivisionError))
        elif case == "auxiliary loss":
            states[2].sum().backward(retain_graph=True)
        del states
        assert manager.step.in_flight() == ((0, 1),)
        with pytest.raises(ZeroDivisionError) if case == "failed" else nullcontext():
            loss.backward() if case != "dropped" else None
        del loss
        assert manager.step.in_flight() == (() if is_complete else ((0, 1),))
    manager.reset()
    assert bool(manager.offload_summary_bytes) == is_complete


# Forced release empties what was copied and nobody else needs, and nothing else

NBYTES = 160


def leaf_on(manager: PipelineOffloadManager) -> Tensor:
    return torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()


def saved_in(manager: Any, x: Tensor) -> Tensor:
    with manager:
        return x * torch.ones_like(x, requires_grad=True)


NEEDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "nobody": lambda manager, x: None,
    "parameter": lambda manager, x: None,
    "saved outside": lambda manager, x: saved_in(nullcontext(), x),
    "saved in the manager": saved_in,
    "view": lambda manager, x: x.view(4, 10),
    "storage": lambda manager, x: x.untyped_storage(),
    "offload disabled": lambda manager, x: manager.disable_offload(),
    "too small": lambda manager, x: manager.init_model_chunk_offload_handler(None, None, 41),
}
"""Who needs a tensor besides its group, or why it does not leave."""


@pytest.mark.field("F09")
@on_two_backends
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "output"])
@pytest.mark.parametrize("who", NEEDS)
def test_what_others_need_stays(manager: PipelineOffloadManager, who: str, is_leaf: bool) -> None:
    results = []
    for is_on in (False, True):
        begin_step()
        leaf, weight = leaf_on(manager), leaf_on(manager)
        if who == "parameter":
            leaf = nn.Parameter(leaf)
        x = leaf if is_leaf or who == "parameter" else leaf * 2
        other = NEEDS[who](manager, x)
        y = group(x, lambda _, x=x, w=weight: x * w, is_on, forced_released_tensors=[x])
        if is_on:
            settle(manager)
            assert x.untyped_storage().nbytes() == (0 if who == "nobody" else NBYTES)
        (y.sum() + (other.sum() if isinstance(other, Tensor) else 0)).backward()
        results.append(gradients(weight, leaf))
    assert_same(*results)


@on_two_backends
def test_a_marked_tensor_that_nothing_has_saved_stays(manager: PipelineOffloadManager) -> None:
    begin_step()
    x = leaf_on(manager)
    marked = x.detach() * 2
    manager.mark_not_offloadable(marked)
    group(x * 3, torch.sin, forced_released_tensors=[marked])
    settle(manager)
    assert marked.untyped_storage().nbytes() == NBYTES


@on_two_backends
@pytest.mark.parametrize("holder", ["nobody", "user", "autograd"])
def test_a_view_is_emptied_if_nobody_needs_its_base(
    manager: PipelineOffloadManager, holder: str
) -> None:
    """The base shares the storage through the view, without being counted among its holders."""
    begin_step()
    leaf = leaf_on(manager)
    weight = torch.ones_like(leaf).requires_grad_()
    base = leaf.view(4, 10) * 2
    x = base.view(40)
    other = base * weight.view(4, 10) if holder == "autograd" else torch.zeros_like(leaf)
    held = base if holder == "user" else None
    del base
    y = group(x, lambda _: x * weight, forced_released_tensors=[x])
    settle(manager)
    assert x.untyped_storage().nbytes() == (0 if holder == "nobody" else NBYTES)
    if held is not None:
        assert_same([held.view(40)], [leaf * 2])
    (gradient,) = torch.autograd.grad(y.sum() + other.sum(), weight)
    assert_same([gradient], [leaf * (4 if holder == "autograd" else 2)])


# Where operators are recorded as a graph, or stand for others, what is saved stays


Function = Callable[[Tensor], Tensor]

WIDTH = 40


def compute(x: Tensor) -> Tensor:
    """Saves some tensors, of which none is another's view."""
    return torch.tanh(x @ x.t()) * x.sin().sum(1)


def plain(x: Tensor) -> Tensor:
    return compute(compute(x))


def some_input(backend: Backend, seed: int) -> Tensor:
    return drawn(WIDTH, WIDTH, seed=seed).to(backend.device)


def gradient(run: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(run(x).sum(), x)[0]


@pytest.fixture(params=["groups", "context", "checkpoint"])
def run(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Function]:
    """A program with offload. Behind the test, a step of it is offloaded as ever."""
    with session(backend) as manager:
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)

        def run(x: Tensor) -> Tensor:
            if request.param == "groups":
                return group(group(x, compute, name="a"), compute, name="b")  # type: ignore[no-any-return]
            if request.param == "context":
                with context:
                    return plain(x)
            for _ in range(2):
                x = checkpoint(compute, x, offload_inputs=True)
            return x

        begin_microbatch()
        yield run
        begin_step()
        x = some_input(backend, 2)
        assert torch.equal(gradient(run, x), gradient(plain, x))
        manager.reset()
        assert manager.statistics().live_tensors == context.statistics().live_tensors == 0


@on_two_backends
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_recorded_step_is_right_for_other_inputs(
    backend: Backend, run: Function, mode: str
) -> None:
    recorded = make_fx(lambda x: gradient(run, x), tracing_mode=mode)(some_input(backend, 0))
    other = some_input(backend, 1)
    assert torch.equal(recorded(other), gradient(plain, other))


@on_two_backends
def test_a_forward_recorded_early_has_no_copies(backend: Backend, run: Function) -> None:
    """As ``torch.export`` records one, above autograd."""
    recorded = make_fx(run, pre_dispatch=True)(some_input(backend, 0).requires_grad_())
    assert not [node for node in recorded.graph.nodes if "copy" in str(node.target)]
    other = some_input(backend, 1)
    assert torch.equal(recorded(other), plain(other))


@on_two_backends
def test_a_transformed_step_is_right(
    backend: Backend, run: Function, request: pytest.FixtureRequest
) -> None:
    if BEFORE_2_13 and "checkpoint" in request.node.callspec.params.values():
        pytest.skip("PyTorch's checkpoints refuse it before torch 2.13")
    x = some_input(backend, 0)[:4, :4].contiguous().requires_grad_()
    assert torch.equal(torch.func.jacfwd(run)(x), torch.func.jacfwd(plain)(x))
