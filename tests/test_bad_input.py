"""Wrong input gets an error that says what was found, what was expected and what to do.

Or it passes through where that is right. Either way the next step works.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import NO_SPARSE, on_two_backends, skip_on_emulated
from torch import Tensor, nn
from toy import batches, make_model, run_step, same_bits

from pp_offload import (
    AcceleratorBackend,
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    ActivationOffloadingMixin,
    ChunkOffloadHandler,
    CpuBackend,
    FullACParams,
    GPUTensorPool,
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    OffloadError,
    OffloadModel,
    PipelineOffloadManager,
    SavedTensorModifiedError,
    SelectiveLayerACParams,
    SelectiveOpACParams,
    configure,
    fine_grained_offloading_backward_record,
    fine_grained_offloading_forward_record,
    fine_grained_offloading_group_start,
    get_act_offloading_ctx_manager,
    offload_modules,
    pipelining,
    print_offload_summary_table,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._activations.exclusions import exclude
from pp_offload._core.saved import Resident
from pp_offload.testing import SimulatedBackend


@cache
def without_offload(device: str) -> Sequence[Tensor]:
    """What a step comes to; always the same."""
    inputs = [x.to(device) for x in batches(3)]
    return run_step(make_model(groups=(), device=device), inputs, offload=False)


@pytest.fixture(autouse=True)
def next_step_works(manager: PipelineOffloadManager) -> Iterator[None]:
    """After each test a step on the current manager has the right numbers, and leaves nothing."""
    yield
    current = PipelineOffloadManager.get_instance()
    device = str(current.backend.device)
    inputs = [x.to(device) for x in batches(3)]
    for _ in range(2):
        assert same_bits(run_step(make_model(device=device), inputs), without_offload(device))
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


# Calls that cannot be right: nothing is changed, and the message has these words


class Net(nn.Module):
    """A model whose layers are in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def layers() -> nn.Sequential:
    return Net().layers


def checkpointed(model: Any = None, name: Any = "layers", **options: Any) -> object:
    params = options.pop("params", FullACParams())
    return ActivationCheckpointing.apply_activation_checkpointing_(
        ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING,
        name,
        Net() if model is None else model,
        params,
        **options,
    )


def init_with_microbatch(microbatch: Any) -> None:
    PipelineOffloadManager.get_instance().init_model_chunk_offload_handler(
        None, None, 1, microbatch=microbatch
    )


def use(backend: Any, **options: Any) -> None:
    with use_backend(backend, **options):
        pass


class FakeTrainer:
    """What the mixin calls in a trainer."""

    def __init__(self, said: object = True) -> None:
        self.args = SimpleNamespace(activation_offloading=said, device=torch.device("cpu"))
        self.model = Net()

    def compute_loss_context_manager(self) -> None: ...


class MyTrainer(ActivationOffloadingMixin, FakeTrainer): ...


def op_params(**options: Any) -> SelectiveOpACParams:
    return SelectiveOpACParams(**{"save_ops_keys": ["ops.aten.mm.default"], **options})


ONE_BACKEND = pytest.mark.parametrize("backend", ["late"], indirect=True)
"""What is refused before anything is done is refused alike on all of them."""

Case = tuple[Callable[[], object], type[Exception], Sequence[str]]

CONFIGS: Mapping[str, Callable[[Any], object]] = {
    "configure": configure,
    "use_backend": lambda config: use(CpuBackend(), config=config),
    "manager": lambda config: PipelineOffloadManager(config=config),
    "OffloadActivations": lambda config: OffloadActivations(config=config),
    "OffloadModel": lambda config: OffloadModel(layers(), "cpu", num_slices=1, config=config),
    "FullACParams": lambda config: FullACParams(config=config),
    "context of a model": lambda config: get_act_offloading_ctx_manager(Net(), config=config),
}

BACKENDS: Mapping[str, Callable[[Any], object]] = {
    "use_backend": use,
    "manager": lambda backend: PipelineOffloadManager(backend=backend),
    "OffloadActivations": lambda backend: OffloadActivations(backend=backend),
    "OffloadModel": lambda backend: OffloadModel(layers(), "cpu", num_slices=1, backend=backend),
    "checkpoints": lambda backend: checkpointed(backend=backend),
}

