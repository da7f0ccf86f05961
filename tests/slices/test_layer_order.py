"""Which layers come next is what came last time."""

from __future__ import annotations

import pytest

from pp_offload._slices.streamed_forward import LayerOrder


def forward(order: LayerOrder, layers: list[int], num: int = 1) -> list[list[int]]:
    order.begin()
    expected = [order.arrive(layer, num) for layer in layers]
    order.end()
    return expected


def backward(order: LayerOrder, layers: list[int], num: int = 1) -> list[list[int]]:
    return [order.return_to(layer, num) for layer in layers]


@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_at_first_the_usual_order_is_expected(num: int) -> None:
    order = LayerOrder(range(4))
    usual = [0, 1, 2, 3]
    assert forward(order, usual, num) == [usual[i + 1 :][:num] for i in usual]
    assert backward(order, usual[::-1], num) == [usual[:i][::-1][:num] for i in usual[::-1]]


def test_a_layer_that_is_called_twice() -> None:
    order = LayerOrder(range(3))
    forward(order, [0, 1, 0, 2])
    assert forward(order, [0, 1, 0, 2]) == [[1], [0], [2], []]
    assert backward(order, [2, 0, 1, 0]) == [[0], [1], [0], []]
    assert backward(order, [2, 0, 1, 0]) == [[0], [1], [0], []]


def test_layers_that_are_skipped() -> None:
    order = LayerOrder(range(5))
    forward(order, [0, 2, 4])
    assert forward(order, [0, 2, 4]) == [[2], [4], []]
    assert forward(order, [0, 4]) == [[2], []], "what is skipped was expected once"
    assert forward(order, [0, 1, 4]) == [[4], [2], []]
    assert backward(order, [4, 1, 0]) == [[1], [0], []]


def test_a_stack_that_runs_alone_does_not_disturb() -> None:
    """An encoder runs once, then a decoder for each token."""
    order = LayerOrder(range(4))
    for _ in range(2):
        assert forward(order, [0, 1]) == [[1], [2]]
        assert forward(order, [2, 3]) == [[3], []]
        assert forward(order, [2, 3]) == [[3], []]
    assert forward(order, [0, 1, 2, 3]) == [[1], [2], [3], []]


def test_a_backward_that_stopped_early() -> None:
    order = LayerOrder(range(4))
    forward(order, [0, 1, 2, 3])
    assert backward(order, [3, 2]) == [[2], [1]]
    assert backward(order, [3, 2, 1]) == [[2], [1], [0]]
