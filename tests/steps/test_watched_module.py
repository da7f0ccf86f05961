"""What a module has stays on the device, whatever becomes of it; else nothing is done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

from pp_offload._core.subclasses import plain_tensors
from pp_offload._core.tensors import StorageSet
from pp_offload._steps.watched_module import WatchedModule


class Counting(StorageSet):
    """Counts what is added."""

    num_added = 0

    def add(self, tensor: Tensor) -> None:
        self.num_added += 1
        super().add(tensor)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
        self.lazy = nn.LazyLinear(2)
        self.register_buffer("maybe", None)


@pytest.fixture
def kept() -> Counting:
    return Counting()


def other_memory(model: Model) -> None:
    model.a.weight.data = model.a.weight.data.clone()


def other_memory_twice(model: Model) -> None:
    """The second may lie where the first was."""
    for _ in range(2):
        model.a.weight.data = torch.ones(4, 4)


OLD: list[Tensor] = []


def other_memory_with_the_old_alive(model: Model) -> None:
    OLD.append(model.a.weight.data)
    other_memory(model)


def other_parameters(model: Model) -> None:
    state = {name: one.clone() for name, one in model.a.state_dict().items()}
    model.a.load_state_dict(state, assign=True)


def other_type(model: Model) -> None:
    model.inner.double()


def more_parameters(model: Model) -> None:
    model.a.register_parameter("scale", Parameter(torch.ones(3)))


def first_parameter_of_a_module(model: Model) -> None:
    model.inner[2].slope = Parameter(torch.ones(3))


def fewer_and_others(model: Model) -> None:
    model.a.bias = None
    model.a.scale = Parameter(torch.ones(4))


def made_late(model: Model) -> None:
    model.lazy(torch.ones(1, 3))


def other_buffer(model: Model) -> None:
    model.inner[1].running_mean = torch.ones(4)


def first_buffer(model: Model) -> None:
    model.maybe = torch.ones(5)


def more_modules(model: Model) -> None:
    model.inner.append(nn.Linear(4, 4))


def other_module(model: Model) -> None:
    model.inner[0] = nn.Linear(4, 4, bias=False)


def first_module_inside(model: Model) -> None:
    model.inner[2].add_module("adapter", nn.Linear(4, 4))


def a_tensor_made_of_others(model: Model) -> None:
    model.a.weight = Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))


def others_inside_a_tensor(model: Model) -> None:
    a_tensor_made_of_others(model)
    WatchedModule().keep(model, StorageSet())
    model.a.weight.a = torch.ones(4, 4)  # type: ignore[assignment]


CHANGES = [
    other_memory,
    other_memory_twice,
    other_memory_with_the_old_alive,
    other_parameters,
    other_type,
    more_parameters,
    first_parameter_of_a_module,
    fewer_and_others,
    made_late,
    other_buffer,
    first_buffer,
    more_modules,
    other_module,
    first_module_inside,
    a_tensor_made_of_others,
    others_inside_a_tensor,
]


def all_kept(model: nn.Module, kept: StorageSet) -> bool:
    tensors = [one for one in (*model.parameters(), *model.buffers())]
    known = [one for one in tensors if not nn.parameter.is_lazy(one)]
    return all(plain.detach() in kept for one in known for plain in plain_tensors(one))


@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_later_is_kept(change: Callable[[Model], None], kept: Counting) -> None:
    model, watched = Model(), WatchedModule()
    for _ in range(2):
        watched.keep(model, kept)
        assert all_kept(model, kept)
        change(model)
        watched.keep(model, kept)
        assert all_kept(model, kept)
        change = other_memory_twice


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_where_nothing_changed_nothing_is_added(
    change: Callable[[Model], None] | None, kept: Counting
) -> None:
    model, watched = Model(), WatchedModule()
    watched.keep(model, kept)
    if change is not None:
        change(model)
        watched.keep(model, kept)
    num_added = kept.num_added
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.a.parameters():
                parameter.data.mul_(2)  # as an optimizer does
        watched.keep(model, kept)
    assert kept.num_added == num_added


def test_another_module_and_another_set(kept: Counting) -> None:
    first, second, other, watched = Model(), Model(), Counting(), WatchedModule()
    for module, storages in ((first, kept), (second, kept), (second, other)):
        watched.keep(module, storages)
        assert all_kept(module, storages)


def test_memory_that_a_parameter_had_is_not_held(kept: Counting) -> None:
    model, watched = Model(), WatchedModule()
    watched.keep(model, kept)
    old = weakref.ref(model.a.weight.untyped_storage())
    other_memory(model)
    gc.collect()
    assert old() is None


def test_a_look_that_is_cut_off_is_made_again(
    kept: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, watched = Model(), WatchedModule()
    watched.keep(model, kept)
    other_memory(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Counting, "add", interrupt)
        watched.keep(model, kept)
    watched.keep(model, kept)
    assert all_kept(model, kept)


def interrupt(kept: Counting, tensor: Tensor) -> None:
    raise KeyboardInterrupt
