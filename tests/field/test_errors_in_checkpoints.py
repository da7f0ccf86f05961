"""F69: an error inside a checkpoint leaves no hook, and takes none away when it is forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from test_aborted_steps import Boom, FailsInBackward, boom
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._hooks.regions import is_in_backward, top_pack
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.field("F69")

Function = Callable[[Tensor], Tensor]
Run = Callable[[Function, Tensor], Tensor]

CHECKPOINTS: dict[str, Run] = {
    "torch": partial(checkpoint, use_reentrant=False),
    "torch, reentrant": partial(checkpoint, use_reentrant=True),
    "ours": Recompute(),
    "ours, reentrant": Recompute(use_reentrant=True),
}


def in_recomputation(x: Tensor) -> Tensor:
    return boom() if is_in_backward() else x.sin()


FAILURES: dict[str, Function] = {
    "forward": boom,
    "recomputation": in_recomputation,
    "backward": FailsInBackward.apply,
}


def in_group(run: Run, function: Function, x: Tensor) -> Tensor:
    off_interface.init_chunk_handler(None, None, 1)
    with off_interface(True, x, "a") as x:
        y = run(function, x.sin())
    return off_interface.group_commit(y, name="a")


def in_context(run: Run, function: Function, x: Tensor) -> Tensor:
    with OffloadActivations(min_offload_size=1, backend=CpuBackend()):
        return run(function, x.sin())


def in_manager(run: Run, function: Function, x: Tensor) -> Tensor:
    with PipelineOffloadManager.get_instance():
        return run(function, x.sin())


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    with use_backend(CpuBackend(), config=config) as manager:
        yield manager


@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("step", [in_group, in_context, in_manager])
def test_the_next_step_is_right(
    manager: PipelineOffloadManager, step: Callable[..., Tensor], run: Run, fails: Function
) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with pytest.raises(Boom) as error:
        step(run, lambda x: run(fails, x), x).sum().backward()
    assert_no_hooks()
    off_interface.reset()

    def forgets(x: Tensor) -> Tensor:
        nonlocal error
        before = top_pack()
        del error
        gc.collect()
        assert top_pack() is before, "the checkpoint that failed took the hooks of this one"
        return x.exp()

    x.grad = None
    step(run, torch.exp, in_context(lambda f, x: f(x), forgets, x)).sum().backward()
    (expected,) = torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)
    assert same_bits([x.grad], [expected])
    off_interface.reset()
    assert_idle(manager)
