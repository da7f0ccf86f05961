"""Wrong input gets an error that says what was found, what was expected and what to do.

Nothing is changed by it, in the manager or in autograd's stack of hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.sessions import assert_no_hooks
from torch import Tensor, nn

from pp_offload import (
    AcceleratorBackend,
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    ChunkOffloadHandler,
    CpuBackend,
    FullACParams,
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    PipelineOffloadManager,
    SelectiveLayerACParams,
    configure,
    fine_grained_offloading_group_start,
    get_act_offloading_ctx_manager,
    offload_modules,
    pipelining,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.activations import exclude
from pp_offload.testing import SimulatedBackend

pytestmark = pytest.mark.parametrize("backend", ["late"], indirect=True)
"""What is refused before anything is done is refused alike on all of them."""


def ones() -> Tensor:
    return torch.ones(4, requires_grad=True)


def refused(
    manager: PipelineOffloadManager, call: Callable[[], object], kind: Any, message: str
) -> None:
    """``call`` raises ``kind`` with this message, and the manager is as it was."""

    def state() -> tuple[object, ...]:
        is_enabled, delayed = manager.offloader.engine.is_enabled, len(manager.offloader.delayed)
        chunk, current = manager.cur_forward_chunk(), PipelineOffloadManager.get_instance()
        return chunk, manager.config, is_enabled, delayed, current, manager.num_attached

    before = state()
    with pytest.raises(kind, match=message):
        call()
    assert state() == before
    assert_no_hooks()


# Calls that cannot be right


class Net(nn.Module):
    """A model whose layers are in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def offload_model(**options: Any) -> OffloadModel:
    return OffloadModel(Net().layers, **{"device": "cpu", "num_slices": 1, **options})


context_of = get_act_offloading_ctx_manager

ABSENT: list[tuple[Callable[[], object], str]] = [
    (lambda: configure(None), r"config is None, .*write OffloadConfig\(\)"),
    (
        lambda: use_backend("late").__enter__(),
        r"backend is 'late', expected.*SimulatedBackend\(\"late\"\)",
    ),
    (lambda: use_backend(CpuBackend).__enter__(), r"class CpuBackend, .*such as CpuBackend\(\)"),
    (lambda: pipelining.attach(None), "schedule is None, .*expected.*pipelining"),
    (lambda: pipelining.attach(Net), "schedule is the class Net, .* no stages; expected"),
    (lambda: pipelining.attach(Net()), "schedule is a Net, which has no stages; expected"),
    (lambda: offload_modules(None, {"mlp": "*"}), "model is None, expected an nn.Module"),
    (lambda: offload_modules(Net(), ["a"]), 'groups is the list.*expected a mapping.*"mlp": "lay'),
    (
        lambda: ChunkOffloadHandler(1, None).on_group_start_forward(None),
        "name is None, expected a str",
    ),
    (lambda: off_interface.mark_not_offloadable(None), "tensor is None, expected a tensor"),
    (lambda: off_interface.mark_not_offloadable(Net()), "tensor is a Net, .*each tensor on its ow"),
    (lambda: OffloadActivations().keep_module(None), "model is None, expected an nn.Module"),
    (lambda: context_of(None), "model is None, expected an nn.Module"),
    (lambda: exclude(None), "module is None, expected an nn.Module"),
    (
        lambda: ActivationCheckpointing.apply_activation_checkpointing_(
            ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING, "", 3, FullACParams()
        ),
        "model is 3, expected an nn.Module",
    ),
    (lambda: AcceleratorBackend("cuda"), r"device is 'cuda', expected.*torch.device\("),
]
"""Objects of another class, which are a TypeError."""

WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: offload_modules(Net(), {}), "groups is empty, expected.*leave it"),
    (
        lambda: offload_modules(Net(), {"ok": "layers", "wrong": "Layers.*"}),
        r"'Layers\.\*' matches no module; near names: .*'layers.0'.*; expected names as in",
    ),
    (lambda: context_of(Net(), head=""), "head is ''.*expected.*named_modules"),
    (lambda: FullACParams(offload_input=True), r"offload_input \(did you mean offload_inputs\?\)"),
    (lambda: SimulatedBackend("last"), "'last'; expected.*'late'"),
    (lambda: SimulatedBackend("random", seed=None), "seed is None, expected an integer"),
    (
        lambda: OffloadActivations(max_fwd_stash_size=0, min_offload_size=-1),
        "^min_offload_size is -1, expected .*; max_fwd_stash_size is 0, expected",
    ),
    *(
        (lambda size=size, n=n: off_interface.init_chunk_handler(size, n, 1), message)
        for size, n in [(2, 2), (2, -1), (None, 1)]
        for message in [f"vp_stage is {n} .*vp_size {size}.*expected.*give None"]
    ),
]
"""Values that cannot be right, which are a ValueError."""


