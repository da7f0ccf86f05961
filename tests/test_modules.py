"""offload_modules: groups by module name, on a model nobody edited."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from toy import make_model, same_bits

from pp_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from pp_offload import GroupStateError, PipelineOffloadManager, offload_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_net(manager: PipelineOffloadManager) -> Net:
    torch.manual_seed(5)
    return Net().to(manager.backend.device)


def forward(
    model: nn.Module, manager: PipelineOffloadManager, *, chunk: bool = True
) -> tuple[Tensor, Tensor]:
    if chunk:
        off_interface.init_chunk_handler(None, None, 1)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 8, generator=generator).to(manager.backend.device).requires_grad_()
    return model(x), x


def step(model: nn.Module, manager: PipelineOffloadManager, *, chunk: bool = True) -> list[Tensor]:
    """Output and all gradients of one microbatch."""
    if chunk:
        off_interface.reset()
    out, x = forward(model, manager, chunk=chunk)
    out.square().mean().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [out.detach(), x.grad, *grads]


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def group_names(manager: PipelineOffloadManager) -> list[str]:
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    return [group.name for group in chunk.groups]


GROUPS = {"mlp": "layers.*.mlp", "core_attn": "layers.*.attn"}


def test_numbers_do_not_change(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    offload_modules(net, GROUPS)
    for _ in range(3):
        assert same_bits(step(net, manager), expected)
    assert manager.statistics().bytes_offloaded > 0
    assert manager.statistics().host_bytes_in_use == 0


class Logger(nn.Module):
    """Keeps what it computes and returns nothing."""

    def forward(self, x: Tensor) -> None:
        self.seen = x.sin().sum()


def test_a_module_without_output_is_committed_too(manager: PipelineOffloadManager) -> None:
    model = nn.Sequential(Logger())
    with offload_modules(model, {"log": "0"}):
        out, x = forward(model, manager)
        assert out is None
        chunk = manager.cur_forward_chunk()
        assert chunk is not None and chunk.find_next_group() is None
        model[0].seen.backward()
    assert x.grad is not None and x.grad.equal(x.detach().cos())


def test_each_module_is_a_group_in_the_order_of_forward(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    handle = offload_modules(net, GROUPS)
    assert handle.modules == {
        "mlp": [f"layers.{i}.mlp" for i in range(3)],
        "core_attn": [f"layers.{i}.attn" for i in range(3)],
    }
    forward(net, manager)
    assert group_names(manager) == ["core_attn", "mlp"] * 3


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
        ("layers.1.mlp", ["layers.1.mlp"]),
        ("layers.[01].attn", ["layers.0.attn", "layers.1.attn"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.?.mlp.0", ["layers.0.mlp.0", "layers.1.mlp.0", "layers.2.mlp.0"]),
        ("he*", ["head"]),
        (["head", "layers.0.mlp"], ["layers.0.mlp", "head"]),
    ],
)
def test_a_star_stands_for_one_part(pattern: Any, expected: list[str]) -> None:
    with offload_modules(Net(), {"group": pattern}) as handle:
        assert handle.modules == {"group": expected}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.*.mpl", "layers.0.mlp"),
        ("heads", "head"),
        ("layer.*.attn", "layers.0.attn"),
        ("layers.*.MLP", "layers"),
    ],
)
def test_a_pattern_without_a_match_is_an_error_with_near_names(pattern: str, near: str) -> None:
    net = Net()
    with pytest.raises(ValueError) as error:
        offload_modules(net, {"ok": "head", "wrong": pattern})
    message = str(error.value)
    assert f"'{pattern}'" in message
    assert near in message
    assert "expected" in message
    assert num_hooks(net) == 0


def test_every_pattern_without_a_match_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)'nope'.*'never'"):
        offload_modules(Net(), {"a": "nope", "b": "head", "c": "never"})


def test_a_pattern_of_a_list_without_a_match_is_an_error() -> None:
    with pytest.raises(ValueError, match="mpl"):
        offload_modules(Net(), {"mlp": ["layers.*.mlp", "layers.*.mpl"]})


def test_a_missing_module_may_be_allowed() -> None:
    handle = offload_modules(Net(), {"a": "nope", "b": "head"}, missing_ok=True)
    assert handle.modules == {"a": [], "b": ["head"]}


def test_remove_restores_the_model(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    handle = offload_modules(net, GROUPS)
    assert num_hooks(net) > 0
    handle.remove()
    handle.remove()
    assert num_hooks(net) == 0
    assert same_bits(step(net, manager, chunk=False), expected)
    assert manager.statistics().bytes_offloaded == 0


def test_the_handle_is_a_context_and_passes_exceptions_on() -> None:
    net = Net()
    with pytest.raises(KeyError), offload_modules(net, GROUPS):
        assert num_hooks(net) > 0
        raise KeyError
    assert num_hooks(net) == 0


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(8, 8))


class TakesOne(nn.Linear):
    """Takes a hook before its forward, and none behind it."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        raise TypeError("no hooks, please")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (scripted, "RecursiveScriptModule .*register_forward_pre_hook is not supported"),
        (TakesOne, "TakesOne .*no hooks, please"),
    ],
)
def test_a_module_that_takes_no_hooks_leaves_the_model_as_it_was(
    manager: PipelineOffloadManager, make: Callable[[], nn.Module], found: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), make()).to(manager.backend.device)
    expected = step(model, manager, chunk=False)
    with pytest.raises(ValueError, match=f"^module '1' is a {found}.*expected .*; name ") as error:
        offload_modules(model, {"a": ["0", "1"]})
    assert error.value.__cause__ is not None
    assert num_hooks(model) == 0
    assert same_bits(step(model, manager, chunk=False), expected)
    with offload_modules(model, {"a": "0"}):
        assert same_bits(step(model, manager), expected)


