"""``pp-offload profile``: two tables, the same in JSON, and what is refused."""

from __future__ import annotations

import json

import pytest
from cli_runs import run

SMALL = "--ranks 2 --microbatches 4 --length 1024 --min-numel 1".split()


def test_a_row_for_each_kind_and_each_stage() -> None:
    """24 layers of width 1024 that save input and product of 1,024 tokens: 2 MiB each. The very
    first asks for no gradient of its input, and the last gets one that is a single number.
    """
    code, output = run("profile", "cli_models:deep", *SMALL)
    assert code == 0, output
    assert "cli_models:deep on 2 virtual H100, 1f1b" in output
    assert "layer 0 1 4.0 " in output and "layer 0-1 22 4.0 " in output
    assert "0 0 0.04 0.05 " in output and "1 1 0.03 0.05 " in output
    assert "how much less a microbatch holds" in output


def test_the_same_in_json() -> None:
    code, output = run("profile", "cli_models:deep", *SMALL, "--json")
    assert code == 0, output
    found = json.loads(output)
    assert [one["nbytes"] for one in found["groups"]] == [4 * 2**20] * 24
    assert [one["layer"] for one in found["groups"]] == [*range(12), *range(12)]
    assert [one["rank"] for one in found["stages"]] == [0, 1]
    assert found["stages"][0]["recompute_ms"] is None


def test_layers_are_recomputed_where_they_may_be() -> None:
    flags = ["profile", "cli_models:layered", *SMALL, "--json"]
    code, output = run(*flags)
    assert code == 0, output
    assert json.loads(output)["stages"][0]["recompute_ms"] > 0
    code, output = run(*flags, "--no-recompute")
    assert code == 0, output
    assert json.loads(output)["stages"][0]["recompute_ms"] is None


WRONG = {
    "profile": "found neither of module:function and --hf, expected one of the two",
    "profile cli_models:good --device K80": "found 'K80', expected one of A100",
    "profile cli_models:twice --ranks 2 --schedule zbv": "or stage saved as well",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_right(command: str) -> None:
    code, output = run(*command.split())
    assert code == 2
    plain = output.replace("│", " ")
    assert WRONG[command] in " ".join(plain.split()), output
