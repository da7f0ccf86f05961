"""The example of checkpoints compares five ways to train, and all come to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.examples import run_example

SMALL = "--steps 2 --layers 4 --width 32 --context 32 --batch 4".split()


def test_five_ways_to_train(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run_example("checkpoint_and_offload.py", *SMALL, "--json", out)
    assert "equal bit for bit" in done.stdout
    result = json.loads(out.read_text())
    assert result.pop("bitwise_equal") is True
    assert list(result) == ["none", "full", "selective-op", "offload", "both"]
    assert list(result) == [line.split()[0] for line in done.stdout.splitlines()[2:7]]
    held = {way: figures["held_bytes"] for way, figures in result.items()}
    assert held["full"] < held["selective-op"] < held["none"]
    assert held["offload"] < held["none"] and held["both"] < held["selective-op"]
    again = {way: figures["recomputed_ops"] for way, figures in result.items()}
    assert again["none"] == again["offload"] == 0
    assert 0 < again["selective-op"] == again["both"] < again["full"]
    moved = {way: figures["offloaded_bytes"] for way, figures in result.items()}
    assert moved["none"] == moved["full"] == moved["selective-op"] == 0
    assert moved["both"] > 0 and moved["offload"] > 0