class Stops(nn.Linear):
    """Somebody presses Ctrl-C while it is given a hook."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        raise KeyboardInterrupt


def test_an_interrupt_while_hooks_are_given_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Stops())
    with pytest.raises(KeyboardInterrupt):
        offload_modules(model, {"a": "*"})
    assert num_hooks(model) == 0


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Nested(nn.Module):
    """Takes and gives tensors in all kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner({"a": (x, 3)}, [x.sin(), None], scale={"by": x.cos()}, flag=True)
        assert type(out) is dict and list(out) == ["pair", "list", "number"]
        assert type(out["pair"]) is Pair and type(out["list"]) is list
        assert out["number"] == 7 and out["list"][1] is None
        return out["pair"].first + out["pair"].second * out["list"][0]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8) / 3)

    def forward(self, a: dict, b: list, *, scale: dict, flag: bool) -> dict[str, Any]:
        assert flag and a["a"][1] == 3 and b[1] is None
        y = torch.tanh(a["a"][0] * self.weight) * b[0]
        z = (y * scale["by"]).exp()
        return {"pair": Pair(y, z), "list": [y.sigmoid(), None], "number": 7}


def test_tensors_in_tuples_dicts_and_keywords(manager: PipelineOffloadManager) -> None:
    net = Nested().to(manager.backend.device)
    expected = step(net, manager, chunk=False)
    offload_modules(net, {"inner": "inner"})
    for _ in range(2):
        assert same_bits(step(net, manager), expected)
    assert manager.statistics().bytes_offloaded > 0


class Source(nn.Module):
    """No tensor goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self) -> Tensor:
        return self.weight.exp()


class Sink(nn.Module):
    """Nothing comes out."""

    def forward(self, x: Tensor) -> None:
        self.seen = x.detach().sum()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.sink, self.mlp = Source(), Sink(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.sink(x)
        return self.mlp(x) * self.source()


def test_modules_without_input_or_output_tensors(manager: PipelineOffloadManager) -> None:
    net = Odd().to(manager.backend.device)
    expected = step(net, manager, chunk=False)
    offload_modules(net, {"source": "source", "sink": "sink", "mlp": "mlp"})
    for _ in range(3):
        assert same_bits(step(net, manager), expected)
    assert manager.statistics().host_bytes_in_use == 0


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)
        self.is_broken = False

    def maybe_fail(self, *_: object) -> None:
        if self.is_broken:
            raise ZeroDivisionError("on purpose")

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).exp()


def hooks_are_left() -> bool:
    """Whether autograd would still save tensors through somebody's hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@pytest.mark.parametrize("again", ["same chunk", "next step"])
def test_an_exception_in_forward_leaves_no_hook_and_the_next_step_is_right(
    manager: PipelineOffloadManager, again: str
) -> None:
    net = Net().to(manager.backend.device)
    expected = step(net, manager, chunk=False)
    offload_modules(net, GROUPS)
    broken = net.layers[1].mlp[1]
    failing = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    off_interface.reset()
    with pytest.raises(ZeroDivisionError):
        forward(net, manager)
    assert not hooks_are_left()
    failing.remove()
    if again == "same chunk":
        out, x = forward(net, manager, chunk=False)
        out.square().mean().backward()
        assert same_bits([out.detach()], expected[:1])
        del out, x
        net.zero_grad()
    for _ in range(2):
        assert same_bits(step(net, manager), expected)
    manager.reset()
    assert manager.statistics().host_bytes_in_use == 0


