"""Checkpointed layers give the same bits, and keep what they were told to keep where they were."""

from __future__ import annotations

import copy
import enum
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as params
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_backend, on_two_backends
from helpers.checkpointed import ADDMM, BY_OP, EVERY_FEW, FULL, ORDERS, WAYS, make, results
from helpers.sessions import assert_no_hooks
from helpers.sliced import Order, twice
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from pp_offload import OffloadConfig, checkpoint, checkpoint_wrapper
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._checkpoint.selective import written_arguments
from pp_offload.backends import Backend, CpuBackend
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    FullACParams,
    SelectiveLayerACParams,
    SelectiveOpACParams,
    checkpoint_function,
)

apply_ = ActivationCheckpointing.apply_activation_checkpointing_
OP = "ops.aten.mm.default"


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_equal_bit_for_bit(active: Backend, way: str, order: Order) -> None:
    if order is twice and "reentrant" in way:
        pytest.skip("PyTorch's reentrant checkpoints can go backward once")
    plain, _ = make(active.device, None, active)
    model, recompute = make(active.device, way, active)
    for step in range(3):
        expected = results(plain, order, step, active.device)
        assert same_bits(results(model, order, step, active.device), expected), step
        assert_no_hooks()
    if recompute.stash is not None:
        gc.collect()
        statistics = recompute.stash.statistics()
        assert statistics.bytes_offloaded > 0
        assert statistics.host_bytes_in_use == statistics.live_tensors == 0


@on_two_backends
def test_a_checkpoint_in_a_checkpoint_offloads_nothing_of_its_own(active: Backend) -> None:
    run = Recompute(FullACParams(offload_inputs=True, min_offload_size=1), active)
    x, z = (torch.ones(64, device=active.device, requires_grad=True) for _ in range(2))
    y = run(lambda x: run(torch.tanh, run(torch.cos, run(torch.sin, x))), x * 1)
    assert run.stash.statistics().bytes_offloaded == x.nbytes
    y.sum().backward()
    (z * 1).sin().cos().tanh().sum().backward()
    assert same_bits([x.grad], [z.grad])


def test_layers_of_a_compiled_model() -> None:
    gradients = []
    for is_on in (False, True):
        torch._dynamo.reset()
        model = make_model(groups=())
        if is_on:
            recompute = apply_(FULL, "", model, OFFLOAD)
        x = torch.ones(5, 8, requires_grad=True)
        torch.compile(model, backend="aot_eager")(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert same_bits(*gradients)
    assert recompute.counts.recomputed_calls == 3
    assert recompute.stash.statistics().bytes_offloaded > 0


@dataclass(slots=True)
class Hidden:
    """No tree that PyTorch knows."""

    number: int
    states: list[Tensor]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_outputs_in_a_tree_have_gradients_and_objects_may_be_refused(use_reentrant: bool) -> None:
    recompute = Recompute(FullACParams(use_reentrant=use_reentrant))
    x = torch.ones(3, requires_grad=True)

    def returns_object(x: Tensor) -> tuple[Tensor, Hidden]:
        return x.cos(), Hidden(3, [x.sin()])

    out = recompute(lambda x: {"a": x.sin(), "b": (x.cos(), 7)}, x)
    assert out["b"][1] == 7
    (out["a"] + out["b"][0]).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos() - torch.ones(3).sin())
    x.grad = None
    if use_reentrant:
        with pytest.raises(TypeError, match="a function .* returns a Hidden, .*=False"):
            recompute(returns_object, x)
    else:
        sum(recompute(returns_object, x)[1].states).sum().backward()
        assert torch.equal(x.grad, torch.ones(3).cos())


def test_a_kept_operator_that_runs_more_often_is_an_error() -> None:
    nums = iter((1, 2))

    def uneven(x: Tensor) -> Tensor:
        for _ in range(next(nums)):
            x.detach() @ x.detach()
        return x.sin()

    params = SelectiveOpACParams(save_ops_keys=[OP], recompute_every={}, early_stop=False)
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="more often .* called 1 times; expected the same calls"):
        Recompute(params)(uneven, x).sum().backward()


def draws(x):
    """Random numbers from an operator that may be kept, and behind it from others."""
    noise = torch.rand_like(x) * torch.rand_like(x).sin() + torch.rand_like(x).cos()
    return (x * noise).sin() * nn.functional.dropout(x.square(), 0.5).sigmoid()


RAND = "ops.aten.rand_like.default"
DRAWN = {
    "saved": {"save_ops_keys": [RAND]},
    "offloaded": {"offload_ops_keys": [RAND]},
    "every second": {"offload_ops_keys": [RAND], "recompute_every": {RAND: 2}},
}