COUNTS: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "vp_size": (lambda n: off_interface.init_chunk_handler(n, 0, 1), "vp_size {}.*vp_stage from 0"),
    "vp_stage": (lambda n: off_interface.init_chunk_handler(2, n, 1), "vp_stage is {}"),
    "min_offloaded_tensor_size": (
        lambda n: off_interface.init_chunk_handler(None, None, n),
        r"min_offloaded_tensor_size is {}, expected an integer of at least 0 \(elements\)",
    ),
    "of a chunk": (lambda n: ChunkOffloadHandler(n, None), "min_offloaded_tensor_size is {}"),
    "microbatch": (init_with_microbatch, "microbatch is {}, expected an integer"),
    "max_fwd_stash_size": (
        lambda n: OffloadActivations(max_fwd_stash_size=n),
        r"max_fwd_stash_size is {}, expected an integer of at least 1 \(tensors\)",
    ),
    "min_offload_size": (
        lambda n: OffloadActivations(min_offload_size=n),
        r"min_offload_size is {}, expected an integer of at least 0 \(bytes\)",
    ),
    "num_slices": (
        lambda n: OffloadModel(layers(), "cpu", num_slices=n),
        "num_slices is {}; expected 1 to 2, the number of layers, as an integer",
    ),
    "num_microbatches": (
        lambda n: OffloadModel(layers(), "cpu", num_slices=1, num_microbatches=n),
        "num_microbatches is {}, expected an integer of at least 1",
    ),
    "ac_freq": (lambda n: SelectiveLayerACParams(ac_freq=n), "ac_freq is {}, expected an integer"),
    "of a checkpoint": (lambda n: FullACParams(min_offload_size=n), "min_offload_size is {}, expe"),
    "recompute_every": (
        lambda n: op_params(recompute_every={"ops.aten.mm.default": n}),
        "recompute_every.*is {}, expected an integer of at least 1",
    ),
    "inline_bytes": (lambda n: CpuBackend(inline_bytes=n), "inline_bytes is {}, expected an int"),
}

FLAGS: Mapping[str, Callable[[Any], object]] = {
    "use_pin_memory": lambda flag: OffloadActivations(use_pin_memory=flag),
    "use_streams": lambda flag: OffloadActivations(use_streams=flag),
    "checkpoint_activation": lambda flag: OffloadModel(
        layers(), "cpu", num_slices=1, checkpoint_activation=flag
    ),
    "enable_activation_offloading": lambda flag: get_act_offloading_ctx_manager(Net(), flag),
    "warn_if_no_head": lambda flag: get_act_offloading_ctx_manager(Net(), warn_if_no_head=flag),
    "offload_inputs": lambda flag: FullACParams(offload_inputs=flag),
    "use_reentrant": lambda flag: FullACParams(use_reentrant=flag),
    "preserve_rng_state": lambda flag: FullACParams(preserve_rng_state=flag),
    "early_stop": lambda flag: FullACParams(early_stop=flag),
    "missing_ok": lambda flag: offload_modules(Net(), {"a": "layers.0"}, missing_ok=flag),
    "pin_memory": lambda flag: GPUTensorPool("cpu", flag),
    "activation_offloading": lambda flag: MyTrainer(activation_offloading=flag),
    "activation_offloading of the trainer's arguments": lambda flag: MyTrainer(flag),
}

