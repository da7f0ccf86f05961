"""The time of a step over its peak memory: ours below limits, beside fractions and recompute.

The cases of on_card.py with more layers, on a virtual H100 with rates that were measured on a real
one. Of our own engine the last of some steps counts, when it has chosen what stays.

    python benchmarks/frontier.py --json frontier.json --picture frontier.svg

Ways
    limit F       device_limit_bytes, as a part of the peak without offload
    fraction F    activation_offload_fraction, which a user has to try
    recompute K   of the layers K are checkpointed, the others are not
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from on_card import CASES, LARGE, Case, Stage
from rematerialize import GIB, MEASURED

from pp_offload import OffloadConfig, use_backend
from pp_offload._common.pictures import BLACK, BLUE, GREEN, ORANGE, new_figure, save
from pp_offload.simulate import VirtualBackend

LIMITS = (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.25, 0.1)
SETTLED = 8
"""Steps until all is chosen, and one more."""


def point(case: Case, way: str, num_recomputed: int = 0, **options: Any) -> dict[str, Any]:
    """Milliseconds, peak and bytes of a step."""
    backend = VirtualBackend(MEASURED)
    config = OffloadConfig(min_offloaded_tensor_size=case.min_numel, **options)
    with use_backend(backend, config=config) as manager:
        stage = Stage(case, backend.device)
        stage.num_recomputed = num_recomputed
        for _ in range(SETTLED if way == "ours" else 2):
            begin_s, before = backend.seconds, manager.statistics()
            backend.memory.take_peak()
            stage.step(way, nullcontext)
            stage.clear()
            backend.synchronize()
        moved = manager.statistics().since(before)
    return {
        "step_ms": (backend.seconds - begin_s) * 1e3,
        "peak_gib": backend.memory.peak_bytes / GIB,
        "copied_gib": moved.bytes_offloaded / GIB,
        "again_gib": moved.bytes_computed_again / GIB,
    }


def points(case: Case, *, quick: bool) -> list[dict[str, Any]]:
    """All of a case, the one without offload first."""
    none = point(case, "none", device_limit_bytes=None)
    rows = [{"way": "none", **none}]
    for part in LIMITS[-1:] if quick else LIMITS:
        limit = int(part * none["peak_gib"] * GIB)
        rows.append({"way": f"limit {part:g}", **point(case, "ours", device_limit_bytes=limit)})
    for fraction in () if quick else FRACTIONS:
        row = point(case, "ours", activation_offload_fraction=fraction)
        rows.append({"way": f"fraction {fraction:g}", **row})
    for num in (case.layers,) if quick else range(1, case.layers + 1):
        row = point(case, "recompute", num, device_limit_bytes=None)
        rows.append({"way": f"recompute {num}", **row})
    for row in rows:
        row["ratio"] = row["step_ms"] / none["step_ms"]
        row["of_peak"] = row["peak_gib"] / none["peak_gib"]
    return rows


def table(by_case: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["case     way            step ms  ratio  peak GiB  of none  copied GiB  again GiB"]
    for case, rows in by_case.items():
        lines += [
            f"{case:<8} {row['way']:<13} {row['step_ms']:>8.1f} {row['ratio']:>6.3f} "
            f"{row['peak_gib']:>9.2f} {row['of_peak']:>8.2f} {row['copied_gib']:>11.2f} "
            f"{row['again_gib']:>10.2f}"
            for row in rows
        ]
    return "\n".join(lines)


def draw(by_case: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel for each case."""
    figure = new_figure(3.8, layout="constrained")
    panels = figure.subplots(1, len(by_case), sharey=True, squeeze=False)[0]
    for axes, (case, rows) in zip(panels, by_case.items(), strict=True):
        for kind, name, colour, marker in (
            ("limit", "below a limit, as the engine chooses", BLUE, "o"),
            ("fraction", "a fraction by hand", GREEN, "^"),
            ("recompute", "some layers recomputed, nothing leaves", ORANGE, "D"),
        ):
            line = sorted((r["peak_gib"], r["ratio"]) for r in rows if r["way"].startswith(kind))
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, ms=4, label=name)
        axes.plot([rows[0]["peak_gib"]], [1], "s", color=BLACK, ms=5, label="without offload")
        axes.set_xlim(left=0)
        axes.set_xlabel("peak of the device, GiB")
        axes.set_title(case, fontsize=9, loc="left")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("step, to one without offload")
    named = panels[0].get_legend_handles_labels()
    figure.legend(*named, fontsize=8, loc="outside lower center", ncols=2)
    figure.suptitle("virtual, with the rates of a measured H100", fontsize=9)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="two points of two layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    num_layers = 2 if options.quick else options.layers
    by_case = {
        name: points(replace(CASES[name], layers=num_layers), quick=options.quick)
        for name in options.cases or LARGE
    }
    print(table(by_case))
    if options.json:
        options.json.write_text(json.dumps(by_case, indent=1) + "\n")
    if options.picture:
        draw(by_case, options.picture)


if __name__ == "__main__":
    main()
