"""A group shares the copy that another has made, and never one of what has changed since.

Tensors with one memory may count changes apart: the parts of ``unsafe_chunk``, or what ``.data``
gives. Then a number of one counter says nothing of the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS, make_backend
from torch import Tensor
from toy import assert_idle

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

Settle = Callable[[], None]
Group = Callable[[str, Tensor, Callable[[Tensor], Tensor]], Tensor]


def gap_is_written(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """The first group saves two parts of three; its copy has the third as well."""
    a, b, c = (x * 2).unsafe_chunk(3)
    u = group("one", a, lambda a: a * c)
    settle()
    b.sigmoid_()
    return u + group("two", a, lambda a: a.sin() * b.cos() + c.sin())


def part_is_written(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """All three were saved, and one of them is another one when it is saved again."""
    a, b, c = (x * 2).unsafe_chunk(3)
    u = group("one", a, lambda a: a.sin() * b.detach() + b.sin() * c)
    settle()
    with torch.no_grad():
        d = b.data.sigmoid_()
    return u.detach() + group("two", a, lambda a: a.sin() * d + c.sin())


def version_of_another(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """Both were saved at version 0; one of them was changed between, in the open."""
    h = x * 2
    first = group("one", h, torch.sin)
    settle()
    with torch.no_grad():
        h.add_(1)
    d = h.data.requires_grad_()
    y = group("two", d, torch.cos)
    y.sum().backward()
    assert d.grad is not None
    del first
    return (x * d.grad).sin()


def same_number(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """The whole was at version 1 when it was saved, and so are its parts now, for other reasons."""
    y = (x * 2).add_(1)
    u = group("one", y, torch.sin)
    settle()
    a, b = y.detach().unsafe_chunk(2)
    parts = [part.sigmoid_().requires_grad_() for part in (a, b)]
    group("two", parts[0], lambda a: a.cos() * parts[1].cos()).sum().backward()
    gradients = [part.grad for part in parts if part.grad is not None]
    return u.detach() + (x * torch.cat(gradients)).sin()


def unsaved_is_received(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """Between what the first group saves, something writes and counts no change, as collectives do.

    The second group saves all.
    """
    h = x * 2
    a, b, c = h[:2], h[2:4], h[4:]
    u = group("one", a, lambda a: a.sin() * c.cos())
    settle()
    b.data.fill_(3.0)
    return torch.cat([u, u, u]) + group("two", h, lambda h: h * h.exp())


def unsaved_is_received_beside_overlapping_views(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """As many bytes as the storage has were saved, some of them twice."""
    h = x * 2
    a, b, c = h[:2], h[2:4], h[4:]
    u = group("one", a, lambda a: a.sin() * c.cos() * a.view(-1).cos().view(2, 4))
    settle()
    b.data.fill_(3.0)
    return torch.cat([u, u, u]) + group("two", h, lambda h: h * h.exp())


def filled_anew(x: Tensor, group: Group, settle: Settle) -> Tensor:
    """Who saved it first has no use for it any more; another of its pack is alive."""
    buffer, found, alive = torch.empty_like(x), torch.zeros_like(x), []
    for number in (1.0, 2.0):
        buffer.data.fill_(number)
        h = x.detach().requires_grad_()
        y = group(f"microbatch {number}", h, lambda h: both(h * buffer, (h * 2).sin(), alive))
        settle()
        found += torch.autograd.grad(y.sum(), h)[0]
    return (x * found).sin()


def both(used: Tensor, other: Tensor, alive: list[Tensor]) -> Tensor:
    alive.append(other)
    return used


SETTLED = [
    gap_is_written,
    part_is_written,
    version_of_another,
    same_number,
    unsaved_is_received,
    unsaved_is_received_beside_overlapping_views,
    filled_anew,
]
CASES = [*((program, True) for program in SETTLED), (gap_is_written, False)]
"""Programs, and whether the first copy has ended when something changes."""


def gradient(
    program: Callable[[Tensor, Group, Settle], Tensor],
    device: torch.device,
    manager: PipelineOffloadManager | None = None,
    *,
    is_settled: bool = False,
) -> Tensor:
    x = torch.linspace(-1, 1, 24).view(6, 4).to(device).requires_grad_()
    if manager is not None:
        off_interface.init_chunk_handler(None, None, 1)

    def group(name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        with off_interface(manager is not None, x, name) as marked:
            y = compute(marked)
        return off_interface.group_commit(y, name=name) if manager is not None else y

    def settle() -> None:
        if manager is not None and is_settled:
            manager.backend.synchronize()
            for leaving in list(manager.offloader.engine.mover.in_flight.queue):
                leaving.offloaded.synchronize()  # a disk's, too
            manager.statistics()

    program(x, group, settle).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("tiers", [("host",), ("disk",)])
@pytest.mark.parametrize(("program", "is_settled"), CASES)
@pytest.mark.parametrize("kind", BACKENDS)
def test_no_copy_of_what_has_changed_is_shared(
    kind: str,
    program: Callable[[Tensor, Group, Settle], Tensor],
    is_settled: bool,
    tiers: tuple[str, ...],
    is_verified: bool,
    tmp_path: Path,
) -> None:
    directory = tmp_path if "disk" in tiers else None
    config = OffloadConfig(
        min_offloaded_tensor_size=1, tiers=tiers, disk_dir=directory, verify=is_verified
    )
    with use_backend(make_backend(kind), config=config) as manager:
        device = manager.backend.device
        expected = gradient(program, device)
        if is_settled or program is gap_is_written:
            assert torch.equal(gradient(program, device, manager, is_settled=is_settled), expected)
            for event in [read.event for read in manager.offloader.engine.mover.tier.reads]:
                event.synchronize()  # a thread keeps the memory that it reads to until then
            assert_idle(manager)