CALLS: Mapping[str, Case] = {
    "no options at all": (
        lambda: configure(None),  # type: ignore[arg-type]
        TypeError,
        ["config is None", r"write OffloadConfig\(\)"],
    ),
    "a backend's name": (
        lambda: use("late"),
        TypeError,
        ["backend is 'late'", r'SimulatedBackend\("late"\)'],
    ),
    "a backend's class": (lambda: use(CpuBackend), TypeError, [r"write CpuBackend\(\)"]),
    "no schedule": (lambda: pipelining.attach(None), TypeError, ["schedule is None", "pipelining"]),
    "a schedule's class": (
        lambda: pipelining.attach(Net),
        TypeError,
        ["schedule is the class Net"],
    ),
    "no model": (
        lambda: offload_modules(None, {"mlp": "*"}),  # type: ignore[arg-type]
        TypeError,
        ["model is None", "expected an nn.Module"],
    ),
    "no groups": (lambda: offload_modules(Net(), {}), ValueError, ["groups is empty", "leave it"]),
    "a list of groups": (
        lambda: offload_modules(Net(), ["layers.0"]),  # type: ignore[arg-type]
        TypeError,
        ["groups is the list", "a mapping of group names", '"mlp": "layers'],
    ),
    "no pattern": (
        lambda: offload_modules(Net(), {"a": None}),  # type: ignore[dict-item]
        TypeError,
        ["pattern of group 'a' is None", "a module name", "leave the group out"],
    ),
    "no patterns": (
        lambda: offload_modules(Net(), {"a": []}),
        ValueError,
        ["patterns of group 'a'", "at least one", "leave the group out"],
    ),
    "a pattern that is none": (
        lambda: offload_modules(Net(), {"a": ["layers.0", None]}),  # type: ignore[list-item]
        TypeError,
        ["a pattern of group 'a' is None", "a module name"],
    ),
    "an empty pattern": (
        lambda: offload_modules(Net(), {"a": ""}),
        ValueError,
        ["none of them em"],
    ),
    "a group's number": (
        lambda: offload_modules(Net(), {3: "layers.0"}),  # type: ignore[dict-item]
        TypeError,
        ["the name of a group is 3", "expected a str"],
    ),
    "a group without a name": (
        lambda: ChunkOffloadHandler(1, None).on_group_start_forward(None),  # type: ignore[arg-type]
        TypeError,
        ["start of a group whose name is None", "expected a str"],
    ),
    "nothing to mark": (
        lambda: off_interface.mark_not_offloadable(None),  # type: ignore[arg-type]
        TypeError,
        ["tensor is None", "expected a tensor"],
    ),
    "a model to mark": (
        lambda: off_interface.mark_not_offloadable(Net()),  # type: ignore[arg-type]
        TypeError,
        ["tensor is a Net", "each tensor on its own"],
    ),
    "no model to keep": (
        lambda: OffloadActivations().keep_module(None),  # type: ignore[arg-type]
        TypeError,
        ["model is None", "expected an nn.Module"],
    ),
    "no model to make a context for": (
        lambda: get_act_offloading_ctx_manager(None),  # type: ignore[arg-type]
        TypeError,
        ["model is None", "expected an nn.Module"],
    ),
    "a number as head": (
        lambda: get_act_offloading_ctx_manager(Net(), head=3),
        TypeError,
        ["head is 3", "or its name"],
    ),
    "an empty name of a head": (
        lambda: get_act_offloading_ctx_manager(Net(), head=""),
        ValueError,
        ["head is ''", "named_modules"],
    ),
    "the model as its head": (
        lambda: get_act_offloading_ctx_manager(model := Net(), head=model),
        ValueError,
        ["head is the model itself", "a module inside"],
    ),
    "nothing to leave out": (
        lambda: exclude(None),  # type: ignore[arg-type]
        TypeError,
        ["module is None", "expected an nn.Module"],
    ),
    "no device": (
        lambda: OffloadModel(layers(), None, num_slices=1),  # type: ignore[arg-type]
        TypeError,
        ["device is None", "torch.device"],
    ),
    "a device that is none": (
        lambda: OffloadModel(layers(), "gpu:x", num_slices=1),
        ValueError,
        ["device is 'gpu:x'", "such as 'cpu'"],
    ),
    "no model to checkpoint": (
        lambda: checkpointed(model=3),
        TypeError,
        ["model is 3", "expected an nn.Module"],
    ),
    "no layers to checkpoint": (
        lambda: checkpointed(name=None),
        TypeError,
        ["layers_fqn is None", "the name of a container"],
    ),
    "a list of checkpoint options": (
        lambda: checkpointed(params=["offload_inputs"]),
        ValueError,
        ["ac_fun_params is the list", "FullACParams"],
    ),
    "an unknown checkpoint option": (
        lambda: FullACParams(offload_input=True),  # type: ignore[call-arg]
        OffloadError,
        [r"no option offload_input \(did you mean offload_inputs\?\)"],
    ),
    "one operator": (
        lambda: op_params(save_ops_keys="ops.aten.mm.default"),
        ValueError,
        ["save_ops_keys is 'ops.aten", "expected a list of names"],
    ),
    "an operator without a name": (
        lambda: op_params(save_ops_keys=[None]),
        ValueError,
        [r"save_ops_keys is the list \[None\]", "expected a list of names"],
    ),
    "a list of frequencies": (
        lambda: op_params(recompute_every=[2]),
        TypeError,
        ["recompute_every is the list", "a mapping"],
    ),
    "a pool on no device": (
        lambda: GPUTensorPool(None),  # type: ignore[arg-type]
        TypeError,
        ["device is None", "such as 'cpu'"],
    ),
    "a pool on a device that is none": (lambda: GPUTensorPool("gpu:x"), ValueError, ["'gpu:x'"]),
    "a number as shape": (
        lambda: GPUTensorPool("cpu").allocate(3),  # type: ignore[arg-type]
        TypeError,
        ["shape is 3", "a tuple of integers"],
    ),
    "a shape of floats": (
        lambda: GPUTensorPool("cpu").allocate((2.5,)),  # type: ignore[arg-type]
        TypeError,
        [r"shape is the tuple \(2.5,\)", "a tuple of integers"],
    ),
    "a dtype's name": (
        lambda: GPUTensorPool("cpu").allocate((2,), "float32"),  # type: ignore[arg-type]
        TypeError,
        ["dtype is 'float32'", "torch.float32"],
    ),
    "nothing to free": (
        lambda: GPUTensorPool("cpu").free(None),  # type: ignore[arg-type]
        TypeError,
        ["tensor is None", "allocate"],
    ),
    "an unknown order": (lambda: SimulatedBackend("last"), ValueError, ["'last'", "'late'"]),
    "no seed": (
        lambda: SimulatedBackend("random", seed=None),  # type: ignore[arg-type]
        ValueError,
        ["seed is None", "expected an integer"],
    ),
    "a device's name": (
        lambda: AcceleratorBackend("cuda"),  # type: ignore[arg-type]
        TypeError,
        ["device is 'cuda'", r"torch.device\("],
    ),
    "no bytes to print": (
        lambda: print_offload_summary_table(None),  # type: ignore[arg-type]
        TypeError,
        ["total_offload_bytes is None", "by group name"],
    ),
    "no event": (
        lambda: fine_grained_offloading_forward_record(None),  # type: ignore[arg-type]
        TypeError,
        ["event is None", "expected an event"],
    ),
    "no event for backward": (
        lambda: fine_grained_offloading_backward_record(torch.ones(2, requires_grad=True), None),  # type: ignore[arg-type]
        TypeError,
        ["event is None", "expected an event"],
    ),
    "no chunk to queue": (
        lambda: PipelineOffloadManager.get_instance().push(None),  # type: ignore[arg-type]
        TypeError,
        ["handler is None", "ChunkOffloadHandler"],
    ),
    "no commit to delay": (
        lambda: PipelineOffloadManager.get_instance().push_offload_groups(None, None),  # type: ignore[arg-type]
        TypeError,
        ["group_hook is None", "expected a function"],
    ),
    "nothing to offload": (
        lambda: ChunkOffloadHandler(1, None).offload(None),  # type: ignore[arg-type]
        TypeError,
        ["src_tensor is None", "expected a tensor"],
    ),
    "an unknown option of a trainer": (
        lambda: MyTrainer(activation_offloading={"heads": "layers"}),
        ValueError,
        [r"unknown options 'heads' \(did you mean head\?\)"],
    ),
}


