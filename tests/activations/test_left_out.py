"""What a left-out module saves stays on the device, and a checkpoint around it loses nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from helpers.toy import assert_no_hooks, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from pp_offload._activations.context import OffloadActivations, exclude, is_excluded
from pp_offload.testing import SimulatedBackend

WIDTH, ROWS = 8, 16


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not is_excluded()
    assert_no_hooks()


class Body(nn.Module):
    """Saves its input, three results, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(is_excluded())
        y = x.sin().exp().tanh()
        if self.error is not None:
            raise self.error
        return y


def make_model(device: torch.device | str = "cpu", seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), Body()) for _ in range(3))
    return nn.Sequential(*layers).to(device)


def make_x(device: torch.device | str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()


def test_inside_its_forward_and_nowhere_else() -> None:
    """Also in a copy, and where it raises."""
    model = make_model()
    exclude(model[1])
    exclude(model[1])
    copied = copy.deepcopy(model)
    for same in (model, copied):
        same(make_x())
        assert [layer[1].seen for layer in same] == [[False], [True], [False]]
    model[1][1].error = ValueError("in the forward")
    with pytest.raises(ValueError, match="in the forward"):
        model(make_x())


KINDS = {"reentrant": CheckpointImpl.REENTRANT, "non-reentrant": CheckpointImpl.NO_REENTRANT}


def checkpointed(model: nn.Sequential, impl: CheckpointImpl) -> nn.Sequential:
    return nn.Sequential(*(checkpoint_wrapper(layer, impl) for layer in model))


@pytest.mark.parametrize("impl", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("order", ["late", "eager"])
def test_in_a_checkpoint_it_keeps_nothing(impl: CheckpointImpl, order: str) -> None:
    """After a forward the device has the same bytes, with left-out modules inside or without."""
    held, gradients = [], []
    for num_left_out in (0, 1, 3):
        backend = SimulatedBackend(order, seed=1)
        with backend.activate():
            model = checkpointed(make_model(backend.device), impl)
            for layer in model[:num_left_out]:
                exclude(layer[1])
            offload = OffloadActivations(
                min_offload_size=1, max_fwd_stash_size=1, use_streams=False, backend=backend
            )
            x = make_x(backend.device)
            before = backend.device_bytes
            with offload:
                loss = model(x * 1).sum()
            held.append((backend.device_bytes - before, offload.statistics().live_tensors))
            loss.backward()
            assert offload.statistics().live_tensors == 0
            gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert same_bits(gradients[0], gradients[1]) and same_bits(gradients[0], gradients[2])
    assert held[0] == held[1] == held[2]
    assert held[0][1] == len(model), "what the checkpoints keep: the input of each"
