"""Who keeps what alive: open groups, dropped graphs, idle memory of a manager that was replaced."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from conftest import make_backend
from processes import HANG_S
from torch import Tensor, nn
from toy import batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._core.tensors import StorageSet
from pp_offload._groups.offloader import Offloader
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import CpuBackend, cpu


def last_first(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """All forwards, then the backwards in reverse; the gradients."""
    off_interface.reset()
    losses = []
    for x in inputs:
        off_interface.init_chunk_handler(None, None, 1)
        losses.append(model(x).square().mean())
    for loss in reversed(losses):
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def test_every_step_offloads_when_the_last_forward_goes_backward_first(
    manager: PipelineOffloadManager,
) -> None:
    model = make_model().to(manager.backend.device)
    inputs = [x.to(manager.backend.device) for x in batches(4)]
    moved = [0]
    gradients = []
    for _ in range(3):
        gradients.append(last_first(model, inputs))
        moved.append(manager.statistics().bytes_offloaded)
    by_step = [b - a for a, b in zip(moved, moved[1:], strict=False)]
    assert by_step[0] > 0
    assert by_step[1] == by_step[2] >= 0.9 * by_step[0], "only the very last groups may stay"
    assert same_bits(gradients[0], gradients[1]) and same_bits(gradients[0], gradients[2])


def test_what_a_dropped_graph_saved_may_change_and_is_not_moved(
    manager: PipelineOffloadManager,
) -> None:
    device = manager.backend.device
    weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).to(device))

    def loss(h: Tensor) -> Tensor:
        with off_interface(True, h, "g"):
            (h * h).sum().item()  # a graph nobody keeps
            h = h.mul_(2)
            y = h @ weight
        return off_interface.group_commit(y, name="g").sum()

    manager.init_model_chunk_offload_handler(None, None, 1)
    x = torch.linspace(0, 1, 40).view(5, 8).to(device).requires_grad_()
    got = torch.autograd.grad(loss(x * 1), [x, weight])
    assert manager.statistics().bytes_offloaded == 160, "h alone, for the weight's gradient"
    manager.disable_offload()
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    assert same_bits(got, torch.autograd.grad(loss(x * 1), [x, weight]))


def test_a_payload_used_twice_is_reloaded_once_in_every_backward(
    manager: PipelineOffloadManager,
) -> None:
    device = manager.backend.device
    weights = [nn.Parameter(torch.randn(8, 8).to(device)) for _ in range(3)]
    x = torch.randn(5, 8).to(device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 1
    with off_interface(True, h, "qkv"):
        y = sum(h @ weight for weight in weights)
    loss = off_interface.group_commit(y, name="qkv").sum()
    del h, y
    manager.backend.synchronize()
    assert manager.statistics().bytes_in_flight == 0, "or it would be taken back"
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    once = manager.statistics().bytes_reloaded
    second = torch.autograd.grad(loss, weights)
    assert same_bits(first, second)
    assert once == 160
    assert manager.statistics().bytes_reloaded == 2 * once


@pytest.mark.parametrize("how", ["reset_instance", "use_backend"])
def test_a_manager_that_goes_gives_its_idle_memory_back(how: str) -> None:
    before = reserved_bytes()
    config = OffloadConfig(min_offloaded_tensor_size=1)
    if how == "use_backend":
        with use_backend(CpuBackend(), config=config) as manager:
            run_step(make_model(), batches(2))
            assert reserved_bytes() > before
    else:
        manager = PipelineOffloadManager(config=config, backend=CpuBackend())
        PipelineOffloadManager.OFFLOAD_MGR = manager
        run_step(make_model(), batches(2))
        assert reserved_bytes() > before
        PipelineOffloadManager.reset_instance()
    assert reserved_bytes() == before
    assert manager.statistics().host_bytes_reserved == 0


def test_a_copy_that_fails_on_its_thread_never_gives_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such memory")

    config = OffloadConfig(min_offloaded_tensor_size=1)
    x = torch.linspace(-1, 1, 40).requires_grad_()
    (expected,) = torch.autograd.grad((x * 1).sin().sum(), x)
    with use_backend(CpuBackend(inline_bytes=0), config=config) as manager:
        manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 1
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "foreach_copy_", fail)
            with off_interface(True, h, "g"):
                y = h.sin()
            loss = off_interface.group_commit(y, name="g").sum()
            del h, y
            with pytest.raises(RuntimeError, match="no such memory"):
                manager.backend.synchronize()
        manager.statistics()
        (got,) = torch.autograd.grad(loss, x)
        assert same_bits([got], [expected]), "the source is still there"


def test_the_threads_of_a_backend_end_with_it() -> None:
    gc.collect()
    before = set(threading.enumerate())
    for _ in range(10):
        with use_backend(
            CpuBackend(inline_bytes=0), config=OffloadConfig(min_offloaded_tensor_size=1)
        ):
            run_step(make_model(), batches(2))
        PipelineOffloadManager.reset_instance()
    gc.collect()
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(timeout=HANG_S)
    assert not any(thread.is_alive() for thread in started)


def test_no_python_code_runs_where_a_marked_tensor_dies() -> None:
    """What a signal handler raises there is printed and lost."""
    marked, tensor = StorageSet(), torch.ones(3)
    marked.add(tensor)
    called: list[str] = []
    sys.setprofile(
        lambda frame, event, _: called.extend([frame.f_code.co_name] * (event == "call"))
    )
    del tensor
    sys.setprofile(None)
    assert called == []
    assert len(marked) == 0


@pytest.mark.parametrize("is_delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("kind", ["late", "eager", "random"])
def test_a_tensor_saved_on_another_stream_is_let_go_in_order(kind: str, is_delayed: bool) -> None:
    """Its memory returns to the stream it was allocated on, which must wait for the copy as well.

    The program ordered the two streams before, when the engine still held the tensor.
    """
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=64)
    with use_backend(make_backend(kind), config=config) as manager:
        backend = manager.backend
        main, side = backend.current_stream(), backend.new_stream("side")

        def forward(x: Tensor, is_delayed: bool = False) -> Tensor:
            manager.init_model_chunk_offload_handler(None, None, 1)
            for _ in range(2):
                with off_interface(True, x, "g"):
                    x = x.sin()
                x = off_interface.group_commit(x, name="g", delay_offload=is_delayed)
            return x

        first = forward(torch.ones(2, 4, requires_grad=True) * 2)
        x = torch.ones(2, 4, requires_grad=True) * 3
        side.wait_stream(main)
        with backend.stream(side):
            second = forward(x * 2 if is_delayed else x, is_delayed)
        main.wait_stream(side)
        manager.flush_delayed_groups()
        del second, x
        third = forward(torch.ones(2, 4, requires_grad=True) * 4)
        manager.statistics()
        backend.check()
        del first, third


@pytest.mark.parametrize("is_stash", [False, True], ids=["groups", "all activations"])
def test_what_a_forward_without_groups_computed_is_let_go_in_order(is_stash: bool) -> None:
    """It saves nothing on its stream, and a forward on another one saves its output."""
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=0)
    with use_backend(make_backend("late"), config=config) as manager:
        backend = manager.backend
        main, side = backend.current_stream(), backend.new_stream("side")
        stash = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=1, config=config, backend=backend
        )

        def forward(x: Tensor, *, saves: bool) -> Tensor:
            off_interface.init_chunk_handler(None, None, 1)
            if is_stash:
                with stash:
                    return x.sin().cos() if saves else x.clone()
            for _ in range(2 if saves else 0):
                with off_interface(True, x, "g"):
                    y = x.sin()
                x = off_interface.group_commit(y, name="g")
            return x if saves else x.clone()

        side.wait_stream(main)
        with backend.stream(side):
            y = forward(torch.ones(2, 4, requires_grad=True), saves=False)
        main.wait_stream(side)
        first = forward(y, saves=True)
        del y
        second = forward(torch.ones(2, 4, requires_grad=True) * 2, saves=True)
        manager.statistics()
        backend.check()
        del first, second


def test_an_engine_that_goes_waits_for_its_own_copies_alone() -> None:
    """It may go where garbage is collected, in the middle of another one's queueing."""

    class Collected(CpuBackend):
        def synchronize(self) -> None:
            raise AssertionError("what is about to be queued would be waited for, for ever")

    engine = Offloader(Collected(inline_bytes=0), OffloadConfig()).engine
    going = weakref.ref(engine.mover)
    with pytest.MonkeyPatch.context() as patch:
        failures: list[object] = []
        patch.setattr("sys.unraisablehook", lambda hook: failures.append(hook.exc_value))
        del engine
        gc.collect()
    assert going() is None and not failures


@pytest.mark.parametrize("kind", ["late", "eager", "random"])
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


def test_a_forward_that_goes_on_is_foreseen_after_others_were_forgotten(
    manager: PipelineOffloadManager,
) -> None:
    """As on one thread, where another begins so many microbatches that those over are forgotten."""
    leaf = torch.ones(3, device=manager.backend.device, requires_grad=True)
    manager.init_model_chunk_offload_handler(None, None, 1)
    chunk = manager.forward.chunk
    assert chunk is not None
    y = leaf * 1
    for _ in range(3):
        with off_interface(True, y, "g"):
            manager.step.forget_finished()  # the first time, it has saved nothing yet
            y = y.exp()
        y = off_interface.group_commit(y, name="g")
    assert chunk.key is not None and manager.step.chunk(chunk.key) is chunk
    y.sum().backward()
    assert manager.statistics().on_demand_reloads <= 1, "the others came ahead"
