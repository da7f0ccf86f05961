"""Rules whose breach only an unlucky order shows: each is broken here in an order made by hand."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from pp_offload._memory.disk import DiskFile
from pp_offload._memory.host import HostMemory
from pp_offload._memory.unfinished import Unfinished
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.outgoing import PACK_BYTES, packs
from pp_offload._transfer.ticket import PayloadTicket, SavedActivation, Ticket, hand_over
from pp_offload._transfer.tiers import host_engine
from processes import HANG_S
from test_disk import LateThreads, disk_manager, disk_of, tickets_of
from test_disk_tier import read, some_bytes
from test_host_tier import LateEvent
from test_lifetimes import functions_called
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    PipelineOffloadManager,
    SavedTensorModifiedError,
    use_backend,
)
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._checkpoint.selective import OpPolicy
from pp_offload._core.tensors import StorageSet
from pp_offload._groups.split_backward import BackwardPass, SplitBackward
from pp_offload._memory.budget import HostBudget, reserved_bytes
from pp_offload._memory.slabs import SMALLEST_BYTES as SLAB_BYTES
from pp_offload._policy.plan import ChunkKey, GroupKey
from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend
from pp_offload.testing.happens_before import VectorClock

SIMULATED = ["late", "eager", "random"]


class Owner:
    """The group of tensors that are in none."""

    name = "g"
    is_used = True

    def on_use(self) -> None: ...


def late_engine() -> tuple[SimulatedBackend, TransferEngine]:
    """Copies to host memory, each as late as the program permits."""
    backend = SimulatedBackend("late")
    return backend, host_engine(backend, HostMemory(backend.allocate_host), 2**30)


def ticket_for(engine: TransferEngine, tensor: Tensor) -> tuple[SavedActivation, Ticket]:
    """A saved tensor, and the ticket of its whole storage."""
    saved = SavedActivation(tensor, Owner())
    return saved, PayloadTicket(engine, "g", tensor, [saved], tensor.untyped_storage())


def settle(manager: PipelineOffloadManager) -> None:
    """All copies were made, and their sources let go."""
    manager.backend.synchronize()
    manager.offloader.engine.mover.poll()


# A storage that two groups saved


@pytest.mark.parametrize("version", [0, 1])
def test_a_copy_of_an_older_version_is_not_shared(
    manager: PipelineOffloadManager, version: int
) -> None:
    """The first group's copy was made, so it harms nobody that the tensor changes afterwards."""
    device = manager.backend.device
    x = torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 2
    for _ in range(version):
        h.mul_(1)

    def group(h: Tensor) -> Tensor:
        with off_interface(True, h, "g"):
            y = h.sin()
        return off_interface.group_commit(y, name="g")

    first = group(h)
    settle(manager)
    with torch.no_grad():
        h += 1
    second = group(h)
    assert manager.statistics().bytes_offloaded == 2 * h.nbytes
    got = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (first, second)]
    before = x.detach() * 2
    assert same_bits(got, [before.cos() * 2, (before + 1).cos() * 2])
    del first, second, h
    assert_idle(manager)


# Memory carved of what copies still use