def refused(
    manager: PipelineOffloadManager, call: Callable[[], object], kind: type[Exception], *parts: str
) -> None:
    """``call`` raises what it should, and the manager is as it was."""
    chunk, config, enabled = (
        manager.cur_forward_chunk(),
        manager.config,
        manager.offloader.engine.is_enabled,
    )
    with pytest.raises(kind) as error:
        call()
    check(error.value, "expected", *parts)
    assert "unexpected keyword" not in str(error.value)
    assert PipelineOffloadManager.get_instance() is manager
    assert manager.cur_forward_chunk() is chunk
    assert manager.config is config
    assert manager.offloader.engine.is_enabled == enabled
    assert not manager.offloader.delayed


@ONE_BACKEND
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_says_what_was_expected(manager: PipelineOffloadManager, name: str) -> None:
    refused(manager, *CALLS[name][:2], *CALLS[name][2])


@pytest.mark.covering(1)
@ONE_BACKEND
@pytest.mark.parametrize("config", [{"prefetch_bytes": 1}, {}, "late", OffloadConfig, 0], ids=str)
@pytest.mark.parametrize("where", CONFIGS)
def test_options_that_are_no_config(
    manager: PipelineOffloadManager, where: str, config: Any
) -> None:
    parts = ["config is ", "expected an OffloadConfig"]
    if isinstance(config, dict):
        parts.append(r"write OffloadConfig\(\*\*options\)")
    refused(manager, lambda: CONFIGS[where](config), TypeError, *parts)


