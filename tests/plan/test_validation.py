"""The benchmark that stands beside published figures: what it predicts behaves as theirs do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import validate_pipeoffload


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
