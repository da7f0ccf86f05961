"""F09: releasing the storage of one view leaves its siblings their data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from field_checks import make_inputs
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

pytestmark = pytest.mark.field("F09")

Split = Callable[[Tensor], Sequence[Tensor]]
"""The view that is released, and the one that is read later."""

SPLITS: dict[str, Split] = {
    "halves": lambda h: h.chunk(2),
    "halves without a base": lambda h: torch.unsafe_chunk(h, 2),
    "interleaved": lambda h: (h[::2], h[1::2]),
    "overlapping": lambda h: (h[:5], h[2:7]),
    "a view and its base": lambda h: (h.view(-1, 6), h),
    "a base and its view": lambda h: (h, h[1:]),
    "an alias": lambda h: (h, h.detach()),
}

splits = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
settles = pytest.mark.parametrize("is_settled", [True, False], ids=["released", "copy queued"])


def read(view: Tensor) -> Tensor:
    """A number that depends on every element; an operator does not look whether they are there."""
    if view.untyped_storage().nbytes() == 0:
        pytest.fail("its storage was emptied", pytrace=False)  # pytest would print the view
    return view.sin().sum()


class Program:
    """The steps of a scenario, with or without the engine."""

    def __init__(self, manager: PipelineOffloadManager | None, is_settled: bool) -> None:
        self.manager = manager
        self.is_on = manager is not None
        self._is_settled = is_settled

    def next_microbatch(self) -> None:
        if self.is_on:
            off_interface.init_chunk_handler(None, None, 1)

    def group(self, name: str, *views: Tensor, forced: Sequence[Tensor] = ()) -> Tensor:
        """A group that saves ``views`` and reads them; ``forced`` may go after its commit."""
        with off_interface(self.is_on, views[0], name):
            y = sum((read(view) for view in views), start=0)
        return self.commit(name, y, forced)

    def commit(self, name: str, y: Tensor, forced: Sequence[Tensor] = ()) -> Tensor:
        if self.manager is None:
            return y
        y = off_interface.group_commit(y, name=name, forced_released_tensors=list(forced))
        if self._is_settled:
            self.settle()
        return y

    def settle(self) -> None:
        """Every copy has been made, and what may be released is."""
        if self.manager is not None:
            self.manager.backend.synchronize()
            self.manager.statistics()


def same_group(program: Program, a: Tensor, b: Tensor) -> Tensor:
    return program.group("first", a, b, forced=[a])


def group_around(program: Program, a: Tensor, b: Tensor) -> Tensor:
    with off_interface(program.is_on, a, "outer"):
        y = program.group("first", a, forced=[a])
        y = y + read(b)
    return program.commit("outer", y)


def later_group(program: Program, a: Tensor, b: Tensor) -> Tensor:
    y = program.group("first", a, forced=[a])
    return y + program.group("second", b)


def next_microbatch(program: Program, a: Tensor, b: Tensor) -> Tensor:
    y = program.group("first", a, forced=[a])
    program.next_microbatch()
    return y + program.group("first", b)


def outside_any_group(program: Program, a: Tensor, b: Tensor) -> Tensor:
    return program.group("first", a, forced=[a]) + read(b)


def both_released(program: Program, a: Tensor, b: Tensor) -> Tensor:
    y = program.group("first", a, forced=[a])
    return y + program.group("second", b, forced=[a, b])


Reader = Callable[[Program, Tensor, Tensor], Tensor]
READERS = [
    same_group,
    group_around,
    later_group,
    next_microbatch,
    outside_any_group,
    both_released,
]


def run(program: Program, split: Split, reader: Reader, device: torch.device) -> list[Tensor]:
    """What the views hold afterwards, the loss, and the gradient behind them."""
    if program.is_on:
        off_interface.reset()
    program.next_microbatch()
    (x,) = make_inputs(1, length=8, device=device)
    x.requires_grad_()
    a, b = split(x * 2)
    y = reader(program, a, b)
    program.settle()
    value = read(b).detach()
    del a, b
    return [value, y.detach(), *torch.autograd.grad(y, x)]


@pytest.mark.covering(2)
@settles
@splits
@pytest.mark.parametrize("reader", READERS)
def test_the_sibling_is_read_later(
    manager: PipelineOffloadManager, reader: Reader, split: Split, is_settled: bool
) -> None:
    device = manager.backend.device
    for _ in range(2):
        got = run(Program(manager, is_settled), split, reader, device)
        assert same_bits(got, run(Program(None, is_settled), split, reader, device))
        assert manager.statistics().bytes_offloaded > 0
        assert_idle(manager)


@settles
@pytest.mark.parametrize("split", [SPLITS["halves"], SPLITS["halves without a base"]])
def test_the_sibling_lives_in_autograd_alone(
    manager: PipelineOffloadManager, split: Split, is_settled: bool
) -> None:
    """Saved outside any group, and read by backward; nobody else refers to it."""
    device = manager.backend.device

    def gradient(program: Program) -> Tensor:
        program.next_microbatch()
        (x,) = make_inputs(1, length=8, device=device)
        x.requires_grad_()
        a, b = split(x * 2)
        outside, kept = read(b), weakref.ref(b.untyped_storage())
        del b
        y = program.group("first", a, forced=[a]) + outside
        program.settle()
        if kept().nbytes() == 0:
            pytest.fail("its storage was emptied", pytrace=False)
        return torch.autograd.grad(y, x)[0]

    got = gradient(Program(manager, is_settled))
    assert same_bits([got], [gradient(Program(None, is_settled))])
    assert_idle(manager)


@splits
def test_without_siblings_it_is_released(manager: PipelineOffloadManager, split: Split) -> None:
    """The scenarios above are about a release that does happen."""
    program = Program(manager, True)
    off_interface.reset()
    program.next_microbatch()
    (x,) = make_inputs(1, length=8, device=manager.backend.device)
    x.requires_grad_()
    a = split(x * 2)[0]
    y = program.group("first", a, forced=[a])
    assert a.untyped_storage().nbytes() == 0
    del a
    got = torch.autograd.grad(y, x)
    plain = split(x * 2)[0]
    assert same_bits(got, torch.autograd.grad(plain.sin().sum(), x))
    assert_idle(manager)
