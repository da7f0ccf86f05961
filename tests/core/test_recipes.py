"""What is computed again in place of being copied: which operators, and never another bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    gradients,
    session,
)
from helpers.sessions import group as group_alone
from helpers.threaded import at_once
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import TorchDispatchMode

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadError, SavedTensorModifiedError, VerifyError
from pp_offload._core import cheap_operators as operators
from pp_offload._core.recipes import Recipes, Sums
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.plan import Plan

ROWS, COLUMNS = 6, 8
WEIGHT = nn.Parameter(drawn(COLUMNS, seed=1))
BIAS = nn.Parameter(drawn(COLUMNS, seed=2))
FROZEN = nn.Parameter(drawn(COLUMNS, seed=3), requires_grad=False)

Make = Callable[[Tensor, Tensor], Tensor]
hand_on: Any = BackwardHookFunction.apply


def rms(a: Tensor, b: Tensor) -> Tensor:
    """As Hugging Face writes it."""
    wide = a.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return WEIGHT.to(a.dtype) * wide.to(a.dtype)


def rotated(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    turned = torch.cat((-a[..., half:], a[..., :half]), -1)
    return a * torch.cos(drawn(1, COLUMNS)) + turned * torch.sin(drawn(1, COLUMNS))


def group(
    x: Tensor, compute: Callable[[Tensor], Tensor], is_on: bool = True, name: str = "part"
) -> Tensor:
    """A group, and another one of its name: the last one stays from the second step on."""
    y = group_alone(x, compute, is_on, name)
    return group_alone(y, torch.neg, is_on, name)  # type: ignore[no-any-return]


@contextmanager
def all_stay() -> Iterator[None]:
    """Groups stay, without what is computed again."""
    everywhere = MagicMock()
    everywhere.__contains__.return_value = True
    lean = property(lambda plan: everywhere, lambda plan, places: None)
    with patch.object(Chunk, "may_leave", lambda *_: False), patch.object(Plan, "lean", lean):
        yield


def copied(
    run: Callable[[bool], object], rematerialize: str, kind: str = "late", **options: Any
) -> int:
    """Bytes that a step copies."""
    with session(kind, rematerialize=rematerialize, **options) as manager:
        begin_step()
        run(True)
        return manager.statistics().bytes_offloaded


def check(
    run: Callable[[bool], list[Tensor]],
    kind: str = "late",
    again: bool | None = True,
    **options: Any,
) -> None:
    """Bits are equal in some steps, in each of which something is computed again, or nothing: where
    all leaves, and where all stays that is not computed again.
    """
    expected = run(False)
    for how, num_steps in ((nullcontext, 3), (all_stay, 2)):
        with session(kind, rematerialize="cheap", **options) as manager, how():
            for number in range(num_steps):
                before = manager.statistics()
                begin_step()
                assert_same(run(True), expected, f"step {number}")
                assert_idle(manager)
                now = manager.statistics().since(before)
                assert again in (None, now.bytes_computed_again > 0), f"step {number}"
                assert how is nullcontext or now.bytes_offloaded == 0
    if again:
        assert copied(run, "cheap", **options) < copied(run, "none", **options)


OPERATORS: dict[str, Make] = {
    "gelu": lambda a, b: F.gelu(a),
    "silu": lambda a, b: F.silu(a),
    "mish": lambda a, b: F.mish(a),
    "hardswish": lambda a, b: F.hardswish(a),
    "leaky relu": lambda a, b: F.leaky_relu(a, 0.2),
    "softplus": lambda a, b: F.softplus(a, 2),
    "glu": lambda a, b: F.glu(a, 0),
    "erf": lambda a, b: torch.erf(a),
    "relu": lambda a, b: F.relu(a),
    "tanh": lambda a, b: torch.tanh(a),
    "exp": lambda a, b: a.exp(),
    "product": lambda a, b: a * b,
    "product with a parameter": lambda a, b: a * WEIGHT,
    "quotient": lambda a, b: a / b,
    "power": lambda a, b: a**3,
    "sum": lambda a, b: a + b,
    "negative": lambda a, b: -a,
    "softmax": lambda a, b: a.softmax(-1),
    "log softmax": lambda a, b: a.log_softmax(0),
    "layer norm": lambda a, b: F.layer_norm(a, (COLUMNS,), WEIGHT, BIAS),
    "frozen layer norm": lambda a, b: F.layer_norm(a, (COLUMNS,), FROZEN, FROZEN),
    "product with a frozen parameter": lambda a, b: a * FROZEN,
    "layer norm without bias": lambda a, b: F.layer_norm(a, (COLUMNS,), WEIGHT),
    "composed rms norm": rms,
    "rms norm": lambda a, b: F.rms_norm(a, (COLUMNS,), WEIGHT, 1e-5),
    "group norm": lambda a, b: F.group_norm(a, 2, WEIGHT, BIAS, 1e-3),
    "native dropout": lambda a, b: torch.native_dropout(a, 0.5, True)[0],
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "repeat": lambda a, b: a.repeat(2, 1),
    "expanded": lambda a, b: a[:, None].expand(-1, 3, -1).reshape(-1, COLUMNS),
    "contiguous": lambda a, b: a.t().contiguous(),
    "rows": lambda a, b: a[[3, 1, 0, 5, 4, 2]],
    "selected rows": lambda a, b: a.index_select(0, torch.arange(ROWS)),
    "rotary": rotated,
    "deep": lambda a, b: torch.tanh(-(a * b) + a.sigmoid()) * 2,
    "of a part": lambda a, b: F.gelu(a.chunk(2, -1)[1]),
    "of a transposed": lambda a, b: F.silu(a.view(2, -1, COLUMNS).transpose(0, 1)),
    "of a reshaped": lambda a, b: a.t().reshape(2, 4, -1).exp(),
    "of an expert": lambda a, b: F.silu(a.t().split([3, 5])[1]).split([len(a) - 3, 3], 1)[0].exp(),
    "of all columns": lambda a, b: F.silu(a[:, :COLUMNS]),
    "of one unbound": lambda a, b: F.silu(a.unbind()[2]),
}


def hooked(make: Make) -> Make:
    """As modules with hooks for their backward, or sharded modules, hand tensors on."""
    return lambda a, b: hand_on(make(*hand_on(a, b)))[0]


for name in ("tanh", "deep", "cat", "layer norm", "expanded", "of a reshaped", "of an expert"):
    OPERATORS[f"{name} of hooked modules"] = hooked(OPERATORS[name])

OF_BFLOAT16: dict[str, Make] = {
    "wider": lambda a, b: a.float(),
    "wider alone": lambda a, b: (a * 3).sin().float(),
    "narrower": lambda a, b: (a.float() * 0.3).to(torch.bfloat16),
    "rms norm of bfloat16": rms,
}


def program(
    make: Make, dtype: torch.dtype = torch.float32, num_rows: int = ROWS
) -> Callable[[bool], list[Tensor]]:
    """Two layers, in groups of their own, which save what ``make`` gives and what it is given."""

    def layer(x: Tensor) -> Tensor:
        a, b = (x * 1.5).sin(), (x * 0.5).cos()  # sin and cos are no cheap operators here
        y = make(a, b)
        total = a.square().sum() + b.square().sum()  # both are saved
        return x + (y.double().sin().sum() + y.square().sum()).to(dtype) + total

    def run(is_on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        x = drawn(num_rows, COLUMNS).to(dtype).requires_grad_()
        h = x
        for _ in range(2):
            h = group(h, layer, is_on)
        h.float().sum().backward()
        return [h.detach(), *gradients(x, WEIGHT, BIAS)]

    return run


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("late", name) for name in OPERATORS | OF_BFLOAT16),
        *(("threads", name) for name in ("deep", "of a reshaped", "native dropout", *OF_BFLOAT16)),
    ],
)
def test_an_operator_runs_again(kind: str, name: str) -> None:
    make = (OPERATORS | OF_BFLOAT16)[name]
    dtype = torch.bfloat16 if name in OF_BFLOAT16 else torch.float32
    run = program(make, dtype)
    check(run, kind, verify=kind == "threads")
    y = make(*[drawn(ROWS, COLUMNS).to(dtype).requires_grad_() for _ in range(2)])
    less = copied(run, "none", kind) - copied(run, "cheap", kind)
    assert less >= 2 * (y.nbytes + y.double().nbytes)  # of two layers


def one_group(
    compute: Callable[[Tensor], Tensor],
    *parameters: Tensor,
    x: Tensor | None = None,
    behind: Callable[[], object] = lambda: None,
) -> Callable[[bool], list[Tensor]]:
    """A program of one group, which does ``behind`` between its forward and its backward."""
    values = drawn(ROWS, COLUMNS) if x is None else x

    def run(is_on: bool) -> list[Tensor]:
        leaf = values.clone().requires_grad_()
        y = group(leaf, compute, is_on)
        behind()
        y.float().sum().backward()
        return gradients(leaf, WEIGHT, BIAS, *parameters)

    return run


def same_in_steps(
    run: Callable[[bool, int], list[Tensor]],
    kind: str = "late",
    num_steps: int = 4,
    refused_in: int | None = None,
) -> int:
    """Bits are equal in each step, but for one in which a recipe is refused. Returns the bytes that
    were computed again.
    """
    with session(kind, rematerialize="cheap") as manager:
        for step in range(num_steps):
            begin_step()
            with pytest.raises(OffloadError) if step == refused_in else nullcontext():
                assert_same(run(True, step), run(False, step), f"step {step}")
        return manager.statistics().bytes_computed_again


def saved_bytes(num_tensors: int) -> int:
    return num_tensors * ROWS * COLUMNS * 4


@pytest.mark.parametrize("name", [*OPERATORS, *OF_BFLOAT16])
def test_other_lengths_are_not_tried_again(name: str) -> None:
    """A trial waits for the device, and texts have any length."""
    make = (OPERATORS | OF_BFLOAT16)[name]
    dtype = torch.bfloat16 if name in OF_BFLOAT16 else torch.float32
    trials = patch.object(Recipes, "_try", autospec=True, side_effect=Recipes._try)
    with session("late", rematerialize="cheap"), trials as tried:
        for step in range(5):
            before = tried.call_count
            run = program(make, dtype, 6 + 2 * step)
            begin_step()
            assert_same(run(True), run(False), f"step {step}")
            assert (tried.call_count > before) == (step == 0)


def test_what_a_chain_begins_with_is_copied_once_and_nothing_else() -> None:
    def chain(x: Tensor) -> Tensor:
        a = x.sin()  # saves x
        return (F.silu(a) * F.gelu(a)).square()  # silu and gelu save a; the product both; square it

    run = one_group(chain)
    check(run)
    assert copied(run, "none") == saved_bytes(5)  # x, a, silu, gelu, product
    assert copied(run, "cheap") == saved_bytes(2)


def test_a_copy_that_repeats_numbers_is_copied_without() -> None:
    """As keys that several heads share; nobody saves what they are made of."""
    check(one_group(lambda x: x.sin()[:, None].expand(-1, 4, -1).clone().square()), verify=True)


def test_a_group_that_stays_gives_up_what_is_computed_again() -> None:
    """Of a float32 that was bfloat16, too, it keeps the latter."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def compute(x: Tensor) -> Tensor:
        wide = (x * 3).sin().float()
        active = F.silu(wide)
        storages.extend(weakref.ref(each.untyped_storage()) for each in (wide, active))
        return active.square().to(torch.bfloat16)

    def are_gone() -> None:
        gc.collect()
        assert [each() for each in storages[-2:]] == [None, None]

    run = one_group(compute, x=drawn(ROWS, COLUMNS).to(torch.bfloat16), behind=are_gone)
    with session("late", rematerialize="cheap", verify=True) as manager, all_stay():
        for _ in range(2):
            begin_step()
            run(True)
        manager.reset()
        assert manager.statistics().bytes_offloaded == 0