@pytest.mark.parametrize("options", DRAWN)
def test_numbers_behind_a_kept_operator_are_the_same(active: Backend, options: str) -> None:
    """PyTorch's selective checkpoints draw others there, and say nothing."""
    params = SelectiveOpACParams(offload_inputs=True, min_offload_size=1, **DRAWN[options])
    recompute = Recompute(params, active)

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.ones(50, device=active.device, requires_grad=True)
        (call(draws, x) + call(draws, x)).sum().backward()
        return [x.grad, torch.rand(1)]  # backward draws nothing from the caller's

    assert same_bits(run(recompute), run(lambda function, x: function(x)))
    num_kept = recompute.counts.saved_outputs + recompute.counts.offloaded_outputs
    assert num_kept == (4 if options == "every second" else 6), "calls are counted apart"


@pytest.mark.parametrize("where", ["save_ops_keys", "offload_ops_keys"])
def test_an_operator_that_raised_in_the_forward_raises_again(where: str) -> None:
    """A function that handles the error gets the outputs of the right calls."""

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        with suppress(RuntimeError):
            x @ torch.zeros(3, 3)
        return (x @ weight).sin() @ weight

    results = []
    recompute = checkpoint_function(**{where: [OP]}, recompute_every={}, min_offload_size=1)
    for call in (lambda function, *args: function(*args), recompute):
        torch.manual_seed(0)
        x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        call(compute, x, weight).sum().backward()
        results.append([x.grad, weight.grad])
    assert same_bits(*results)


@pytest.mark.parametrize("where", ["save_ops_keys", "offload_ops_keys"])
def test_an_operator_that_writes_an_argument_runs_again(where: str) -> None:
    """As the noise of rrelu, which its backward needs."""
    results, options = [], {where: ["ops.aten.rrelu_with_noise.default"], "min_offload_size": 1}
    for call in (lambda function, *args: function(*args), checkpoint_function(**options)):
        torch.manual_seed(0)
        x = torch.randn(8, 8, requires_grad=True)
        call(lambda x: F.rrelu(x.sin(), training=True).sin(), x).sum().backward()
        results.append([x.grad])
    assert same_bits(*results)


def test_an_output_that_was_not_given_is_not_written() -> None:
    """As of attention kernels; what they return is kept."""
    with torch.library._scoped_library("test_kept", "FRAGMENT") as library:
        library.define("attention(Tensor q, Tensor(a!)? out=None) -> Tensor")
        op, q = torch.ops.test_kept.attention.default, torch.ones(2)
        assert written_arguments(op, (q,), {}) == written_arguments(op, (q, None), {}) == []
        assert written_arguments(op, (q,), {"out": q}) == [q]


class Seen(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["save_ops_keys", "offload_ops_keys"])
def test_a_collective_ends_before_its_output_leaves(where: str, one_rank: None) -> None:
    """Which another forward that runs beside it may bring about. What stays may arrive later."""
    names: list[str] = []
    gather, group = partial(all_gather_tensor_autograd, gather_dim=0), torch.distributed.group.WORLD
    key = "ops._c10d_functional.all_gather_into_tensor.default"
    recompute = checkpoint_function(**{where: [key]}, min_offload_size=1)
    with Seen(names):
        recompute(lambda x: gather(x, group=group) * x.sin(), torch.ones(8, 8, requires_grad=True))
    before = names[: names.index("sin")]
    assert "all_gather_into_tensor" in before
    assert ("wait_tensor" in before) == (where == "offload_ops_keys")