@pytest.mark.covering(1)
@ONE_BACKEND
@pytest.mark.parametrize("wrong", ["late", "", 0, [], torch.device("cpu"), CpuBackend], ids=str)
@pytest.mark.parametrize("where", BACKENDS)
def test_a_backend_that_is_none(manager: PipelineOffloadManager, where: str, wrong: Any) -> None:
    refused(manager, lambda: BACKENDS[where](wrong), TypeError, "backend is ", "expected a backe")


@pytest.mark.covering(1)
@ONE_BACKEND
@pytest.mark.parametrize("value", [2.0, "1", True, [], -1], ids=repr)
@pytest.mark.parametrize("where", COUNTS)
def test_a_count_that_is_none(manager: PipelineOffloadManager, where: str, value: Any) -> None:
    call, message = COUNTS[where]
    found = "the list \\[\\]" if value == [] else re.escape(repr(value))
    refused(manager, lambda: call(value), ValueError, message.format(found))


@pytest.mark.covering(1)
@ONE_BACKEND
@pytest.mark.parametrize("value", ["yes", "", 0, []], ids=repr)
@pytest.mark.parametrize("where", FLAGS)
def test_a_flag_that_is_none(manager: PipelineOffloadManager, where: str, value: Any) -> None:
    found = "the list \\[\\]" if value == [] else re.escape(repr(value))
    refused(
        manager,
        lambda: FLAGS[where](value),
        ValueError,
        f"{where} is {found}, expected True, ?F|or F",
    )


@ONE_BACKEND
@pytest.mark.parametrize(
    "groups", [{"a": "layers.0", "b": None}, {"a": "layers.0", 3: "layers.1"}, 5, {}], ids=str
)
def test_groups_that_are_none_leave_the_model_as_it_was(
    manager: PipelineOffloadManager, groups: Any
) -> None:
    model = Net()
    with pytest.raises((TypeError, ValueError)):
        offload_modules(model, groups)
    assert not any(module._forward_pre_hooks for module in model.modules())
    offload_modules(model, {"a": "layers.0", "b": "layers.1"}).remove()


SWITCHES: Mapping[str, Callable[[Any, Tensor], object]] = {
    "offload": lambda wrong, x: off_interface(wrong, x, "mlp"),
    "delay_offload": lambda wrong, x: off_interface.group_commit(x, "mlp", None, wrong),
}


@ONE_BACKEND
@pytest.mark.parametrize("wrong", ["yes", "", 2, [], 0.5, torch.ones(2)], ids=repr)
@pytest.mark.parametrize("where", SWITCHES)
def test_a_switch_that_is_neither_on_nor_off(
    manager: PipelineOffloadManager, where: str, wrong: Any
) -> None:
    open_chunk(manager)
    x = ones(manager)
    with off_interface(True, x, "mlp") as inside:
        y = inside.exp()
    refused(
        manager,
        lambda: SWITCHES[where](wrong, x),
        ValueError,
        f"{where} is .*, expected True or False",
    )
    off_interface.group_commit(y, "mlp").sum().backward()
    assert manager.statistics().bytes_offloaded == y.nbytes


@ONE_BACKEND
@pytest.mark.parametrize("on", [True, 1, np.True_], ids=repr)
@pytest.mark.parametrize("off", [False, None, 0, np.False_], ids=repr)
def test_what_stands_for_on_and_off(manager: PipelineOffloadManager, on: Any, off: Any) -> None:
    """A config may have such, and always could."""
    chunk, x = open_chunk(manager), ones(manager)
    with off_interface(off, x, "mlp") as inside:
        y = inside.exp()
    assert chunk.is_empty_chunk()
    with off_interface(on, y, "mlp") as inside:
        z = inside.exp()
    off_interface.group_commit(z, "mlp", None, on)
    assert len(manager.offloader.delayed) == 1
    manager.flush_delayed_groups()
    z.sum().backward()
    assert manager.statistics().bytes_offloaded == z.nbytes