def test_a_vector_of_statistics_is_no_input() -> None:
    """Their kernels write them and count no change, and the product was saved before."""
    statistics = torch.ones(COLUMNS)

    def compute(x: Tensor) -> Tensor:
        statistics.fill_(1.5)
        h = x.sin()
        return (h * statistics).square() + h.square()

    def kernel() -> None:
        with torch.autograd._unsafe_preserve_version_counter(statistics):
            statistics.mul_(2)

    check(one_group(compute, behind=kernel), again=False)


def test_a_frozen_weight_that_changes_unseen_before_the_commit_is_refused_once() -> None:
    def run(is_on: bool, step: int) -> list[Tensor]:
        x, weight = drawn(ROWS, COLUMNS).requires_grad_(), nn.Parameter(drawn(COLUMNS), False)

        def compute(h: Tensor) -> Tensor:
            y = h.square() + (h * weight).square()
            with torch.autograd._unsafe_preserve_version_counter(weight):
                weight.detach().mul_(1 + (step == 2))
            return y

        group(x.sin(), compute, is_on).sum().backward()
        return gradients(x)

    assert same_in_steps(run, refused_in=2) > 0


def test_rows_by_a_mask_or_by_a_tensor_without_dimensions() -> None:
    def run(is_on: bool, step: int) -> list[Tensor]:
        x, row = drawn(step + 1, COLUMNS).requires_grad_(), torch.tensor(step)

        def both(h: Tensor) -> Tensor:
            return h.square().sum() + torch.ops.aten.index(h, [row]).view(2, 4).square().sum()

        group(x.sin(), both, is_on).backward()
        return gradients(x)

    same_in_steps(run)
    check(one_group(lambda x: x.sin().exp()[x.detach().sum(1) > 0].cos()), again=False)


