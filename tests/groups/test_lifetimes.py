"""Who keeps what alive: open groups, dropped graphs, idle memory of a manager that was replaced."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import make_backend, on_two_backends
from helpers.nets import Net, inputs, train
from helpers.sessions import assert_same, begin_microbatch, begin_step, group, session
from helpers.toy import batches, make_model, run_step
from torch import Tensor, nn

from pp_offload import OffloadActivations, PipelineOffloadManager, release_host_memory
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import cpu


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
    got = torch.autograd.grad(y, x)
    assert_same(got, torch.autograd.grad((x * 2).sin().sum(), x))


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
    """When that of the next chunk begins; not if its tensors are alive, for they may be used."""
    model = make_model(device=manager.backend.device.type)
    losses, groups = [], []
    for x in batches(3):
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
        assert is_alive == [number == 0, True, True]
    assert manager.step.num_chunks == 3
    losses[1].backward()
    manager.reset()
    assert len(manager.offloader.plan.names) == 3 and manager.offload_summary_bytes
