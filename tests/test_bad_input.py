"""Wrong input gets an error that says what was found, what was expected and what to do.

Or it passes through where that is right. Either way the next step works.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy import batches, make_model, run_step, same_bits

from pp_offload import (
    ClosedError,
    GroupStateError,
    OffloadConfig,
    OffloadError,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    pipelining,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.saved import Resident


@pytest.fixture(autouse=True)
def next_step_works(manager: PipelineOffloadManager) -> Iterator[None]:
    """After each test a step on the current manager has the right numbers, and leaves nothing."""
    yield
    current = PipelineOffloadManager.get_instance()
    device = str(current.backend.device)
    inputs = [x.to(device) for x in batches(3)]
    expected = run_step(make_model(groups=(), device=device), inputs, offload=False)
    for _ in range(2):
        assert same_bits(run_step(make_model(device=device), inputs), expected)
    assert current.statistics().host_bytes_in_use == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def ones(manager: PipelineOffloadManager, *shape: int) -> Tensor:
    return torch.ones(shape or (4,), device=manager.backend.device, requires_grad=True)


def open_chunk(manager: PipelineOffloadManager) -> ChunkOffloadHandler:
    off_interface.init_chunk_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    return chunk


def check(error: BaseException, *parts: str) -> None:
    """The message names ``parts``, in any order."""
    message = str(error)
    missing = [part for part in parts if not re.search(part, message)]
    assert not missing, f"{missing} not in: {message}"


def on_another_thread(action: Callable[[], object]) -> BaseException | None:
    """What ``action`` raises there."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# Chunks


@pytest.mark.parametrize(
    ("vp_size", "vp_stage"), [(2, 2), (2, -1), (None, 1), (0, 0), (-1, None), (1, 5)]
)
def test_a_stage_outside_its_size(
    manager: PipelineOffloadManager, vp_size: int | None, vp_stage: int | None
) -> None:
    with pytest.raises(ValueError) as error:
        off_interface.init_chunk_handler(vp_size, vp_stage, 1)
    check(error.value, f"vp_stage is {vp_stage}", f"vp_size {vp_size}", "expected", "give None")
    assert manager.cur_forward_chunk() is None


def test_a_negative_minimum_size(manager: PipelineOffloadManager) -> None:
    with pytest.raises(ValueError) as error:
        off_interface.init_chunk_handler(None, None, -1)
    check(error.value, "min_offloaded_tensor_size is -1", "expected at least 0")


def test_a_wrong_stage_leaves_the_current_chunk(manager: PipelineOffloadManager) -> None:
    chunk = open_chunk(manager)
    with pytest.raises(ValueError):
        off_interface.init_chunk_handler(2, 7, 1)
    assert manager.cur_forward_chunk() is chunk


@pytest.mark.parametrize("action", ["start", "context", "commit"])
def test_a_group_without_a_chunk(manager: PipelineOffloadManager, action: str) -> None:
    x = ones(manager)
    with pytest.raises(GroupStateError) as error:
        if action == "start":
            fine_grained_offloading_group_start(x, "mlp")
        elif action == "context":
            off_interface(True, x, "mlp").__enter__()
        else:
            off_interface.group_commit(x, "mlp")
    check(error.value, "'mlp'", "without a chunk", r"init_chunk_handler\(", "attach")


# Groups


def test_a_commit_without_a_start(manager: PipelineOffloadManager) -> None:
    chunk = open_chunk(manager)
    with pytest.raises(GroupStateError) as error:
        off_interface.group_commit(ones(manager), "mlp")
    check(error.value, "'mlp'", "no group of that name was started", r"open groups: \[\]", "start")
    with pytest.raises(GroupStateError) as error:
        chunk.on_group_commit_forward(None)
    check(error.value, "without an open group", "start one first")