def test_an_exception_before_the_module_runs_leaves_no_hook(
    manager: PipelineOffloadManager,
) -> None:
    net = Fails().to(manager.backend.device)
    expected = step(net, manager, chunk=False)
    offload_modules(net, {"mlp": "mlp"})
    net.mlp.register_forward_pre_hook(net.maybe_fail)
    net.is_broken = True
    with pytest.raises(ZeroDivisionError):
        forward(net, manager)
    assert not hooks_are_left()
    net.is_broken = False
    assert same_bits(step(net, manager), expected)


def test_a_forward_without_a_chunk_is_an_error_and_leaves_no_hook(
    manager: PipelineOffloadManager,
) -> None:
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    offload_modules(net, GROUPS)
    with pytest.raises(GroupStateError, match="init_chunk_handler"):
        forward(net, manager, chunk=False)
    assert not hooks_are_left()
    assert same_bits(step(net, manager), expected)


def test_evaluation_passes_through(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    offload_modules(net, GROUPS)
    with torch.no_grad():
        forward(net, manager, chunk=False)
    assert manager.statistics().bytes_offloaded == 0


def test_a_copy_of_the_model_works(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    offload_modules(net, GROUPS)
    twin = copy.deepcopy(net)
    for model in (twin, net, twin):
        assert same_bits(step(model, manager), expected)
    assert manager.statistics().host_bytes_in_use == 0


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("way", COPIED)
def test_removing_the_handle_frees_a_copy_too(manager: PipelineOffloadManager, way: str) -> None:
    net = make_net(manager)
    expected, num = step(net, manager, chunk=False), num_hooks(net)
    handle = offload_modules(net, GROUPS)
    twin = COPIED[way](net)
    handle.remove()
    assert same_bits(step(twin, manager, chunk=False), expected)
    assert manager.statistics().bytes_offloaded == 0
    with offload_modules(twin, {"layer": "layers.*", **GROUPS}):
        assert same_bits(step(twin, manager), expected)
        assert group_names(manager) == ["layer", "core_attn", "mlp"] * 3
    assert num_hooks(twin) == num, "hooks that came with the copy are off it, too"


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_what_was_unpickled_has_no_groups(manager: PipelineOffloadManager, way: str) -> None:
    """Its handle is in another process, most often; groups of its own are nobody else's."""
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    offload_modules(net, GROUPS)
    twin = COPIED[way](net)
    assert same_bits(step(twin, manager, chunk=False), expected)
    offload_modules(twin, {"other": "layers.*"}).remove()
    assert same_bits(step(net, manager), expected)
    assert group_names(manager) == ["core_attn", "mlp"] * 3


def test_hooks_that_were_unpickled_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts from 0 in each process, and what is kept with a number is for its hook."""
    net = Net()
    offload_modules(net, GROUPS)
    pickled = pickle.dumps(net)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    twin, seen = pickle.loads(pickled), []
    for _ in range(20):
        twin.layers[0].mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args)))
    twin(torch.ones(5, 8))
    assert seen == [1] * 20


def test_a_copy_has_its_groups_for_as_long_as_the_handle(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    handle = offload_modules(net, GROUPS)
    twin = copy.deepcopy(copy.deepcopy(net))
    with pytest.raises(ValueError, match="'layers.0.mlp' .* is group 'mlp' already; remove"):
        offload_modules(twin, {"mlp": "layers.*.mlp"})
    handle.remove()
    offload_modules(twin, {"mlp": "layers.*.mlp"}).remove()
    assert num_hooks(twin) == 3, "nobody asked for groups of the others"


def test_a_forward_of_a_copy_in_which_the_handle_is_removed(
    manager: PipelineOffloadManager,
) -> None:
    """Its group is committed, for it was started."""
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    handle = offload_modules(net, GROUPS)
    twin = copy.deepcopy(net)

    def remove(*_: object) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(handle.remove).result()

    twin.layers[1].mlp[1].register_forward_hook(remove)
    assert same_bits(step(twin, manager), expected)
    assert group_names(manager) == ["core_attn", "mlp"] * 2
    assert not hooks_are_left()
    assert same_bits(step(twin, manager), expected)
    assert manager.statistics().host_bytes_in_use == 0


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(40.0).view(5, 8))
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()) * self.scale


def moved_by(model: nn.Module, manager: PipelineOffloadManager) -> int:
    before = manager.statistics().bytes_offloaded
    step(model, manager)
    return manager.statistics().bytes_offloaded - before


def test_parameters_and_buffers_stay(manager: PipelineOffloadManager) -> None:
    net = WithBuffer().to(manager.backend.device)
    offload_modules(net, {"mlp": "mlp"})
    assert moved_by(net, manager) == 5 * 8 * 4, "only the input is an activation"


def test_buffers_of_a_copy_stay(manager: PipelineOffloadManager) -> None:
    net = WithBuffer().to(manager.backend.device)
    offload_modules(net, {"mlp": "mlp"})
    assert moved_by(copy.deepcopy(net), manager) == 5 * 8 * 4


def test_a_module_called_twice_is_two_groups(manager: PipelineOffloadManager) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.mlp(x))

    net = Twice().to(manager.backend.device)
    expected = step(net, manager, chunk=False)
    offload_modules(net, {"mlp": "mlp"})
    for _ in range(3):
        assert same_bits(step(net, manager), expected)
    assert group_names(manager) == ["mlp", "mlp"]


def test_groups_may_nest(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    offload_modules(net, {"layer": "layers.*", "mlp": "layers.*.mlp"})
    for _ in range(3):
        assert same_bits(step(net, manager), expected)
    assert manager.statistics().host_bytes_in_use == 0


def test_markers_in_the_layer_and_by_name_do_the_same(manager: PipelineOffloadManager) -> None:
    device = str(manager.backend.device)
    marked = make_model(device=device)
    plain = make_model(groups=(), device=device)
    expected = step(marked, manager)
    offload_modules(plain, {"part": "*.up"})
    assert same_bits(step(plain, manager), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "other thread"])
def test_groups_in_a_recomputed_forward_do_nothing_in_backward(
    manager: PipelineOffloadManager, use_reentrant: bool, is_elsewhere: bool
) -> None:
    """An accelerator's backward runs on a thread of its own, where the chunk is not."""
    device = manager.backend.device
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)
    x = torch.linspace(-1, 1, 12).view(2, 6).to(device).requires_grad_()

    def gradients() -> list[Tensor]:
        loss = checkpoint(model, x * 2, use_reentrant=use_reentrant).sum()
        inputs = [x, *model.parameters()]
        for one in inputs:
            one.grad = None
        with ThreadPoolExecutor(1) as thread:
            backward = loss.backward
            thread.submit(backward).result() if is_elsewhere else backward()
        return [one.grad for one in inputs if one.grad is not None]

    expected = gradients()
    with offload_modules(model, {"layer": "*"}):
        for _ in range(3):
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
            assert same_bits(gradients(), expected)
    if use_reentrant:
        assert manager.statistics().bytes_offloaded == 0


def gradients_of(
    model: nn.Module, manager: PipelineOffloadManager, *, chunk: bool = True
) -> list[Tensor]:
    """Of what goes in, and of the parameters, after one forward and backward."""
    model.zero_grad()
    output, x = forward(model, manager, chunk=chunk)
    output.square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [one.clone() for one in found if one is not None]


@pytest.mark.parametrize("whose", ["own", "others", "both"])
@pytest.mark.parametrize("name", ["layers.1.mlp", "layers.1.mlp.0", "layers.1"])
def test_a_handle_is_removed_inside_a_forward(
    manager: PipelineOffloadManager, whose: str, name: str
) -> None:
    """Groups that are open there are committed, and those of other handles go on."""
    model, other = make_net(manager), make_net(manager)
    expected = gradients_of(model, manager, chunk=False)
    mine = offload_modules(model, {"mlp": "layers.*.mlp"})
    theirs = offload_modules(other, {"mlp": "layers.*.mlp"})
    going = {"own": [mine], "others": [theirs], "both": [mine, theirs]}[whose]

    def remove(*_: object) -> None:
        for one in going:
            one.remove()

    hook = model.get_submodule(name).register_forward_hook(remove)
    for step in range(2):
        off_interface.reset()  # nothing was started and never committed
        before = manager.statistics().bytes_offloaded
        assert same_bits(gradients_of(model, manager), expected)
        moved = manager.statistics().bytes_offloaded - before
        assert (moved > 0) is (whose == "others" or step == 0)
    hook.remove()
    off_interface.reset()
    mine.remove()
    theirs.remove()
    assert not any(module._forward_hooks for module in (*model.modules(), *other.modules()))
    with offload_modules(model, {"mlp": "layers.*.mlp"}):
        assert same_bits(gradients_of(model, manager), expected)
    off_interface.reset()