WRITES: dict[str, Callable[[], nn.Module]] = {
    "GRU": partial(nn.GRU, 4, 4),
    "LSTMCell": partial(nn.LSTMCell, 4, 4),
    "ReLU": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("where", ["save_ops_keys", "offload_ops_keys"])
@pytest.mark.parametrize("kind", WRITES)
def test_outputs_that_are_written_into_are_recomputed(kind: str, where: str) -> None:
    """Also where no version counter tells, as in a GRU. Other outputs are kept."""
    results = []
    for is_on in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(WRITES[kind]())
        if is_on:
            options = {where: [ADDMM, OP], "recompute_every": {}, "min_offload_size": 1}
            counts = apply_(BY_OP, "", net, options).counts
        for seed in range(2):
            torch.manual_seed(seed)
            outputs = net(torch.randn(*((3, 5, 4) if kind == "GRU" else (5, 4))))
            while not isinstance(outputs, Tensor):
                outputs = outputs[0]
            outputs.square().sum().backward()
            results.append([outputs.detach(), *(p.grad.clone() for p in net.parameters())])
    assert same_bits(results[0], results[2]) and same_bits(results[1], results[3])
    num_kept = counts.saved_outputs + counts.offloaded_outputs
    assert counts.written_outputs > 0 and (num_kept > 0) == (kind in ("GRU", "LSTMCell"))


Colour = enum.Enum("Colour", ["RED"])

BAD = [
    (FULL, "body", FullACParams(), r"'body', but .* of this model: \['', 'c'\]"),
    (FULL, "a", FullACParams(), "a Linear; expected a ModuleDict, ModuleList or"),
    ("all", "", FullACParams(), "unknown variant 'all'; expected one of .*FULL"),
    (Colour.RED, "", FullACParams(), r"unknown variant Colour\.RED; expected one of .*FULL_"),
    (FULL, "", None, "ac_fun_params is None; expected FullACParams"),
    (FULL, "", {"offload": True}, r"unknown options 'offload' \(did you mean offload_inputs\?\)"),
    (EVERY_FEW, "", {"ac_freq": 3}, "ac_freq is 3, but '' has 2 layers; expected"),
    (FULL, "", SelectiveLayerACParams(ac_freq=1), "expected FullACParams"),
    (EVERY_FEW, "", params(), "without ac_freq; expected SelectiveLayerACParams"),
    (BY_OP, "", params(save_ops_keys=[]), "save_ops_keys is empty; expected .*mm.default"),
    (BY_OP, "", {"save_ops_keys": OP}, f"save_ops_keys is '{OP}'; expected a list of names"),
    (BY_OP, "", params(save_ops_keys=["mm"]), "unknown operator 'mm'; .*max.default"),
    *(
        (BY_OP, "", {"save_ops_keys": [OP], **options}, message)
        for options, message in [
            ({"offload_ops_keys": [OP]}, "expected in one"),
            ({"offload_ops_keys": ["ops.aten.view.default"]}, "returns memory of its arguments"),
            ({"use_reentrant": True}, "only non-reentrant checkpoints"),
            ({"recompute_every": {OP: 0}}, "expected an integer of at least 1"),
            ({"determinism_check": "all"}, 'expected "default" or "none"'),
            ({"min_offload_size": -1}, r"expected an integer of at least 0 \(bytes\)"),
        ]
    ),
    (FULL, "", {"use_reentrant": True, "early_stop": False}, "expected one or the other"),
]


@pytest.mark.parametrize(("variant", "layers", "options", "message"), BAD)
def test_bad_input_leaves_the_model_as_it_was(
    variant: Any, layers: str, options: Any, message: str
) -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(2, 2))
    model.add_module("c", nn.ModuleList([nn.Linear(2, 2)]))
    before = str(model)
    with pytest.raises(ValueError, match=message):
        apply_(variant, layers, model, options)
    assert str(model) == before


def test_a_checkpointed_model_is_not_to_be_checkpointed_again_or_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    apply_(FULL, "", model, FullACParams())
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_(FULL, "", model, FullACParams())
    with pytest.raises(TypeError, match=r"cannot be pickled.*save model.state_dict\(\)"):
        pickle.dumps(model)


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        (FULL, {}, "no input of at least 1024 bytes"),
        (FULL, {"min_offload_size": 1000}, "offloaded nothing.*at least 1000 "),
        (BY_OP, {"min_offload_size": 1, "offload_ops_keys": [OP]}, r"or of \['aten.mm.default'\]"),
    ],
)
def test_offload_of_nothing_is_warned_of_once(variant: Any, options: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))  # with a bias: no aten.mm
    options = options if variant is BY_OP else {"offload_inputs": True, **options}
    apply_(variant, "", model, options, backend=make_backend("cpu"))
    with pytest.warns(UserWarning, match=message) as caught:
        for _ in range(3):
            model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    assert len(caught) == 1


# By the function, and by the wrapper

OFFLOAD = {"offload_inputs": True, "min_offload_size": 1}


def test_equal_options_share_one_engine() -> None:
    run = checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert run is checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert run is not checkpoint_function(offload_inputs=True)
    assert run is not checkpoint_function(
        offload_inputs=True, config=OffloadConfig(prefetch_bytes=7), backend=CpuBackend()
    )
    of_pytorch = {"use_reentrant": False, "preserve_rng_state": True, "early_stop": True}
    assert checkpoint_function(**of_pytorch) is checkpoint_function()
    assert checkpoint_function().stash is None


def test_an_engine_goes_with_its_backend() -> None:
    backend = CpuBackend()
    gone = weakref.ref(backend)
    x = torch.ones(64, requires_grad=True)
    checkpoint(torch.sin, x, backend=backend, **OFFLOAD).sum().backward()
    run = checkpoint_function(backend=backend, **OFFLOAD)
    assert run is checkpoint_function(backend=backend, **OFFLOAD)
    del run, backend
    gc.collect()
    assert gone() is None


def wrapped() -> nn.Sequential:
    """A model whose layers are wrapped one by one, with offload."""
    return nn.Sequential(*(checkpoint_wrapper(layer, **OFFLOAD) for layer in make_model(groups=())))


def test_names_and_attributes_of_a_wrapper_are_those_of_the_module() -> None:
    plain, model = make_model(groups=()), wrapped()
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    layer = checkpoint_wrapper(nn.Linear(2, 2))
    assert isinstance(layer, CheckpointWrapper) and layer.out_features == 2
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_wrappers_trains_alike(make_copy: Callable[[nn.Module], Any]) -> None:
    model = wrapped()
    other, recompute = make_copy(model), model[0].recompute
    assert other[0].recompute is recompute
    assert other[0].up.weight is not model[0].up.weight
    plain = make_model(groups=())
    assert same_bits(*(run_step(each, batches(1), offload=False) for each in (other, plain)))
    assert recompute.stash.statistics().bytes_offloaded > 0
