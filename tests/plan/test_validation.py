"""The benchmark that stands beside published figures: what it predicts behaves as theirs do."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import validate_memo
import validate_pipeoffload

from pp_offload.simulate import DEVICES


@pytest.fixture(scope="module")
def short() -> validate_pipeoffload.Case:
    return validate_pipeoffload.Case(4096, 4096, layers=1)


def test_the_slower_the_link_the_longer_the_step(short: validate_pipeoffload.Case) -> None:
    found = [short.slowdown(link_gb) for link_gb in (8.0, 15.0, 200.0)]
    assert found[0] > found[1] > found[2] >= 0
    assert found[2] < 0.5


def test_a_layer_saves_thirty_two_bytes_a_token(short: validate_pipeoffload.Case) -> None:
    """As docs/validation.md says: of each unit of the hidden size."""
    (tape,) = short.tapes[0].stages.values()
    nbytes = sum(one.nbytes for one in tape.payloads)
    assert nbytes / (4096 * 4096) == pytest.approx(32, rel=0.01)


def test_longer_sequences_hide_more(short: validate_pipeoffload.Case) -> None:
    assert validate_pipeoffload.Case(4096, 16384, layers=1).slowdown(8.0) < short.slowdown(8.0)


# MEMO


def test_a_slice_saves_what_memo_counts() -> None:
    """Sixteen tensors as large as the hidden states, in two bytes, an eighth on each device."""
    one = validate_memo.layer(16, DEVICES["A100"])
    assert one.nbytes == 16 * 2 * 16 * 1024 * 4096 // 8


def test_a_slice_computes_an_eighth_of_a_layer() -> None:
    """Four products of 12 squares of the width, and the half of all scores and their rows."""
    hardware = replace(DEVICES["A100"], memory_bytes_per_s=inf, matmul_fraction=1.0)
    one = validate_memo.layer(16, hardware)
    num, width = 16 * 1024, 4096
    flops = (24 * num * width**2 + 2 * num**2 * width) / 8
    assert one.forward_ms == pytest.approx(flops / 312e12 * 1e3, rel=1e-9)


def test_copies_hide_from_the_length_that_is_found() -> None:
    hardware = replace(DEVICES["A100"], link_bytes_per_s=30e9)
    found = validate_memo.hidden_from(hardware)
    before, there = (validate_memo.layer(thousands, hardware) for thousands in (found - 1, found))
    assert before.copy_ms > before.forward_ms and there.copy_ms <= there.forward_ms