@pytest.mark.parametrize("order", SIMULATED)
def test_memory_carved_of_a_buffer_still_read_is_written_after_the_read(order: str) -> None:
    """The last owner is gone, and its copy back was never waited for."""
    backend = SimulatedBackend(order)
    budget = HostBudget(reserved_bytes() + SLAB_BYTES)
    engine = host_engine(backend, HostMemory(backend.allocate_host, budget), 2**30)
    with backend.activate():
        saved, ticket = ticket_for(engine, torch.ones(SLAB_BYTES // 4))
        engine.offload([ticket])
        hand_over([ticket])
        engine.reload([ticket])
        del saved, ticket  # nobody will use what comes back
        halves = [ticket_for(engine, torch.full((SLAB_BYTES // 8,), float(i))) for i in range(2)]
        for _, ticket in halves:  # other sizes: carved of the same memory
            engine.offload([ticket])
            hand_over([ticket])
        for i, (saved, _) in enumerate(halves):
            assert saved.unpack().eq(i).all()
        backend.check()


def test_memory_is_not_given_up_while_a_copy_of_a_dead_tensor_is_queued() -> None:
    backend, engine = late_engine()
    with backend.activate():
        saved, ticket = ticket_for(engine, torch.ones(100))
        engine.offload([ticket])
        hand_over([ticket])
        del saved, ticket
        engine.release_idle()
        backend.check()


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_buffer_is_idle_when_its_own_copies_were_made(way: str) -> None:
    """Not only when all are that were queued since: who gets it would wait for those as well."""
    backend, engine = late_engine()
    with backend.activate():
        pairs = [ticket_for(engine, torch.full((SLAB_BYTES // 4,), float(i))) for i in range(2)]
        tickets = [ticket for _, ticket in pairs]
        for ticket in tickets:
            engine.offload([ticket])
        if way == "back":
            backend.synchronize()
            engine.poll()
            for ticket in tickets:
                hand_over([ticket])
                engine.reload([ticket])
        block = tickets[0].block
        assert block.buffer is not None and block.offloaded is not None
        block.offloaded.synchronize()
        if way == "back":
            engine.deliver(tickets[0])
        assert all(event.query() for event in block.buffer.last_uses())
        assert backend.pending == 1, "the other one's"


def being_written() -> tuple[HostMemory, LateEvent]:
    """Of a buffer nobody has, a thread writes to disk: no stream's copy, so it is no last use."""
    tier, event = HostMemory(lambda n: torch.empty(n, dtype=torch.uint8)), LateEvent()
    tier.allocate(SLAB_BYTES).buffer.before += (event,)
    return tier, event


@pytest.mark.parametrize("end", ["close", "__del__"])
def test_memory_is_not_given_up_while_a_thread_reads_it(end: str) -> None:
    tier, event = being_written()
    getattr(tier, end)()
    assert event.has_passed


def test_who_wants_it_given_up_is_told_what_a_thread_still_reads() -> None:
    tier, event = being_written()
    with pytest.raises(Unfinished) as unfinished:
        tier.release_idle()
    assert unfinished.value.events == (event,)
    assert tier.statistics().reserved > 0


def test_bytes_of_a_buffer_are_not_idle_while_a_thread_reads_them() -> None:
    tier, event = being_written()
    halves = [tier.allocate(SLAB_BYTES // 2) for _ in range(2)]
    assert all(event in half.buffer.last_uses() for half in halves)


# A file range that a thread works on


class HeldStep:
    """A system call that waits until it is let go."""

    def __init__(self, step: Any) -> None:
        self._step, self._may_go = step, threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        self.has_begun.set()
        self._may_go.wait()
        return self._step(fd, data, offset)

    def let_go(self) -> None:
        self._may_go.set()


def test_a_range_that_is_still_written_is_not_given_to_another(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    held = HeldStep(os.pwrite)
    tier._pwrite = held  # type: ignore[method-assign]
    try:
        first = tier.allocate(5000)
        late = tier.write(first, some_bytes(5000, 1))
        held.has_begun.wait()
        tier._pwrite = os.pwrite  # type: ignore[method-assign]
        offset = first.file_range.range.offset
        del first  # while a thread writes there
        data, second = some_bytes(5000, 2), tier.allocate(5000)
        tier.write(second, data).synchronize()
        held.let_go()
        late.synchronize()
        assert read(tier, second).equal(data)
        offsets = {offset, second.file_range.range.offset}
        del second
        assert tier.statistics().in_use == 0
        again = [tier.allocate(5000) for _ in range(2)]
        assert {one.file_range.range.offset for one in again} == offsets, (
            "used again when it is done"
        )
    finally:
        held.let_go()
        tier.close()


def test_a_thread_that_reads_waits_for_the_one_that_writes(tmp_path: Path) -> None:
    """Here the read begins first."""
    tier, threads = DiskFile(tmp_path), LateThreads()
    tier._threads = threads  # type: ignore[assignment]
    data, extent = some_bytes(5000), tier.allocate(5000)
    target = torch.zeros(5000, dtype=torch.uint8)
    tier.write(extent, data)
    reading = tier.read(extent, target)
    threads.queued.pop().run()
    reading.synchronize()
    assert target.equal(data)
    tier.close()


def test_looking_what_has_come_waits_for_no_thread(tmp_path: Path) -> None:
    """What is read ahead goes on to the device when it was read, not as soon as one looks."""
    with disk_manager("eager", tmp_path) as manager:
        engine, threads = manager.offloader.transfer, LateThreads()
        disk_of(manager)._threads = threads  # type: ignore[assignment]
        (ticket,) = tickets_of(engine, [torch.ones(100)])
        engine.offload([ticket])
        hand_over([ticket])
        settle(manager)
        threads.queued[-1].result()  # it was written
        engine.poll()
        engine.reload([ticket], is_ahead=True)
        engine.poll()
        assert ticket.reload is not None and ticket.device_tensor is None
        threads.queued[-1].result()
        engine.poll()
        assert ticket.device_tensor is not None
        assert engine.deliver(ticket).eq(1).all()


# What stays between the parts of a backward


class Spoils(torch.autograd.Function):
    """The square; its backward may leave what it saved changed."""

    is_spoiling = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = 2 * x * gradient
        if Spoils.is_spoiling:
            x.zero_()
        return result


@contextmanager
def spoiling() -> Iterator[None]:
    Spoils.is_spoiling = True
    try:
        yield
    finally:
        Spoils.is_spoiling = False


def in_two_parts(manager: PipelineOffloadManager, between: Any) -> list[Tensor]:
    """Gradients of an input, then of a weight, through one product that both parts use."""
    key, device = ChunkKey(0, 0), manager.backend.device
    x = torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_()
    weight = nn.Parameter(torch.linspace(1, 2, 12).view(3, 4).to(device))
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    product = x * weight
    with off_interface(True, product, "g"):
        y = Spoils.apply(product)
    y = off_interface.group_commit(y, name="g")
    with off_interface(True, y, "g"):  # the last of the name stays on the device
        y = y.sin()
    y = off_interface.group_commit(y, name="g")
    del product
    settle(manager)
    with manager.backward_pass(key, BackwardPass.INPUT), between():
        got = list(torch.autograd.grad(y.sum(), x, retain_graph=True))
    with manager.backward_pass(key, BackwardPass.WEIGHT):
        got += torch.autograd.grad(y.sum(), weight, retain_graph=True)
    return [t.detach() for t in got]


@pytest.mark.parametrize("kind", BACKENDS)
def test_what_the_first_part_changed_is_not_kept_for_the_second(kind: str) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1, split_backward="keep")
    with use_backend(make_backend(kind), config=config) as manager:
        offloader = manager.offloader
        offloader.split = SplitBackward(
            offloader.transfer, frozenset({ChunkKey(0, 0)}), is_keeping=True
        )
        for _ in range(2):  # from the second on, what both use is foreseen and kept
            expected = in_two_parts(manager, lambda: torch.enable_grad())
        taken = manager.statistics().bytes_reloaded
        assert same_bits(in_two_parts(manager, spoiling), expected)
        if kind == "cpu":
            assert manager.statistics().bytes_reloaded - taken == 2 * 48, "brought again"


def test_what_is_kept_on_one_stream_is_brought_again_for_another() -> None:
    """Nothing orders the other stream behind the copy that brought it for the first."""
    backend, key = SimulatedBackend("late"), ChunkKey(0, 0)
    with use_backend(backend) as manager:
        engine = manager.offloader.transfer
        split = SplitBackward(engine, frozenset({key}), is_keeping=True)
        for step in range(2):
            x = torch.ones(4)
            saved = SavedActivation(x, Owner())
            ticket = PayloadTicket(split, "g", x, [saved], x.untyped_storage())
            split.follow(GroupKey(key, 0), [ticket])
            engine.offload([ticket])
            hand_over([ticket])
            del x
            split.begin(key, BackwardPass.INPUT)
            first = saved.unpack()
            split.end()
            other = backend.new_stream(f"other {step}")
            split.begin(key, BackwardPass.WEIGHT)
            with backend.stream(other):
                second = saved.unpack()
                assert second is not first and second.eq(1).all()
            split.end()
        backend.check()


def test_only_what_the_first_part_will_use_is_waited_for(manager: PipelineOffloadManager) -> None:
    """The rest is brought for the second; till then it is no longer in the way."""
    key, engine = ChunkKey(0, 0), manager.offloader.transfer
    split = SplitBackward(engine, frozenset({key}), is_keeping=False)
    for expected in ([1, 1], [2, 0]):
        values = [torch.ones(4).to(manager.backend.device) for _ in range(2)]
        pairs = [ticket_for(engine, value) for value in values]
        tickets = [ticket for _, ticket in pairs]
        for ticket in tickets:
            ticket.transfer = split
        split.follow(GroupKey(key, 0), tickets)
        assert [ticket.num_waiting for ticket in tickets] == expected
        engine.offload(tickets)
        for ticket in tickets:
            hand_over([ticket])
        split.begin(key, BackwardPass.INPUT)
        for _ in range(2):
            pairs[0][0].unpack()
        split.end()


# What is gathered on one stream, of what another one computed


class Gathers(TorchDispatchMode):
    """Notes the clock of a stream behind each operator that makes a copy."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self.seen: list[tuple[VectorClock, VectorClock]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = VectorClock(self._stream.clock.known)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.seen.append((before, VectorClock(self._stream.clock.known)))
        return result


@pytest.mark.parametrize("order", SIMULATED)
def test_a_gather_is_ordered_with_the_stream_that_computed_what_it_reads(order: str) -> None:
    """Behind what that stream did, and before what it does next: it may write there again."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(order), config=config) as manager:
        backend = manager.backend
        main, side = backend.current_stream(), backend.new_stream("side")
        manager.init_model_chunk_offload_handler(None, None, 1)
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        side.wait_stream(main)
        with backend.stream(side), off_interface(True, x, "g"):
            part = (x * 2)[:, :3]  # not all of its memory, so it is gathered
            y = part.sin()
            computed = VectorClock(side.clock.known)
        with Gathers(main) as gathers:
            y = off_interface.group_commit(y, name="g")  # on the main stream
        ((before, behind),) = gathers.seen
        assert before.covers(computed)
        assert side.clock.known.covers(behind)
        main.wait_stream(side)
        (got,) = torch.autograd.grad(y.sum(), x)
        expected = torch.zeros(4, 8)
        expected[:, :3] = 2 * (x.detach() * 2)[:, :3].cos()
        assert same_bits([got], [expected])
        backend.check()


def test_what_was_read_before_an_exception_is_ordered_too() -> None:
    """The stream that may write there again waits for what compute was given before it raised."""
    backend = make_backend("late")
    copies = Copies(backend, None)
    main, side = backend.current_stream(), backend.new_stream("side")
    ticket: Any = SimpleNamespace(members=[SimpleNamespace(stream=side)])
    with backend.activate(), pytest.raises(KeyError), copies.reading([ticket]):
        torch.ones(2).sum()
        behind = VectorClock(main.clock.known)
        raise KeyError
    assert side.clock.known.covers(behind)


# What several operations saved, and one of them changed in its backward


def test_what_a_backward_changed_is_not_used_by_another(manager: PipelineOffloadManager) -> None:
    """Both get the same memory, so what one of them wrote there the other must not read."""
    x = torch.linspace(-1, 1, 12).view(3, 4).to(manager.backend.device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 2
    with off_interface(True, h, "core"):
        y = h.sin() + Spoils.apply(h)  # the last made goes backward first
    y = off_interface.group_commit(y, name="core")
    del h
    settle(manager)
    with spoiling(), pytest.raises(SavedTensorModifiedError, match="core"):
        y.sum().backward()
    x.grad = None
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 2
    with off_interface(True, h, "core"):
        y = Spoils.apply(h) + h.sin()  # the other way round there is nobody to read it
    y = off_interface.group_commit(y, name="core")
    del h
    settle(manager)
    with spoiling():
        y.sum().backward()
    assert same_bits([x.grad], [2 * (2 * (x.detach() * 2) + (x.detach() * 2).cos())])


# What was changed while its copy was queued


def test_a_change_ahead_of_the_copy_is_remembered_when_the_source_is_let_go() -> None:
    backend = SimulatedBackend("late")
    with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 2
        with off_interface(True, h, "core"):
            y = h.sin()
        y = off_interface.group_commit(y, name="core")
        with backend._inside():  # the device would report the race itself
            h.detach().add_(1)
        settle(manager)
        assert manager.offloader.engine.mover.in_flight.nbytes == 0
        with pytest.raises(SavedTensorModifiedError, match="core"):
            y.sum().backward()


def test_a_change_of_what_stayed_is_seen_as_well(backend: Backend) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1000)
    with use_backend(backend, config=config) as manager:
        x = torch.linspace(-1, 1, 12).view(3, 4).to(backend.device).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1000)
        h = x * 2
        with off_interface(True, h, "core"):
            y = h.sin()
        y = off_interface.group_commit(y, name="core")
        h.detach().add_(1)
        with pytest.raises(SavedTensorModifiedError, match=r"\(3, 4\)"):
            y.sum().backward()


# What shares a buffer


def test_only_payloads_that_are_small_together_share_a_buffer() -> None:
    """It is given back when the last of them is."""
    engine: Any = None
    sizes = [PACK_BYTES - 64, 64, 1, PACK_BYTES - 1000, 2000, 3 * PACK_BYTES, 5, 6]
    tickets = [ticket_for(engine, torch.empty(n, dtype=torch.uint8))[1] for n in sizes]
    batches = [[ticket.nbytes for ticket in batch] for batch, _ in packs(tickets)]
    assert batches == [sizes[:2], sizes[2:4], sizes[4:5], sizes[5:6], sizes[6:]]
    assert [n for _, n in packs(tickets)][2:4] == sizes[4:6], "alone, it takes its own bytes"


# What stays after all


def test_a_group_that_backward_used_before_its_commit_stays(
    manager: PipelineOffloadManager,
) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4).to(manager.backend.device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 2
    with off_interface(True, h, "core"):
        y = h.sin()
        (inside,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y = off_interface.group_commit(y, name="core")
    assert manager.statistics().bytes_offloaded == 0
    (behind,) = torch.autograd.grad(y.sum(), x)
    assert same_bits([inside], [behind])


def test_what_is_named_for_release_stays_with_its_group(backend: Backend) -> None:
    """Nothing is emptied in a step that has no room, as nothing is in one without offload."""
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=1)
    with use_backend(backend, config=config) as manager:
        x = torch.ones(3, 4).to(backend.device).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1)
        h, unsaved = x * 2, torch.ones(3, 4).to(backend.device)
        with off_interface(True, h, "core"):
            y = h.sin()
        off_interface.group_commit(y, name="core", forced_released_tensors=[unsaved])
        settle(manager)
        assert manager.statistics().bytes_offloaded == 0
        nbytes = unsaved.untyped_storage().nbytes()  # a message would read what was emptied
        assert nbytes == 48


def test_of_two_groups_of_one_name_the_inner_one_is_committed_first(
    manager: PipelineOffloadManager,
) -> None:
    manager.init_model_chunk_offload_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    outer, inner = (chunk.on_group_start_forward("core") for _ in range(2))
    assert [chunk.commit("core"), chunk.commit("core")] == [inner, outer]


def test_what_is_saved_behind_a_backward_in_the_forward_leaves(
    activations: OffloadActivations, backend: Backend
) -> None:
    """What that backward used stays, and holds nothing else back."""
    x = torch.linspace(-1, 1, 12).view(3, 4).to(backend.device).requires_grad_()
    with activations:
        y = (x * 2).sin()
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert activations.statistics().bytes_offloaded == 0
        z = y.exp()
    activations.stash.send()
    assert activations.statistics().bytes_offloaded == z.nbytes
    z.sum().backward()


class Runs(TorchDispatchMode):
    """Counts how often an operator is run."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def test_what_a_checkpoint_offloaded_is_run_in_no_backward(backend: Backend) -> None:
    """Nor in the second through the same graph: an operator that draws would draw others."""
    op = torch.ops.aten.addmm.default
    with backend.activate():
        stash = ActivationStash("kept", min_offload_size=1, backend=backend)
        recompute = Recompute(stash, policy=OpPolicy(frozenset(), frozenset({op})))
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(backend.device)
        x = torch.linspace(-1, 1, 12).view(3, 4).to(backend.device).requires_grad_()
        recompute.begin()
        y = recompute(layer, x)
        with Runs(op) as runs:
            y.sum().backward(retain_graph=True)
            y.sum().backward()
        assert recompute.counts.recomputed_calls == 2
        assert recompute.counts.offloaded_outputs == 1
        assert runs.count == 0


# What several tickets share


def sharing(engine: TransferEngine, num: int = 2) -> list[Ticket]:
    """Tickets of groups that saved the same tensor, whose copy was made."""
    (first, *others) = tickets = tickets_of(engine, [torch.ones(100)] * num)
    engine.offload([first])
    for other in others:
        other.attach(first.block, first.begin, first.host_bytes)
    for ticket in tickets:
        hand_over([ticket])
    engine.backend.synchronize()
    engine.poll()
    return tickets


@pytest.mark.parametrize("order", SIMULATED)
def test_what_landed_for_one_stream_is_not_shared_with_another(order: str) -> None:
    backend = SimulatedBackend(order)
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    with backend.activate():
        first, second, third = sharing(engine, 3)
        landed = engine.deliver(first)
        engine.reload([second], is_ahead=True)
        with backend.stream(backend.new_stream("other")):
            elsewhere = engine.deliver(third)
            assert elsewhere.data_ptr() != landed.data_ptr() and elsewhere.eq(1).all()
        assert engine.deliver(second).eq(1).all()
        backend.check()


@pytest.mark.parametrize("order", SIMULATED)
def test_what_landed_for_one_stream_is_brought_again_for_another(order: str) -> None:
    """Also what is there already: its memory goes back to the stream that it was allocated on."""
    backend = SimulatedBackend(order)
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    with backend.activate():
        (ticket,) = sharing(engine, 1)
        ticket.num_waiting = 2
        landed = engine.deliver(ticket)
        with backend.stream(backend.new_stream("other")):
            elsewhere = engine.deliver(ticket)
            assert elsewhere.data_ptr() != landed.data_ptr() and elsewhere.eq(1).all()
        backend.check()


@pytest.mark.parametrize("is_soon", [True, False])
def test_what_is_used_up_is_passed_on_to_who_comes_soon(is_soon: bool) -> None:
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    engine.reloads.comes_soon = lambda _: is_soon
    with backend.activate():
        first, second = sharing(engine)
        engine.deliver(first)
        assert (second.reload is not None) == is_soon
        assert engine.reloads.nbytes == (400 if is_soon else 0)
        assert engine.deliver(second).eq(1).all()


def test_what_is_shared_counts_as_long_as_somebody_waits_for_it() -> None:
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    with backend.activate():
        first, second, third = sharing(engine, 3)
        assert engine.reload([first, second]) == 1
        for ticket in (first, second):
            assert engine.reloads.nbytes == 400
            engine.deliver(ticket)
        assert engine.reloads.nbytes == 0
        engine.reload([first, second, third], is_ahead=True)
        assert engine.counters.prefetched_reloads == 1
        del first, second
        engine.poll()
        assert engine.reloads.nbytes == 400


def test_what_is_shared_is_free_when_the_last_has_used_it() -> None:
    """Also where the ticket that brought it is gone by then, and nobody polls any more."""
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    with backend.activate():
        first, second = sharing(engine)
        engine.reload([first, second])
        memory = weakref.ref(engine.deliver(first).untyped_storage())
        del first
        engine.deliver(second)
        assert memory() is None


def test_a_copy_forgets_tickets_that_are_gone() -> None:
    """That of a table lives on through any number of forwards that save it."""
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    with backend.activate():
        (ticket,) = sharing(engine, 1)
        block, place = ticket.block, ticket.host_bytes
        for _ in range(10):
            (ticket,) = tickets_of(engine, [torch.ones(100)])
            ticket.attach(block, 0, place)
        assert len(block.shared[0]) <= 2


# Interrupts between a copy that is queued and what is known of it


class Cut(BaseException):
    """As a KeyboardInterrupt."""


@contextmanager
def cut_behind_the_copy(backend: Backend) -> Iterator[None]:
    """The first copy is queued, and what comes behind it is cut off."""
    copy, record = backend.copy, type(backend.d2h).record_event

    def and_cut(*args: Any) -> None:
        copy(*args)
        type(backend.d2h).record_event = raising  # a ``finally`` would help no more

    def raising(stream: Any) -> Any:
        type(backend.d2h).record_event = record
        raise Cut

    backend.copy = and_cut  # type: ignore[method-assign]
    try:
        with pytest.raises(Cut):
            yield
    finally:
        backend.copy = copy  # type: ignore[method-assign]
        type(backend.d2h).record_event = record


def offload_cut_off(backend: Backend, engine: TransferEngine) -> None:
    """Of 400 bytes that nobody has any more afterwards."""
    tickets = tickets_of(engine, [torch.ones(100)])
    with cut_behind_the_copy(backend):
        engine.offload(tickets)


def test_sources_outlive_a_copy_that_was_cut_off() -> None:
    backend, engine = late_engine()
    with backend.activate():
        offload_cut_off(backend, engine)
        engine.poll()
        assert engine.copies.in_flight.nbytes == 400
        backend.synchronize()  # it raises if a copy reads what was freed
        engine.poll()
        assert engine.copies.in_flight.nbytes == 0
        backend.check()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_target_outlives_a_copy_that_was_cut_off(is_wanted: bool) -> None:
    backend, engine = late_engine()
    with backend.activate():
        ticket, _ = sharing(engine)
        with cut_behind_the_copy(backend):
            engine.reload([ticket])
        if is_wanted:
            assert engine.deliver(ticket).eq(1).all(), "brought again"
        else:
            del ticket
            engine.poll()
        backend.synchronize()  # it raises if a copy writes what was freed
        backend.check()


def test_a_buffer_outlives_a_copy_that_was_cut_off() -> None:
    backend, engine = late_engine()
    with backend.activate():
        offload_cut_off(backend, engine)
        engine.release_idle()
        backend.synchronize()  # it raises if a copy writes what was freed
        backend.check()


def test_a_buffer_outlives_a_copy_back_that_was_cut_off() -> None:
    backend, engine = late_engine()
    with backend.activate():
        (ticket,) = sharing(engine, 1)
        with cut_behind_the_copy(backend):
            engine.reload([ticket])
        del ticket
        engine.release_idle()
        backend.synchronize()  # it raises if a copy reads what was freed
        backend.check()


@pytest.mark.parametrize("size", [100, 50])
def test_a_buffer_of_a_copy_that_was_cut_off_is_written_behind_it(size: int) -> None:
    """As it is, or carved anew."""
    backend = SimulatedBackend("late")
    budget = HostBudget(reserved_bytes() + SLAB_BYTES)
    engine = host_engine(backend, HostMemory(backend.allocate_host, budget), 2**30)
    with backend.activate():
        tickets = tickets_of(engine, [torch.ones(SLAB_BYTES // 4)])
        with cut_behind_the_copy(backend):
            engine.offload(tickets)
        del tickets
        tickets = tickets_of(engine, [torch.full((SLAB_BYTES * size // 400,), 2.0)])
        engine.offload(tickets)
        hand_over(tickets[:1])
        backend.synchronize()
        engine.poll()
        assert engine.deliver(tickets[0]).eq(2).all()
        backend.check()


# Where something dies: what a signal handler raises there is printed and lost


def test_no_python_code_runs_where_a_ticket_dies() -> None:
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    with backend.activate():
        (ticket,) = sharing(engine, 1)
        engine.reload([ticket])
        with functions_called() as called:
            del ticket
        assert called == []
        engine.poll()
        assert engine.reloads.nbytes == 0


def test_no_python_code_runs_where_a_marked_tensor_dies() -> None:
    marked, tensor = StorageSet(), torch.ones(3)
    marked.add(tensor)
    with functions_called() as called:
        del tensor
    assert called == []
    assert len(marked) == 0


# Several threads


def test_a_forward_of_a_thread_that_ended_holds_up_no_reset(
    manager: PipelineOffloadManager,
) -> None:
    """Its graph is good all the same."""
    x = torch.ones(3, 4).to(manager.backend.device).requires_grad_()
    found: list[Tensor] = []

    def forward() -> None:
        manager.init_model_chunk_offload_handler(None, None, 1)
        with off_interface(True, x, "g"):
            y = (x * 2).sin()
        found.append(off_interface.group_commit(y, name="g"))

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    manager.reset()
    found.pop().sum().backward()
    assert same_bits([x.grad], [2 * (x.detach() * 2).cos()])


def test_books_are_kept_with_the_lock_held_and_waits_are_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    held: list[tuple[str, bool]] = []

    def noting(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def note(*args: Any) -> Any:
            held.append((name, engine.lock._is_owned()))  # type: ignore[attr-defined]
            return inner(*args)

        monkeypatch.setattr(owner, name, note)

    with backend.activate():
        ticket, _ = sharing(engine)
        noting(engine, "_find")
        noting(engine.copies, "_compute_waits_for")
        noting(engine.reloads, "take")
        engine.deliver(ticket)
    assert held == [("_find", True), ("_compute_waits_for", False), ("take", True)]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_commit_of_another_thread_amid_an_unpack(is_before: bool, is_its_own: bool) -> None:
    """It takes the tensor, or gives a ticket in its place; who looks finds one of them, once."""
    backend = SimulatedBackend("eager")
    engine = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
    commit: list[Any] = []

    class Amid(SavedActivation):
        def __getattribute__(self, name: str) -> Any:
            if name != "held" or not commit:
                return super().__getattribute__(name)
            act = commit.pop()
            found = None if is_before else super().__getattribute__(name)
            act()
            return super().__getattribute__(name) if is_before else found

    with backend.activate():
        x = torch.ones(4)
        saved = Amid(x, Owner())
        ticket: Ticket = PayloadTicket(engine, "g", x, [saved], x.untyped_storage())
        if is_its_own:
            ticket = saved
            ticket.begin_with(engine, "g", x, x.untyped_storage(), 1)
        engine.offload([ticket])
        commit.append(lambda: hand_over([ticket]))
        assert saved.unpack().eq(1).all()
        assert not commit


def test_a_forward_that_begins_amid_a_reset_is_not_forgotten(
    manager: PipelineOffloadManager,
) -> None:
    """Another thread begins while the delayed groups are committed."""
    may_end, has_begun = threading.Event(), threading.Event()
    device = manager.backend.device

    def forward() -> None:
        manager.init_model_chunk_offload_handler(None, None, 1)
        with off_interface(True, torch.ones(3, device=device), "g"):
            has_begun.set()
            assert may_end.wait(HANG_S)

    def begin(_: object) -> None:
        thread.start()
        assert has_begun.wait(HANG_S)

    thread = threading.Thread(target=forward, daemon=True)
    manager.push_offload_groups(begin, None)
    try:
        with pytest.raises(GroupStateError, match="waits for its backward"):
            manager.reset()
        assert manager.step.num_chunks == 1
    finally:
        may_end.set()
        thread.join(HANG_S)