@ONE_BACKEND
def test_a_group_with_an_empty_name(manager: PipelineOffloadManager) -> None:
    chunk, x = open_chunk(manager), ones(manager)
    refused(manager, lambda: off_interface(True, x, "").__enter__(), ValueError, "name is ''")
    refused(manager, lambda: off_interface.group_commit(x, ""), ValueError, "name is ''")
    assert chunk.is_empty_chunk()
    model = Net()
    refused(
        manager,
        lambda: offload_modules(model, {"a": "layers.1", "": "layers.0"}),
        ValueError,
        "name of a group is '', expected one that is not empty",
    )
    assert not any(module._forward_pre_hooks for module in model.modules())


NAMES: Mapping[str, object] = {"None": None, "a number": 3, "bytes": b"mlp", "a list": ["mlp"]}


@ONE_BACKEND
@pytest.mark.parametrize("name", NAMES)
def test_a_group_with_a_name_that_is_none(manager: PipelineOffloadManager, name: str) -> None:
    wrong: Any = NAMES[name]
    chunk, x = open_chunk(manager), ones(manager)
    refused(manager, lambda: off_interface(True, x, wrong).__enter__(), TypeError, "a str")
    if wrong is not None:
        refused(manager, lambda: fine_grained_offloading_group_start(x, wrong), TypeError, "a str")
    assert chunk.is_empty_chunk()
    with off_interface(True, x, "mlp") as inside:
        y = inside.exp()
    refused(
        manager, lambda: off_interface.group_commit(y, wrong), TypeError, "commit of a group whose"
    )
    off_interface.group_commit(y, "mlp").sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


RELEASED: Mapping[str, tuple[Callable[[Tensor], Any], str]] = {
    "a single tensor": (lambda x: x, r"a single tensor, expected a list of them; write \[tensor\]"),
    "a single element": (lambda x: x[:1], r"write \[tensor\]"),
    "a name": (lambda x: "x", "is 'x', expected a list of tensors, or None"),
    "a number": (lambda x: 1, "is 1, expected a list of tensors, or None"),
    "nothing in a list": (lambda x: [x, None], r"\[1\] is None, expected a tensor"),
    "an empty name": (lambda x: "", "is '', expected a list of tensors, or None"),
}


@on_two_backends
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("name", RELEASED)
def test_forced_release_of_what_is_no_list_of_tensors(
    manager: PipelineOffloadManager, name: str, delay: bool
) -> None:
    make, message = RELEASED[name]
    chunk, x = open_chunk(manager), ones(manager)
    with off_interface(True, x, "mlp") as inside:
        y = inside.exp()
    wrong = make(y.detach())
    refused(
        manager,
        lambda: off_interface.group_commit(y, "mlp", wrong, delay),
        TypeError,
        f"forced_released_tensors.*{message}",
    )
    refused(
        manager, lambda: chunk.on_group_commit_forward(wrong), TypeError, "forced_released_tensors"
    )
    assert [group.name for group in chunk.open_groups] == ["mlp"]
    off_interface.group_commit(y, "mlp", []).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)  # torch aborts in the watch of others
def test_a_tensor_changed_in_place_is_said_whatever_its_kind(
    manager: PipelineOffloadManager,
) -> None:
    """Nested tensors have no shape."""
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    leaf = torch.nested.nested_tensor(parts, device=manager.backend.device).requires_grad_()
    open_chunk(manager)
    with off_interface(True, leaf, "mlp") as x:
        y = torch.tanh(x)
    y = off_interface.group_commit(y, "mlp")
    y.mul_(2)
    with pytest.raises(SavedTensorModifiedError) as error:
        y.to_padded_tensor(0.0).sum().backward()
    check(error.value, "a nested tensor of shape unknown", "is at version 1, expected version 0")