def test_an_input_whose_storage_its_owner_has_emptied() -> None:
    """That counts no change, and kernels read it all the same."""
    tensors: list[Tensor] = []

    def compute(x: Tensor) -> Tensor:
        h = x * 1.5
        tensors.extend((h, h.sin()))  # it is saved by this one, whose backward never comes
        return (h + h).square()

    run = one_group(compute, behind=lambda: tensors[0].untyped_storage().resize_(0))
    with session(rematerialize="cheap"), all_stay():
        begin_step()
        with pytest.raises(SavedTensorModifiedError):
            run(True)


@pytest.mark.parametrize("kind", ["late", "threads"])
def test_an_input_that_left_with_an_earlier_group(kind: str, tmp_path: Path) -> None:
    """But not one that is computed there, which is copied, or that only a disk has."""

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(ROWS, COLUMNS).requires_grad_()
        a = group(x, lambda x: x.sin().square(), is_on, "first")
        b = group(a, lambda a: F.silu(a), is_on, "second")
        c = group(b, lambda b: F.gelu(b).square(), is_on, "third")
        group(c, lambda c: (c * 2).tanh().square(), is_on, "fourth").sum().backward()
        return gradients(x)

    check(run, kind)
    check(run, kind, prefetch_bytes=0, max_in_flight_bytes=0)
    assert copied(run, "cheap") == saved_bytes(4)  # x, its sine, b, and c
    disk: dict[str, Any] = {"tiers": ("host", "disk"), "disk_dir": tmp_path}
    check(run, kind, **disk)
    assert copied(run, "cheap", **disk) == saved_bytes(4)
    assert copied(run, "cheap", **disk | {"tiers": ("disk",)}) == saved_bytes(5)