WITHOUT_A_CHUNK: list[tuple[Callable[[], object], str]] = [
    (call, r"'mlp' .*without a chunk.*init_chunk_handler\(.*attach")
    for call in (
        lambda: fine_grained_offloading_group_start(ones(), "mlp"),
        lambda: off_interface(True, ones(), "mlp").__enter__(),
        lambda: off_interface.group_commit(ones(), "mlp"),
    )
]


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        *((TypeError, call, message) for call, message in ABSENT),
        *((ValueError, call, message) for call, message in WRONG),
        *((GroupStateError, call, message) for call, message in WITHOUT_A_CHUNK),
    ],
)
def test_a_bad_call_says_what_was_expected(
    manager: PipelineOffloadManager, kind: Any, call: Callable[[], object], message: str
) -> None:
    refused(manager, call, kind, message)


CONFIGS: list[Callable[[Any], object]] = [
    configure,
    lambda config: use_backend(CpuBackend(), config=config).__enter__(),
    lambda config: PipelineOffloadManager(config=config),
    lambda config: OffloadActivations(config=config),
    lambda config: offload_model(config=config),
    lambda config: FullACParams(config=config),
    lambda config: context_of(Net(), config=config),
]


COUNTS: dict[str, Callable[[Any], object]] = {
    r"min_offloaded_tensor_size is {}, expected an integer of at least 0 \(elements\)": (
        lambda n: off_interface.init_chunk_handler(None, None, n)
    ),
    r"max_fwd_stash_size is {}, expected an integer of at least 1 \(tensors\)": (
        lambda n: OffloadActivations(max_fwd_stash_size=n)
    ),
    r"min_offload_size is {}, expected an integer of at least 0 \(bytes\)": (
        lambda n: OffloadActivations(min_offload_size=n)
    ),
    "num_slices is {}; expected 1": lambda n: offload_model(num_slices=n),
    "ac_freq is {}, expected an integer": lambda n: SelectiveLayerACParams(ac_freq=n),
}
FLAGS: dict[str, Callable[[Any], object]] = {
    "use_pin_memory": lambda flag: OffloadActivations(use_pin_memory=flag),
    "checkpoint_activation": lambda flag: offload_model(checkpoint_activation=flag),
    "enable_activation_offloading": lambda flag: context_of(Net(), flag),
    "offload_inputs": lambda flag: FullACParams(offload_inputs=flag),
    "missing_ok": lambda flag: offload_modules(Net(), {"a": "layers.0"}, missing_ok=flag),
}


@pytest.mark.parametrize("call", CONFIGS)
def test_options_that_are_no_config(
    manager: PipelineOffloadManager, call: Callable[[Any], object]
) -> None:
    advice = r"config is the dict .*expected an OffloadConfig; write OffloadConfig\(\*\*options\)"
    refused(manager, partial(call, {"prefetch_bytes": 1}), TypeError, advice)
    for config in ("late", OffloadConfig, 0):
        refused(manager, partial(call, config), TypeError, "expected an OffloadConfig")


@pytest.mark.parametrize("message", COUNTS)
def test_a_count_that_is_none(manager: PipelineOffloadManager, message: str) -> None:
    for value in (2.0, "1", True, [], -1):
        words = message.format(r"the list \[\]" if value == [] else re.escape(repr(value)))
        refused(manager, partial(COUNTS[message], value), ValueError, words)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_none(manager: PipelineOffloadManager, name: str) -> None:
    for value in ("yes", "", 0):
        words = f"{name} is {value!r}, expected True or False"
        refused(manager, partial(FLAGS[name], value), ValueError, words)


# Groups


@pytest.mark.parametrize("wrong", ["", None, 3, b"mlp", ["mlp"]], ids=repr)
def test_a_group_with_a_name_that_is_none(
    manager: PipelineOffloadManager, chunk: Any, wrong: Any
) -> None:
    x = ones()
    kind = ValueError if wrong == "" else TypeError
    refused(manager, lambda: off_interface(True, x, wrong).__enter__(), kind, "a str")
    assert chunk.is_empty_chunk()
    with off_interface(True, x, "mlp") as inside:
        y = inside.exp()
    words = "commit of a group whose name is .*, expected a str"
    refused(manager, partial(off_interface.group_commit, y, wrong), kind, words)
    off_interface.group_commit(y, "mlp").sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())


@pytest.mark.parametrize("delay", [False, True])
def test_forced_release_of_what_is_no_list_of_tensors(
    manager: PipelineOffloadManager, chunk: Any, delay: bool
) -> None:
    x = ones()
    with off_interface(True, x, "mlp") as inside:
        y = inside.exp()
    for wrong, words in [
        (y.detach(), "is a Tensor, expected a list of tensors, or None"),
        ([x, None], r"\[1\] is None, expected a tensor"),
    ]:
        commit = partial(off_interface.group_commit, y, "mlp", wrong, delay)
        refused(manager, commit, TypeError, f"forced_released_tensors.*{words}")
    assert [group.name for group in chunk.open_groups] == ["mlp"]
    off_interface.group_commit(y, "mlp", []).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())