def test_a_name_never_started(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    with off_interface(True, ones(manager), "mlp") as x:
        y = x.exp()
    with pytest.raises(GroupStateError) as error:
        off_interface.group_commit(y, "mpl")
    check(error.value, "'mpl'", "no group of that name", r"open groups: \['mlp'\]")
    off_interface.group_commit(y, "mlp").sum().backward()


def test_a_group_committed_twice(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    with off_interface(True, ones(manager), "mlp") as x:
        y = x.exp()
    y = off_interface.group_commit(y, "mlp")
    with pytest.raises(GroupStateError) as error:
        off_interface.group_commit(y, "mlp")
    check(error.value, "'mlp'", "committed already", "once")
    y.sum().backward()


def test_a_group_never_committed_still_has_its_tensors(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    leaf = ones(manager)
    with off_interface(True, leaf, "mlp") as x:
        y = x.exp()
    y.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, leaf.detach().exp())
    with pytest.raises(GroupStateError) as error:
        manager.reset()
    check(error.value, "'mlp'", "never committed", "group_commit")


def test_backward_before_forward_of_a_group(manager: PipelineOffloadManager) -> None:
    chunk = open_chunk(manager)
    with pytest.raises(GroupStateError) as error:
        chunk.on_group_commit_backward("mlp")
    check(error.value, "'mlp'", "forward")


def test_backward_before_forward_finds_nothing_to_do(manager: PipelineOffloadManager) -> None:
    chunk = open_chunk(manager)
    chunk.on_group_start_backward()
    chunk.bulk_reload()
    chunk.bulk_reload_group()
    chunk.pre_reload_last_layer()
    assert manager.pop_backward_chunk() is None
    assert manager.front_backward_chunk("mlp") is None
    assert manager.cur_backward_chunk() is None
    assert manager.statistics().bytes_reloaded == 0


def test_backward_before_the_commit(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    leaf = ones(manager)
    with off_interface(True, leaf, "mlp") as x:
        y = x.exp()
        y.sum().backward()
    off_interface.group_commit(y, "mlp")
    assert leaf.grad is not None


# Threads


def test_a_group_started_on_another_thread(manager: PipelineOffloadManager) -> None:
    chunk, x = open_chunk(manager), ones(manager)
    error = on_another_thread(lambda: fine_grained_offloading_group_start(x, "mlp"))
    assert isinstance(error, GroupStateError)
    check(error, "'mlp'", r"thread \d+", "belongs to thread", "init_chunk_handler")
    assert chunk.is_empty_chunk()


def test_a_group_committed_on_another_thread(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    with off_interface(True, ones(manager), "mlp") as x:
        y = x.exp()
    error = on_another_thread(lambda: off_interface.group_commit(y, "mlp"))
    y.sum().backward()
    assert isinstance(error, GroupStateError)
    check(error, "'mlp'", "thread")
    with pytest.raises(GroupStateError, match="never committed"):
        manager.reset()


def test_backward_on_another_thread_is_right(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    leaf = ones(manager)
    with off_interface(True, leaf, "mlp") as x:
        y = x.exp()
    y = off_interface.group_commit(y, "mlp")
    assert on_another_thread(lambda: y.sum().backward()) is None
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, leaf.detach().exp())


# Tensors


class Keep(torch.autograd.Function):
    """Identity that saves another tensor and shows what came back."""

    back: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (Keep.back,) = ctx.saved_tensors
        return grad, None


def through_a_group(manager: PipelineOffloadManager, tensor: Tensor) -> tuple[Tensor, int]:
    """What backward sees of a tensor saved in a group, and the bytes that moved."""
    open_chunk(manager)
    before = manager.statistics().bytes_offloaded
    with off_interface(True, ones(manager), "mlp") as x:
        y = Keep.apply(x, tensor)
    y = off_interface.group_commit(y, "mlp")
    y.sum().backward()
    back, Keep.back = Keep.back, torch.empty(0)
    return back, manager.statistics().bytes_offloaded - before


MOVED = {
    "int64": torch.arange(100),
    "bool": torch.arange(100) % 3 == 0,
    "complex64": torch.randn(10, 10, dtype=torch.complex64),
    "complex128": torch.randn(7, dtype=torch.complex128),
}

LEFT = {
    "zero-size": torch.empty(0),
    "zero-size in one dimension": torch.empty(3, 0, 5),
    "sparse coo": torch.eye(4).to_sparse(),
    "sparse csr": torch.eye(4).to_sparse_csr(),
    "conjugated": torch.randn(9, dtype=torch.complex64).conj(),
    "negated": torch.randn(9, dtype=torch.complex64).conj().imag,
    "meta": torch.empty(10, device="meta"),
    "parameter": nn.Parameter(torch.randn(4)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", MOVED)
def test_a_tensor_that_is_not_floating_moves(manager: PipelineOffloadManager, name: str) -> None:
    tensor = MOVED[name].to(manager.backend.device)
    back, moved = through_a_group(manager, tensor.clone())
    assert moved == tensor.nbytes
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("name", LEFT)
def test_a_tensor_that_cannot_move_passes_through(
    manager: PipelineOffloadManager, name: str
) -> None:
    tensor = LEFT[name]
    if tensor.device.type != "meta":
        tensor = tensor.to(manager.backend.device)
    back, moved = through_a_group(manager, tensor)
    assert moved == 0
    assert (back.layout, back.shape, back.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    if name == "meta":
        assert back.is_meta
    else:
        assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense())


def test_a_sparse_group_input_passes_through(manager: PipelineOffloadManager) -> None:
    open_chunk(manager)
    leaf = torch.eye(4, device=manager.backend.device).to_sparse().requires_grad_()
    with off_interface(True, leaf, "mlp") as x:
        y = torch.sparse.mm(x, ones(manager, 4, 4))
    off_interface.group_commit(y, "mlp").sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("name", ["zero-size", "sparse coo", "meta"])
def test_a_tensor_that_cannot_move_may_be_marked(
    manager: PipelineOffloadManager, name: str
) -> None:
    off_interface.mark_not_offloadable(LEFT[name])
    chunk = open_chunk(manager)
    chunk.on_group_start_forward("mlp")
    assert isinstance(chunk.tensor_push(LEFT[name]), Resident)


def test_outputs_that_are_no_tensors_pass_through_a_commit(
    manager: PipelineOffloadManager,
) -> None:
    open_chunk(manager)
    with off_interface(True, ones(manager), "mlp") as x:
        y = x.exp()
    out = off_interface.group_commit({"y": (y, None, 3), "n": [LEFT["zero-size"]]}, "mlp")
    assert list(out) == ["y", "n"]
    assert out["y"][1:] == (None, 3)
    out["y"][0].sum().backward()


# Closed, and attached twice


def test_a_closed_tier(manager: PipelineOffloadManager) -> None:
    with use_backend(manager.backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as own:
        open_chunk(own)
        with off_interface(True, ones(own), "mlp") as x:
            y = x.exp()
        own.services.transfer.close()
        with pytest.raises(ClosedError) as error:
            off_interface.group_commit(y, "mlp")
        check(error.value, "host tier is closed", "make a new manager")
        y.sum().backward()


def test_tensors_offloaded_before_the_tier_closed_come_back(
    manager: PipelineOffloadManager,
) -> None:
    with use_backend(manager.backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as own:
        open_chunk(own)
        leaf = ones(own)
        with off_interface(True, leaf, "mlp") as x:
            y = x.exp()
        y = off_interface.group_commit(y, "mlp")
        own.services.transfer.close()
        y.sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, leaf.detach().exp())


@pytest.fixture
def schedule(manager: PipelineOffloadManager) -> Iterator[Any]:
    """GPipe over one stage in this process."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make_model(groups=(), device=str(manager.backend.device))
    stage = PipelineStage(model, 0, 1, manager.backend.device)
    yield ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    dist.destroy_process_group()


def test_attach_twice(schedule: Any) -> None:
    handle = pipelining.attach(schedule)
    with pytest.raises(OffloadError) as error:
        pipelining.attach(schedule)
    check(error.value, "GPipe", "attached already", r"detach\(\)")
    handle.detach()
    pipelining.attach(schedule).detach()


def test_attach_with_a_wrong_pattern_leaves_the_schedule_alone(schedule: Any) -> None:
    with pytest.raises(ValueError) as error:
        pipelining.attach(schedule, groups={"up": "*.upp"})
    check(error.value, r"'\*.upp'", "near names", r"0\.up")
    pipelining.attach(schedule, groups={"up": "*.up"}).detach()


def test_attach_to_something_else(manager: PipelineOffloadManager) -> None:
    with pytest.raises(TypeError) as error:
        pipelining.attach(nn.Linear(2, 2))
    check(error.value, "Linear", "has no stages", "expected a schedule")
