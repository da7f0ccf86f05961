"""Promise 4: whatever cuts a step off leaves nothing behind, and the next step is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.nets import Net, inputs, train
from helpers.saving import Raises
from helpers.sessions import (
    assert_idle,
    assert_no_hooks,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    session,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    offload_modules,
)


class Boom(Exception):
    """What goes wrong."""


def at_the_start(x: Tensor, error: type[BaseException]) -> None:
    with off_interface(True, x, "fails"):
        raise error


def in_the_body(x: Tensor, error: type[BaseException]) -> None:
    with off_interface(True, Net()(x), "fails") as h:
        h.sin()
        raise error


def between_start_and_commit(x: Tensor, error: type[BaseException]) -> None:
    h = Net()(x)
    with off_interface(True, h, "attn") as h:
        h.sin()
    raise error


def behind_a_commit(x: Tensor, error: type[BaseException]) -> None:
    y = Net()(x)
    begin_microbatch()
    Net()(x).sum().backward()
    del y
    raise error


def in_backward(x: Tensor, error: type[BaseException]) -> None:
    net = Net()
    net(Raises.apply(net(x), error)).sum().backward()


def in_a_scope(x: Tensor, error: type[BaseException]) -> None:
    fine_grained_offloading_group_start(x, "fails")
    with off_interface.get_context(True):
        raise error


def in_a_module(x: Tensor, error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = nn.Sequential(nn.Tanh(), Fails())
    with offload_modules(model, {"attn": "0", "fails": "1"}):
        model(x)


def in_a_context(x: Tensor, error: type[BaseException]) -> None:
    backend = PipelineOffloadManager.get_instance().backend
    with OffloadActivations(min_offload_size=1, backend=backend):
        x.sin()
        raise error


def in_the_copy(x: Tensor, error: type[BaseException]) -> None:
    """The device refuses a copy."""
    backend: Any = PipelineOffloadManager.get_instance().backend

    def fail(*_: object) -> None:
        raise error

    backend.copy = fail
    try:
        Net()(x).sum().backward()
    finally:
        del backend.copy


FAILURES = [
    at_the_start,
    in_the_body,
    between_start_and_commit,
    behind_a_commit,
    in_backward,
    in_a_scope,
    in_a_module,
    in_a_context,
    in_the_copy,
]


@pytest.mark.field("F18")
@pytest.mark.parametrize(("kind", "error"), [("late", KeyboardInterrupt), ("threads", Boom)])
@pytest.mark.parametrize("fails", FAILURES)
def test_the_step_behind_an_aborted_one_is_right(
    kind: str,
    error: type[BaseException],
    fails: Callable[[Tensor, type[BaseException]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Twice in a row, behind a step that was complete; hooks of others stay, and no warning of a
    group follows the error.
    """
    net, seen = Net(), list[Tensor]()
    expected = [train(net, inputs(3, step=step), False, ahead=2) for step in range(3)]
    with session(kind) as manager:
        assert_same(train(net, inputs(3), True, ahead=2), expected[0])
        for _ in range(2):
            begin_step()
            theirs = saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
            with theirs:
                with pytest.raises(error):
                    fails(inputs(1)[0].requires_grad_(), error)
                off_interface.reset()
                seen.clear()
                drawn(2, 2).requires_grad_().exp()
                assert len(seen) == 1, "the hooks of others are the innermost ones again"
            assert_no_hooks()
        seen.clear()
        assert_idle(manager)
        for step in (1, 2):
            assert_same(train(net, inputs(3, step=step), True, ahead=2), expected[step])
            assert_idle(manager)
        manager.reset()
    assert "group '" not in caplog.text