def test_an_output_that_was_changed_in_place_is_not_computed_again() -> None:
    run = one_group(lambda x: F.silu(x.sin().cos()).add_(1).square())
    check(run, again=False, verify=True)


@pytest.mark.parametrize("is_proved", [False, True])
@pytest.mark.parametrize("change", ["input", "input of the input"])
def test_of_an_input_that_was_changed_in_place_nothing_is_computed(
    change: str, is_proved: bool
) -> None:
    """It raises as autograd does, also where an earlier step has proved the recipe."""
    is_changed: list[bool] = []

    def compute(x: Tensor) -> Tensor:
        a = x.sin()
        b = a.cos()
        y = F.silu(b).square()
        return y + (b if change == "input" else a).mul_(2) if is_changed else y

    run = one_group(compute)
    with session(rematerialize="cheap"):
        if is_proved:
            begin_step()
            assert_same(run(True), run(False))
        is_changed.append(True)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            run(False)
        begin_step()
        with pytest.raises(SavedTensorModifiedError):
            run(True)


@contextmanager
def silu_runs_again_by(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What computes its output in backward."""
    node = operators.NODES["SiluBackward0"]
    silu = operators.OPERATORS[node]._replace(function=function)
    with patch.dict(operators.OPERATORS, {node: silu}):
        yield


def test_it_is_computed_once_for_all_that_saved_it() -> None:
    """And again in the next backward, for it is gone by then."""
    refs: list[weakref.ref[Tensor]] = []

    def counted(x: Tensor) -> Tensor:
        refs.append(weakref.ref(y := F.silu(x)))
        return y

    def compute(x: Tensor) -> Tensor:
        y = F.silu(x.sin())
        return y.square() + y.exp() * y + y.pow(3)

    with silu_runs_again_by(counted), session(rematerialize="cheap"):
        begin_step()
        y = group(drawn(ROWS, COLUMNS).requires_grad_(), compute)
        refs.clear()  # it was tried
        for number in (1, 2):
            y.sum().backward(retain_graph=True)
            assert len(refs) == number
            assert refs[-1]() is None


def test_norms_of_one_shape_have_an_eps_each() -> None:
    """The node does not tell it. Where one weight has two, the first is wrong for the second."""
    norms = [nn.LayerNorm(COLUMNS, eps=eps) for eps in (1e-5, 1e-3, 0.3, 1e-6)]
    other = nn.LayerNorm(COLUMNS, eps=0.1)
    other.weight = norms[0].weight

    def compute(x: Tensor) -> Tensor:
        for norm in (*norms, other, norms[1]):
            x = norm(x.sin()).square()
        return x

    check(one_group(compute), verify=True)


def test_a_norm_whose_eps_changes_is_refused_once() -> None:
    """Its other saved tensors would not tell that its output is computed with the old one."""
    norm = nn.LayerNorm(COLUMNS)
    run = one_group(lambda x: norm(x.sin()).square())
    with session("late", rematerialize="cheap") as manager:
        for norm.eps in (1e-5, 1e-3):
            begin_step()
            if norm.eps > 1e-5:
                with pytest.raises(OffloadError, match="eps of a norm is not what"):
                    run(True)
                begin_step()
            assert_same(run(True), run(False), f"eps {norm.eps}")
            assert manager.statistics().bytes_computed_again > 0
    assert_idle(manager)


UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "without grad": torch.no_grad()(lambda h: h.clamp_(-8, 8)),
    "through an alias": lambda h: h.detach().clamp_(-8, 8),
    "turned": torch.no_grad()(lambda h: h.copy_(h.flip(0)) if h.max() > 8 else h),
}


@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize(("earlier", "viewed"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_an_unsaved_tensor_that_changes_in_place_is_refused_once(
    change: str, earlier: bool, viewed: bool, kind: str
) -> None:
    """Nobody saves ``h``, so its version is unknown. In the first steps its values stay."""
    scale = [1.0]

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(ROWS, COLUMNS, seed=5).requires_grad_()

        def compute(y: Tensor) -> Tensor:
            a, b = y.sin() * scale[0], y.cos() * 3
            h = a * b  # saves both factors
            UNSEEN[change](h)
            return torch.relu(h.view(-1, 2) if viewed else h).square().sum()  # saves the relu

        y = group(x, torch.sin, is_on) if earlier else x
        group(y, compute, is_on).backward()
        return gradients(x)

    with session(kind, rematerialize="cheap") as manager:
        for scale[0] in (1.0, 1.0, 50.0, 1.0):
            begin_step()
            if scale[0] > 1:
                assert manager.statistics().bytes_computed_again > 0
                with pytest.raises(OffloadError, match=r"group 'part', .* changed in place where"):
                    run(True)
                begin_step()
            assert_same(run(True), run(False), f"scale {scale[0]}")
        assert_idle(manager)


@pytest.mark.parametrize("when", ["behind its use", "behind the group"])
def test_a_buffer_that_its_module_changes_unseen(when: str) -> None:
    """Through ``.data``, which a module may do with its own."""

    def run(is_on: bool, step: int) -> list[Tensor]:
        scale = torch.ones(1, COLUMNS)
        off_interface.mark_not_offloadable(scale)

        def change() -> None:
            scale.data.copy_(drawn(COLUMNS) if step > 1 else scale)

        def compute(x: Tensor) -> Tensor:
            h = x.sin()
            y = h * scale
            if when == "behind its use":
                change()
            return y.square() + h.square()

        x = drawn(ROWS, COLUMNS).requires_grad_()
        outputs = []
        for _ in range(2):
            begin_microbatch()
            outputs.append(group(x, compute, is_on))
            change()
        return [*torch.autograd.grad(sum(outputs, torch.zeros(())).sum(), x)]

    same_in_steps(run)


@pytest.mark.parametrize("change", [torch.neg, torch.fliplr, lambda x: x.roll(32, 1)])
@pytest.mark.parametrize("shape", [(64, 64), (5, 7)])
def test_sums_tell_what_moved_and_what_changed_its_sign(
    change: Callable[[Tensor], Tensor], shape: tuple[int, int]
) -> None:
    values = drawn(*shape).double()
    sums = Sums.of(values, lambda: None)
    sums.check(values.clone(), "part")
    with pytest.raises(OffloadError, match="cannot be computed again"):
        sums.check(change(values), "part")


@pytest.mark.parametrize("when", [0, 2])
def test_a_parameter_that_its_owner_empties_is_not_read(when: int) -> None:
    """As FSDP does behind a module's forward, before the group is committed."""
    values, weight = drawn(COLUMNS), nn.Parameter(drawn(COLUMNS))

    def fill(gradient: Tensor | None = None) -> None:
        weight.untyped_storage().resize_(values.nbytes)
        weight.data.copy_(values)

    def run(is_on: bool, step: int) -> list[Tensor]:
        def compute(x: Tensor) -> Tensor:
            fill()
            y = x.sin() * weight
            y.register_hook(fill)
            z = y.square()
            if step >= when:
                weight.untyped_storage().resize_(0)
            return z

        x = drawn(ROWS, COLUMNS, seed=3).requires_grad_()
        group(x, compute, is_on).sum().backward()
        return gradients(x, weight)

    same_in_steps(run, "cpu")


LAYOUTS = torch.contiguous_format, torch.channels_last


def of_a_single_channel(a: Tensor, late: bool) -> Tensor:
    """A convolution chooses its kernel by strides, of which both layouts here are contiguous."""
    return F.conv2d(a[:, :1].clone(memory_format=LAYOUTS[late]), drawn(8, 1, 3, 3)).square()


def permuted(a: Tensor, late: bool) -> Tensor:
    narrow = a.to(torch.bfloat16, memory_format=LAYOUTS[late])
    return narrow.permute((0, 2, 3, 1) if late else (0, 1, 2, 3)).square().float()


def repeated(a: Tensor, late: bool) -> Tensor:
    head = a[:, :1, 0].sin()
    if late:
        head = head.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return head.expand(3, 4, 9).clone().permute((2, 1, 0) if late else (0, 1, 2)).square()


def with_a_scalar(a: Tensor, late: bool) -> Tensor:
    return (a + SCALARS[late]).square()


SCALARS = [-nn.Parameter(torch.tensor(0.3)).exp(), nn.Parameter(torch.tensor(0.3)).sigmoid()]
"""Made outside of groups: tensors that are saved nowhere, and no numbers of Python."""


@pytest.mark.parametrize("compute", [of_a_single_channel, permuted, repeated, with_a_scalar])
def test_what_a_later_step_does_otherwise_is_no_recipe_of_before(
    compute: Callable[[Tensor, bool], Tensor],
) -> None:
    def run(is_on: bool, step: int) -> list[Tensor]:
        def both(x: Tensor) -> Tensor:
            a = x.sin()
            return compute(a, step > 1).sum() + a.square().sum()

        x = drawn(3, 4, 9, 9, seed=3).requires_grad_()
        group(x, both, is_on).backward(retain_graph=True)
        return gradients(x)

    same_in_steps(run)


def test_what_an_earlier_group_saved_may_change_before_it_is_used() -> None:
    """Its bytes have left, and no version tells."""

    def run(is_on: bool, step: int) -> list[Tensor]:
        def compute(h: Tensor) -> Tensor:
            with torch.no_grad():
                h.mul_(1 + step // 2)
            return torch.tanh(h).square()

        x = drawn(ROWS, COLUMNS, seed=3).requires_grad_()
        h = group_alone(x, lambda x: x.sin().sigmoid(), is_on)
        return [*torch.autograd.grad(group(h, compute, is_on).sum(), h)]

    same_in_steps(run, "cpu", refused_in=2)


def test_nodes_of_two_threads_with_one_number_are_no_one_node() -> None:
    """Each thread counts its nodes for itself."""
    weights = [nn.Parameter(drawn(COLUMNS, COLUMNS, seed=at)) for at in range(3)]

    def compute(h: Tensor) -> Tensor:
        a, b = h.sin() @ weights[0], torch.relu(h)
        c = (b @ weights[1]).sin() @ weights[2]
        return a.cos() * c.sin().cos()

    def run(is_on: bool, ahead: int) -> list[Tensor]:
        def embed() -> Tensor:
            for _ in range(20):
                torch.ones(1, requires_grad=True).neg()
            return drawn(ROWS, COLUMNS, seed=3).requires_grad_() * 2

        (h,) = at_once([embed])
        number = h.grad_fn._sequence_nr()

        def on_a_thread() -> Tensor:
            while torch.ones(1, requires_grad=True).neg().grad_fn._sequence_nr() < number - ahead:
                pass
            if is_on:
                begin_microbatch()
            return group(h, compute, is_on)

        at_once([on_a_thread])[0].sum().backward()
        return gradients(*weights)

    assert same_in_steps(run, "cpu", num_steps=14) > 0


def test_a_backward_on_fewer_or_more_threads_of_the_cpu() -> None:
    """A thread that did not set the number of threads has another one."""
    before = torch.get_num_threads()

    def run(is_on: bool, step: int) -> list[Tensor]:
        x, weight = (drawn(1000, 1003).requires_grad_() for _ in range(2))
        torch.set_num_threads(1)
        y = group(x, lambda x: F.silu(x) * weight, is_on)
        torch.set_num_threads(3)
        y.sum().backward()
        assert torch.get_num_threads() == 3
        return gradients(x, weight)

    try:
        assert same_in_steps(run, "cpu", num_steps=2) > 0
    finally:
        torch.set_num_threads(before)


class Rounding(TorchDispatchMode):
    """Rounds what an operator gives, as programs do that try a format of numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.bfloat16().float() if func is torch.ops.aten.silu.default else result


class Observing(TorchDispatchMode):
    only_observes = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("mode", [Rounding, Observing])
def test_a_dispatch_mode_of_the_program_changes_no_recipe(
    where: str, mode: type[TorchDispatchMode]
) -> None:
    def run(is_on: bool, step: int) -> list[Tensor]:
        x = drawn(ROWS, COLUMNS, seed=5).requires_grad_()
        with mode() if where != "backward" else nullcontext():
            y = group(x, lambda y: F.silu(y.sin()).square(), is_on)
        with mode() if where != "forward" else nullcontext():
            y.sum().backward()
        return gradients(x)

    num_bytes = same_in_steps(run)
    assert num_bytes > 0 or mode is Rounding


def test_a_fused_rms_norm_is_compared_as_well() -> None:
    """Its node is one of devices that have a kernel for it, so the operator is called by hand."""
    fused = operators.OPERATORS[operators.NODES["FusedRmsNormBackward0"]]
    assert fused.inputs[-1] == "_raw_saved_result1"
    x, forgotten = drawn(ROWS, COLUMNS), []
    expected, rstd = torch._fused_rms_norm(x, (COLUMNS,), WEIGHT, 1e-5)
    proved = operators.Eps(1e-5, lambda: forgotten.append(True))
    again = fused.function(x, WEIGHT, rstd, proved, (COLUMNS,))
    assert torch.equal(again, expected) and not forgotten
    with pytest.raises(OffloadError, match="eps of a norm is not what"):
        fused.function(x, WEIGHT, rstd, proved._replace(value=1e-3), (COLUMNS,))
    assert forgotten


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.layer_norm(x, (COLUMNS,), WEIGHT, BIAS, 1e-6),
        lambda x: x.reshape(COLUMNS, ROWS).t().clone().t(),
    ],
)
def test_a_tensor_of_equal_numbers_proves_little(compute: Callable[[Tensor], Tensor]) -> None:
    """Of zeros any norm gives the bias, and they are the same in any order."""

    def made_and_used(x: Tensor) -> Tensor:
        x = x.sin()
        return compute(x).square().sum() + x.square().sum()

    def run(is_on: bool) -> list[Tensor]:
        inputs = [torch.zeros(ROWS, COLUMNS), drawn(ROWS, COLUMNS)]
        losses = []
        for x in inputs:
            begin_microbatch()
            losses.append(group(x.requires_grad_(), made_and_used, is_on))
        sum(losses, torch.zeros(())).backward()
        return gradients(*inputs, WEIGHT, BIAS)

    check(run, again=None)


def test_a_tensor_of_zeros_proves_nothing() -> None:
    """As of a gate that begins at 0, summed over ranks in place, which counts no change."""

    def run(is_on: bool, step: int) -> list[Tensor]:
        x, gate = (drawn(ROWS, COLUMNS, seed=seed).requires_grad_() for seed in (3, 4))

        def compute(x: Tensor) -> Tensor:
            y = x * (gate * step)
            y.data.mul_(2)
            return F.silu(y)

        group(x, compute, is_on).sum().backward()
        return gradients(x, gate)

    same_in_steps(run)


def test_zeros_are_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a gate that stays 0 for some steps of a warm-up."""
    monkeypatch.setattr("pp_offload._core.recipes.MOST_TRIALS", 2)

    def run(is_on: bool, step: int) -> list[Tensor]:
        x, gate = (drawn(ROWS, COLUMNS, seed=seed).requires_grad_() for seed in (3, 4))
        group(x, lambda x: F.silu(x * (gate * (step // 3))), is_on).sum().backward()
        return gradients(x, gate)

    assert same_in_steps(run, num_steps=3) == 0 < same_in_steps(run, num_steps=6)


def test_a_norm_has_a_parameter_that_may_be_exchanged() -> None:
    weight = nn.Parameter(WEIGHT.detach().clone())

    def run(is_on: bool, step: int) -> list[Tensor]:
        x = drawn(ROWS, COLUMNS, seed=3).requires_grad_()
        group(x, lambda x: F.layer_norm(x, (COLUMNS,), weight).sin(), is_on).sum().backward()
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))
        return gradients(x)

    assert same_in_steps(run, num_steps=1) > 0


def test_a_chain_is_as_long_as_pays() -> None:
    """Its end is not all that backward has of it, and many ways through it are found at once."""

    def chain(x: Tensor) -> Tensor:
        x = x.sin()
        for _ in range(40):
            x = torch.tanh(x)
        for _ in range(12):
            x = x * torch.sigmoid(x)
        return x

    def scan(x: Tensor) -> Tensor:
        gates, h = [x.sin() for _ in range(40)], x.cos()
        for gate in gates:
            h = gate * h + gate
        return h

    for compute in (chain, scan):
        run = one_group(compute)
        check(run)
        assert copied(run, "cheap") > copied(run, "none") / 15


@pytest.mark.parametrize(
    "make",
    [
        lambda x, weight, bias: x * weight,
        lambda x, weight, bias: x * weight[None],
        lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
        lambda x, weight, bias: (x * weight) + bias,
    ],
)
def test_a_parameter_that_nobody_marked(make: Callable[..., Tensor]) -> None:
    """And that an operator may not have saved."""
    values = [drawn(COLUMNS, seed=seed) for seed in (4, 5)]
    parameters = [nn.Parameter(value.clone()) for value in values]

    def compute(x: Tensor) -> Tensor:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)
        return make(x.sin(), *parameters).square()

    run = one_group(compute, behind=lambda: [each.data.zero_() for each in parameters])
    check(run, again=None, min_offloaded_tensor_size=COLUMNS + 1)


def test_a_parameter_is_gone_until_the_backward_of_its_norm() -> None:
    """As FSDP empties it when the forward is over, and fills it for the backward of its module."""
    weight = nn.Parameter(drawn(COLUMNS, seed=1))

    def compute(x: Tensor) -> Tensor:
        y = F.layer_norm(x.sin(), (COLUMNS,), weight)
        y.register_hook(lambda g: refill())  # behind all that needs y
        return y.square()

    def refill() -> None:
        weight.untyped_storage().resize_(COLUMNS * 4)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(drawn(COLUMNS, seed=1))

    empty = lambda: weight.untyped_storage().resize_(0)  # noqa: E731
    check(one_group(compute, weight, behind=empty), verify=True)


def test_a_fused_optimizer_counts_no_change() -> None:
    """Several of its steps may come before the engine's next one, and graphs live on."""

    def run(is_on: bool, step: int) -> list[Tensor]:
        weight = nn.Parameter(drawn(COLUMNS, seed=1))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        results: list[Tensor] = []
        graphs: list[Tensor] = []
        for _ in range(3):
            begin_microbatch()
            x = drawn(ROWS, COLUMNS).requires_grad_()
            y = group(x, lambda x: F.layer_norm(x.sin(), (COLUMNS,), weight).square(), is_on)
            graphs.append(y.sum())
            graphs[-1].backward(retain_graph=True)
            results += [*gradients(x), weight.grad.clone()]
            optimizer.step()
        return results

    same_in_steps(run)


def test_every_other_row_of_a_parameter() -> None:
    """A copy of it has no gaps, and for a block of memory gelu rounds otherwise than for rows."""
    weight = nn.Parameter(drawn(6, 4))
    run = one_group(lambda x: torch.tanh(F.gelu(weight[::2])) * x, weight, x=drawn(3, 4))
    check(run, again=False, verify=True)


def test_a_backward_under_autocast_computes_what_ran() -> None:
    def run(is_on: bool) -> list[Tensor]:
        x = drawn(ROWS, COLUMNS).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = group(x, lambda x: (F.softmax(x @ WEIGHT.diag(), -1) * x).exp(), is_on)
        with torch.autocast("cpu", torch.float16):
            y.float().sum().backward()
        return gradients(x, WEIGHT)

    check(run, verify=True)


@pytest.mark.parametrize("is_committed", [True, False])
def test_nothing_keeps_the_graph(is_committed: bool) -> None:
    """A node whose output is saved is not held by that, else nobody would ever free both."""
    with session(rematerialize="cheap"):
        begin_step()
        x = drawn(ROWS, COLUMNS).requires_grad_()
        refs = []
        gc.collect()
        gc.disable()
        try:
            with off_interface(True, x, "part") as h:
                y = torch.tanh(h.sin())
                for _ in range(2):
                    node: Any = y.grad_fn
                    node.metadata["alive"] = alive = torch.zeros(1)  # as long as the node
                    refs.append(weakref.ref(alive))
                    y = y.exp()
                changed = (h * 2).t()  # whose node is made anew when tanh asks for it
                changed.t().add_(1)
                z = torch.tanh(changed)
                z.grad_fn.metadata["alive"] = alive = torch.zeros(1)
                refs.append(weakref.ref(alive))
                del z, changed
            if is_committed:
                y = off_interface.group_commit(y, name="part")
            del y, h, alive, node
            assert [ref() for ref in refs] == [None] * 3
        finally:
            gc.enable()


def test_wrong_bits_are_noticed() -> None:
    """With ``verify``, at each use; without, where the recipe is first met."""
    run = one_group(lambda x: F.silu(x.sin()).square())
    expected = run(False)
    with silu_runs_again_by(lambda x: F.silu(x) + 1e-7):
        assert copied(run, "cheap") == copied(run, "none")
        with session(rematerialize="cheap"):
            begin_step()
            assert_same(run(True), expected)
    right = [True]
    fickle = one_group(lambda x: F.silu(x.sin()).square(), behind=right.clear)
    with silu_runs_again_by(lambda x: F.silu(x) if right else F.silu(x) + 1):
        with session(rematerialize="cheap", verify=True):
            begin_step()
            with pytest.raises(VerifyError, match="was computed again with checksum"):
                fickle(True)
