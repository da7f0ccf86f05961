"""The time of a step over its peak memory: this engine below limits, beside other ways.

The cases of on_card.py with more layers, on a virtual H100 with rates that were measured on a real
one. Of this engine the last of several steps counts, after it has chosen what stays.

    python benchmarks/frontier.py --json frontier.json --picture docs/frontier.png

Ways
    limit F        device_limit_bytes, as a part of the peak without offload
    fraction F     activation_offload_fraction, which a user has to try
    recompute K    K of the layers are checkpointed, the others are not
    save_on_cpu K  K of the layers run in torch.autograd.graph.save_on_cpu(pin_memory=True)
    megatron K     Megatron-Core's own module, where installed, with attention and MLP of K layers
                   as groups; "attn" or "mlp": these groups alone, of all layers
    waiting K      the same, where the host waits for the device after each forward and each
                   backward, as Megatron-Core's schedules do by default around messages; without
                   that nothing bounds how many copied bytes are not free yet
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from command import parser_for, write_figures
from on_card import CASES, GIB, LARGE, Case
from virtual_h100 import GROUPS, virtual_step
from virtual_megatron import modules

from pp_offload._common import pictures

LIMITS = (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.25, 0.1)


def points(case: Case, *, quick: bool) -> list[dict[str, Any]]:
    """All of a case, the one without offload first."""
    all_layers = case.layers
    numbers = (all_layers,) if quick else range(1, all_layers + 1)
    none = virtual_step(case, "none", device_limit_bytes=None)
    rows = [{"way": "none", **none}]

    def add(name: str, way: str, *args: Any, **options: Any) -> None:
        options = options or {"device_limit_bytes": None}
        rows.append({"way": name, **virtual_step(case, way, *args, **options)})

    for part in LIMITS[-1:] if quick else LIMITS:
        add(f"limit {part:g}", "ours", device_limit_bytes=int(part * none["peak_gib"] * GIB))
    for fraction in () if quick else FRACTIONS:
        add(f"fraction {fraction:g}", "ours", activation_offload_fraction=fraction)
    peers = ("megatron", "waiting") if modules() else ()
    for way in ("recompute", "save_on_cpu", *peers):
        for name in GROUPS if way in peers else ():
            add(f"{way} {name}", way, all_layers, [name])
        for num in numbers:
            add(f"{way} {num}", way, num)
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


SERIES = (
    ("limit", "this engine, below a limit", pictures.BLUE, "o-"),
    ("fraction", "this engine, a fraction by hand", pictures.GREEN, "^-"),
    ("recompute", "some layers recomputed", pictures.ORANGE, "D-"),
    ("save_on_cpu", "some layers in save_on_cpu", pictures.VERMILION, "s-"),
    ("waiting", "Megatron-Core's module, the host waits", pictures.PURPLE, "v-"),
    ("megatron", "Megatron-Core's module, the host runs ahead", pictures.PURPLE, "v:"),
)
"""Way, what the legend says, colour and line."""


def draw(by_case: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel for each case: how much longer a step takes, over the peak."""
    figure = pictures.new_figure(4.2, layout="constrained")
    panels = figure.subplots(1, len(by_case), sharey=True, squeeze=False)[0]
    for axes, (case, rows) in zip(panels, by_case.items(), strict=True):
        for way, label, colour, line in SERIES:
            names = [row["way"].split() for row in rows]
            points = sorted(
                (row["peak_gib"], 100 * (row["ratio"] - 1))
                for row, name in zip(rows, names, strict=True)
                if name[0] == way and name[1] not in GROUPS
            )
            if points:
                axes.plot(*zip(*points, strict=True), line, color=colour, ms=4, label=label)
        axes.axvline(
            rows[0]["peak_gib"], color=pictures.BLACK, lw=1, ls="--", label="peak without offload"
        )
        axes.set(yscale="log", xlabel="peak of the device, GiB")
        axes.set_xlim(left=0)
        axes.set_title(case, fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter("{x:g} %")
    panels[0].set_ylabel("step longer than without offload")
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2
    )
    figure.suptitle("virtual, with the rates of a measured H100; lower left is better", fontsize=9)
    pictures.save(figure, path)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    num_layers = 2 if options.quick else options.layers
    by_case = {
        name: points(replace(CASES[name], layers=num_layers), quick=options.quick)
        for name in options.cases or LARGE
    }
    print(table(by_case))
    write_figures(by_case, options.json)
    if options.picture:
        draw(by_case, options.picture)


if __name__ == "__main__":
    main()
