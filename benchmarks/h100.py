"""Steps on a virtual H100 beside the same steps on the H100 whose rates it has.

``results/h100.json`` has what was measured there: the rates of the machine, how long operators of a
plain step of gpt4096 took, and steps of on_card.py. Each step runs again here, on a device that has
these rates; operators of llama8b were not timed, so rates alone say how long they take.

    python benchmarks/h100.py
    python benchmarks/h100.py --quick

Figures of a row: what was measured, what it is here, and how far off that is, in percent
    ms        of a step: the median, and in brackets how far off the least it is
    ratio     to a step without offload
    GiB       the peak of the device
    back      GiB copied to the device in a step

The engine of most rows copied all back that had left. Today's, and that of the rows called later,
uses what is still on its way to the host where it is: see GiB back, here and there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from command import parser_for, write_figures
from on_card import CASES, WAYS
from torch import Tensor
from virtual_h100 import FACTS, Row, virtual_step

NAMES = {
    "_scaled_dot_product_flash_attention": "attention_forward",
    "_scaled_dot_product_flash_attention_backward": "attention_backward",
}


def timed(microseconds: Mapping[str, float]) -> Callable[..., float | None]:
    """Seconds of the operators that were timed; None for others.

    Args:
        microseconds: By name, and sizes of all tensors or of the first.
    """

    def seconds(func: Any, args: Sequence[Any], *rest: Any) -> float | None:
        name = func._overloadpacket.__name__
        sizes = ["x".join(map(str, x.shape)) for x in args if isinstance(x, Tensor) and x.dim()]
        for operands in (sizes, sizes[:1]):
            key = " ".join([NAMES.get(name, name), *operands])
            if key in microseconds:
                return microseconds[key] * 1e-6
        return None

    return seconds


def beside(measured: Row, facts: Row, plain: dict[str, Row]) -> Row:
    """A row of the facts, and the same here.

    Args:
        measured: Of the facts.
        facts: All of them.
        plain: Rows without offload, by case. The first row of a case becomes one.
    """
    case, way = measured["case"], measured["way"]
    here = virtual_step(
        CASES[case],
        "ours" if way.startswith("ours") else way,
        operator_times=timed(facts["operators_us"]),
        **{"device_limit_bytes": None, "rematerialize": "none", **WAYS.get(way, {})},
    )
    row = measured | {
        "here_ms": here["step_ms"],
        "here_peak_gib": here["peak_gib"],
        "here_back_gib": here["back_gib"],
    }
    none = plain.setdefault(case, row)
    return row | {
        "ratio": measured.get("ratio", row["ms"] / none["ms"]),  # its own on a later day
        "here_ratio": row["here_ms"] / none["here_ms"],
    }


def line(row: Row) -> str:
    """Of the table."""
    back = f"{row['back_gib']:.2f}" if "back_gib" in row else ""
    return (
        f"{row['case']:<8} {row['way']:<10}{row.get('day', ''):<6}"
        f"{row['ms']:>7.1f} {row['here_ms']:>6.1f} {off(row['here_ms'], row['ms'])} "
        f"({off(row['here_ms'], row['least_ms'])}) {row['ratio']:>6.3f} {row['here_ratio']:>6.3f} "
        f"{off(row['here_ratio'], row['ratio'])} {row['peak_gib']:>7.3f} "
        f"{row['here_peak_gib']:>7.3f} {off(row['here_peak_gib'], row['peak_gib'])} "
        f"{back:>6} {row['here_back_gib']:>6.2f}"
    )


def off(here: float, measured: float) -> str:
    return f"{(here / measured - 1) * 100:>+5.1f}"


HEADER = (
    "case     way                  ms   here  off (least)   ratio   here   off  peak GiB  here"
    "   off   back   here"
)


def main() -> None:
    options = parser_for(__doc__).parse_args()
    facts = json.loads(FACTS.read_text())
    print(facts["machine"]["device"], facts["machine"]["date"])
    print(HEADER)
    plain: dict[str, Row] = {}
    rows = []
    for measured in facts["rows"][: 2 if options.quick else None]:
        rows.append(beside(measured, facts, plain))
        print(line(rows[-1]), flush=True)
    write_figures(rows, options.json)


if __name__ == "__main__":
    main()
