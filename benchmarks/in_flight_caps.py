"""Peak memory and step time by how much may be on its way to the host.

A group of 700 MiB is larger than some of the caps. Compute never waits for the group that was sent
last, so one may always be under way; a larger cap lets more follow before compute waits.

    python benchmarks/in_flight_caps.py --device cuda --json caps.json

Figures, by cap; ``none`` is without offload, ``default`` the engine's own bound
    step_ms          median of a forward and a backward
    ratio_to_none    of the medians
    peak_bytes       allocated on the device at the peak of a step; None where it cannot tell
    offloaded_bytes  in a step
    bitwise_equal    whether its gradients are those without offload
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, Literal

import torch
from large_groups import Layers
from machine import DEVICES, MIB, device_of, peak_bytes, reset_peak
from torch import Tensor

from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import default_backend

Cap = int | Literal["auto"]


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The figures of each cap, in the order given."""
    device = device_of(options.device)
    layers = Layers(device, options.layers, int(options.group_mib * MIB), options.width)
    figures, expected = {}, None
    for name, cap in named_caps(options.caps_mib).items():
        config = OffloadConfig(
            device_limit_bytes=None, min_offloaded_tensor_size=1, max_in_flight_bytes=cap
        )
        with use_backend(default_backend(device), config=config) as manager:
            for _ in range(options.warmup):
                layers.step(offload=name != "none")
            before = manager.statistics().bytes_offloaded
            reset_peak(device)
            times = [layers.step(offload=name != "none") for _ in range(options.rounds)]
            moved = manager.statistics().bytes_offloaded - before
        expected = expected or layers.gradients()
        figures[name] = {
            "step_ms": statistics.median(times) * 1e3,
            "peak_bytes": peak_bytes(device)[0],
            "offloaded_bytes": moved // options.rounds,
            "bitwise_equal": same_bits(expected, layers.gradients()),
        }
    for one in figures.values():
        one["ratio_to_none"] = one["step_ms"] / figures["none"]["step_ms"]
    return figures


def named_caps(caps_mib: list[float]) -> dict[str, Cap]:
    """Bytes, or what leaves the bound to the engine."""
    return {
        "none": "auto",
        **{f"{cap:g} MiB": int(cap * MIB) for cap in caps_mib},
        "default": "auto",
    }


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def table(figures: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'in flight':>10}  step ms  to none  peak MiB  sent MiB  same bits"]
    for name, one in figures.items():
        peak = "-" if one["peak_bytes"] is None else f"{one['peak_bytes'] / MIB:.1f}"
        lines.append(
            f"{name:>10}  {one['step_ms']:7.1f}  {one['ratio_to_none']:7.2f}  {peak:>8}  "
            f"{one['offloaded_bytes'] / MIB:8.1f}  {'yes' if one['bitwise_equal'] else 'NO':>9}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--caps-mib", type=float, nargs="+", default=[256, 512, 2048])
    parser.add_argument("--group-mib", type=float, default=700)
    parser.add_argument("--layers", type=int, default=8, help="groups in a step")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.caps_mib, options.group_mib = [0.025, 0.05, 0.2], 0.07
        options.width, options.warmup, options.rounds = 32, 1, 1
    return options


def main() -> None:
    options = parse()
    figures = measure(options)
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