def test_a_group_never_committed_is_not_blamed_on_size(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    open_chunk(manager)
    with off_interface(True, ones(manager), "mlp") as x:
        x.exp()
    with off_interface(True, ones(manager), "small") as x:
        y = x + 1
    off_interface.group_commit(y, "small")
    with caplog.at_level(logging.WARNING):
        manager.reset()
    mlp, small = (record.getMessage() for record in caplog.records)
    assert mlp.startswith("group 'mlp' offloaded nothing: it was started 1 times and never commit")
    assert "group_commit(output, name)" in mlp
    assert small.startswith("group 'small' offloaded nothing: none of its 1 groups saved a tensor")


# Chunks


@on_two_backends
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


@on_two_backends
def test_a_negative_minimum_size(manager: PipelineOffloadManager) -> None:
    with pytest.raises(ValueError) as error:
        off_interface.init_chunk_handler(None, None, -1)
    check(error.value, "min_offloaded_tensor_size is -1", "expected an integer of at least 0")


@on_two_backends
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
    check(error, "'mlp'", r"without a chunk on thread \d+", "init_chunk_handler")
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

LEFT: dict[str, Callable[[torch.device], Tensor]] = {
    "zero-size": lambda device: torch.empty(0, device=device),
    "zero-size in one dimension": lambda device: torch.empty(3, 0, 5, device=device),
    "sparse coo": lambda device: torch.eye(4, device=device).to_sparse(),
    "sparse csr": lambda device: torch.eye(4, device=device).to_sparse_csr(),
    "conjugated": lambda device: torch.randn(9, dtype=torch.complex64, device=device).conj(),
    "negated": lambda device: torch.randn(9, dtype=torch.complex64, device=device).conj().imag,
    "meta": lambda device: torch.empty(10, device="meta"),
    "parameter": lambda device: nn.Parameter(torch.randn(4, device=device)),
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
    if name.startswith("sparse"):
        skip_on_emulated(manager.backend, NO_SPARSE)
    tensor = LEFT[name](manager.backend.device)
    back, moved = through_a_group(manager, tensor)
    assert moved == 0
    assert (back.layout, back.shape, back.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    if name == "meta":
        assert back.is_meta
    else:
        assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense())


@on_two_backends
def test_a_sparse_group_input_passes_through(manager: PipelineOffloadManager) -> None:
    skip_on_emulated(manager.backend, NO_SPARSE)
    open_chunk(manager)
    leaf = torch.eye(4, device=manager.backend.device).to_sparse().requires_grad_()
    with off_interface(True, leaf, "mlp") as x:
        y = torch.sparse.mm(x, ones(manager, 4, 4))
    off_interface.group_commit(y, "mlp").sum().backward()
    assert leaf.grad is not None


@on_two_backends
@pytest.mark.parametrize("name", ["zero-size", "sparse coo", "meta"])
def test_a_tensor_that_cannot_move_may_be_marked(
    manager: PipelineOffloadManager, name: str
) -> None:
    if name.startswith("sparse"):
        skip_on_emulated(manager.backend, NO_SPARSE)
    tensor = LEFT[name](manager.backend.device)
    off_interface.mark_not_offloadable(tensor)
    chunk = open_chunk(manager)
    chunk.on_group_start_forward("mlp")
    assert isinstance(chunk.tensor_push(tensor), Resident)


@on_two_backends
def test_outputs_that_are_no_tensors_pass_through_a_commit(
    manager: PipelineOffloadManager,
) -> None:
    open_chunk(manager)
    with off_interface(True, ones(manager), "mlp") as x:
        y = x.exp()
    out = off_interface.group_commit({"y": (y, None, 3), "n": [torch.empty(0)]}, "mlp")
    assert list(out) == ["y", "n"]
    assert out["y"][1:] == (None, 3)
    out["y"][0].sum().backward()


# Attached twice


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


@ONE_BACKEND
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"groups": 5}, ["groups is 5", "a mapping of group names"]),
        ({"groups": {}}, ["groups is empty", "leave it out"]),
        ({"groups": {"up": None}}, ["pattern of group 'up' is None"]),
        ({"groups": {"up": "*.up"}, "config": {}}, ["config is the dict", r"OffloadConfig\(\*\*"]),
        ({"config": {"prefetch_bytes": 1}}, ["config is the dict", r"OffloadConfig\(\*\*"]),
    ],
)
def test_attach_with_bad_options_leaves_the_schedule_alone(
    schedule: Any, manager: PipelineOffloadManager, options: Any, parts: list[str]
) -> None:
    before = dict(vars(schedule))
    refused(
        manager, lambda: pipelining.attach(schedule, **options), (TypeError, ValueError), *parts
    )
    assert vars(schedule) == before
    assert not manager.num_attached
    pipelining.attach(schedule, groups={"up": "*.up"}).detach()
