"""Times that were measured count instead of the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from pytest import approx
from test_costs import EVEN, busy_s, meta
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import VirtualBackend

aten = torch.ops.aten


def taken_s(operator_seconds: Any, work: Callable[[], object]) -> float:
    """How long the device works on it."""
    backend = VirtualBackend(EVEN, operator_seconds)
    with backend.activate():
        work()
    return backend.compute.busy_s


def test_what_is_in_the_table_takes_its_time_and_the_rest_what_the_rates_say() -> None:
    left, right = meta(64, 64), meta(64, 64)
    assert taken_s({aten.mm: 0.25}, lambda: left @ right) == approx(0.25)
    assert taken_s({aten.mm.default: 0.25}, lambda: left @ right) == approx(0.25)
    assert taken_s({aten.mm: 0.25}, lambda: left + right) == busy_s(torch.add, left, right) > 0


def test_an_overload_counts_before_its_operator() -> None:
    table = {aten.add: 1.0, aten.add.Tensor: 2.0}
    assert taken_s(table, lambda: meta(4) + meta(4)) == approx(2.0)
    assert taken_s(table, lambda: aten.add.Scalar(meta(4), 1)) == approx(1.0)


def test_a_function_sees_the_sizes_and_may_not_know() -> None:
    def by_rows(func: Any, args: Any, kwargs: Any, outputs: Any) -> float | None:
        return outputs.shape[0] / 8 if func is aten.mm.default else None

    assert taken_s(by_rows, lambda: meta(2, 4) @ meta(4, 4)) == approx(0.25)
    assert taken_s(by_rows, lambda: meta(4) + meta(4)) == busy_s(torch.add, meta(4), meta(4))


def test_backward_takes_the_measured_times_too() -> None:
    x = meta(4, 4, needs_grad=True)
    products = lambda func, *rest: 0.5 if func is aten.mm.default else 0.0  # noqa: E731
    assert taken_s(products, lambda: (x @ x).sum().backward()) == 3 * 0.5


def test_views_take_none() -> None:
    assert taken_s(lambda *call: 1.0, lambda: meta(4, 4).t()) == approx(0)


def test_a_copy_may_take_the_same_whatever_its_size() -> None:
    """Two groups of one tensor each, on a device where nothing else takes time."""
    hardware = replace(EVEN, link_bytes_per_s=inf, copy_latency_s=1.0, launch_s=0)
    backend = VirtualBackend(hardware, lambda *call: 0)
    config = OffloadConfig(
        device_limit_bytes=None, min_offloaded_tensor_size=1, max_in_flight_bytes=2**30
    )
    with use_backend(backend, config=config):
        off_interface.init_chunk_handler(None, None, 1)
        x: Tensor = meta(8, needs_grad=True)
        for size in (8, 2**20):
            with off_interface(True, x, "group") as x:
                y = x.expand(size, 8).exp()
            x = off_interface.group_commit(y, name="group").sum(0)
        assert backend.seconds == 2.0


@pytest.mark.parametrize("value", [-1.0, "long", True, inf, float("nan")])
def test_a_time_that_makes_no_sense_is_refused(value: Any) -> None:
    message = "operator_seconds of aten.*mm.* are .*expected a number of at least 0"
    with pytest.raises(ValueError, match=message):
        VirtualBackend(EVEN, {aten.mm: value})
    with pytest.raises(ValueError, match=message):
        taken_s(lambda *call: value, lambda: meta(4, 4) @ meta(4, 4))


@pytest.mark.parametrize("given", [3.0, [(aten.mm, 1.0)], {"aten::mm": 1.0}, {torch.mm: 1.0}])
def test_what_is_no_table_of_operators_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"operator_seconds is .*, expected"):
        VirtualBackend(EVEN, given)
