"""Draws docs/one_f_one_b.svg: what one rank of a 1F1B pipeline computes and copies.

    python docs/one_f_one_b.py

The times come from a model of the schedule, not from a measurement: a backward takes twice as long
as a forward, and both copy directions run at once. The rules are those of the engine: a copy to the
host starts when its layer has run, a reload is queued when backward reaches a layer and the window
has room, and the layer that backward uses first is not offloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RANKS = 4
RANK = 1
MICROBATCHES = 6
LAYERS = 4
"""Of this rank: each is a group."""

FORWARD = 1.0
BACKWARD = 2.0
COPY = 0.4
"""Of one layer, in one direction."""

WINDOW = 2
"""Layers that may be reloaded ahead of their use."""

TARGET = Path(__file__).with_name("one_f_one_b.svg")


@dataclass(frozen=True)
class Box:
    """One piece of work in a lane."""

    lane: str
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Layer:
    """What one layer of a microbatch saves: when it is on the device."""

    microbatch: int
    saved: float
    used: float
    """When its backward begins."""

    freed: float
    """When its backward is over."""

    offload: Box | None = None
    reload: Box | None = None
    reload_queued: float = 0.0


def order(rank: int) -> list[tuple[str, int]]:
    """The actions of a rank: warm-up, one forward and one backward in turn, the rest."""
    warmup = min(MICROBATCHES, RANKS - 1 - rank)
    actions = [("F", k) for k in range(warmup)]
    for k in range(warmup, MICROBATCHES):
        actions += [("F", k), ("B", k - warmup)]
    return actions + [("B", k) for k in range(MICROBATCHES - warmup, MICROBATCHES)]


def times() -> dict[tuple[int, str, int], float]:
    """When each action of each rank begins: after the one before it, and after its input."""
    begins: dict[tuple[int, str, int], float] = {}
    waiting = {rank: order(rank) for rank in range(RANKS)}
    free = dict.fromkeys(range(RANKS), 0.0)
    while any(waiting.values()):
        for rank, actions in waiting.items():
            while actions:
                kind, k = actions[0]
                source = rank - 1 if kind == "F" else rank + 1
                length = FORWARD if kind == "F" else BACKWARD
                ready = 0.0
                if 0 <= source < RANKS:
                    if (source, kind, k) not in begins:
                        break
                    ready = begins[source, kind, k] + length
                begins[rank, kind, k] = max(free[rank], ready)
                free[rank] = begins[rank, kind, k] + length
                actions.pop(0)
    return begins


def compute() -> list[Box]:
    """The compute lane of this rank, from its first forward on."""
    begins = {key[1:]: begin for key, begin in times().items() if key[0] == RANK}
    first = min(begins.values())
    boxes = []
    for kind, k in order(RANK):
        begin = begins[kind, k] - first
        boxes.append(Box(kind, k, begin, begin + (FORWARD if kind == "F" else BACKWARD)))
    return boxes


def layers(boxes: list[Box]) -> list[Layer]:
    """All layers in the order of their backward, with their copies."""
    forward = {box.microbatch: box.begin for box in boxes if box.lane == "F"}
    backward = {box.microbatch: box.begin for box in boxes if box.lane == "B"}
    step, back = FORWARD / LAYERS, BACKWARD / LAYERS
    offloads: dict[tuple[int, int], Box] = {}
    free = 0.0
    for k, begin in sorted(forward.items()):
        for index in range(LAYERS):
            if (k, index) == (0, LAYERS - 1):
                continue  # backward uses it first, and nothing could hide its reload
            free = max(free, begin + (index + 1) * step) + COPY
            offloads[k, index] = Box("d2h", k, free - COPY, free)
    visits = [(k, index) for k in sorted(backward) for index in reversed(range(LAYERS))]
    uses = [backward[k] + (LAYERS - 1 - index) * back for k, index in visits]
    found = []
    free = 0.0
    for place, (k, index) in enumerate(visits):
        offload = offloads.get((k, index))
        queued = uses[max(0, place - WINDOW)]
        reload = None
        if offload is not None:
            free = max(free, queued, offload.end) + COPY
            reload = Box("h2d", k, free - COPY, free)
            assert free <= uses[place] + 1e-9, "compute would wait; choose a shorter copy"
        saved = forward[k] + index * step
        use = uses[place]
        found.append(Layer(k, saved, use, use + back, offload, reload, queued))
    return found


def on_device(found: list[Layer], *, with_offload: bool) -> list[tuple[float, int]]:
    """Steps of the number of layers whose saved tensors are on the device."""
    changes: list[tuple[float, int]] = []
    for layer in found:
        changes += [(layer.saved, 1), (layer.freed, -1)]
        if with_offload and layer.offload is not None:
            changes += [(layer.offload.end, -1), (layer.reload_queued, 1)]
    steps: list[tuple[float, int]] = []
    count = 0
    for time in sorted({round(time, 6) for time, _ in changes}):
        count += sum(change for at, change in changes if round(at, 6) == time)
        steps.append((time, count))
    return steps


WIDTH, LEFT, RIGHT = 830, 70, 14
LANES = {"compute": 46, "d2h": 86, "h2d": 126}
BOX = 28
CHART_TOP, CHART_HEIGHT = 178, 96
HEIGHT = CHART_TOP + CHART_HEIGHT + 46
FILL = {"F": "#0072B2", "B": "#D55E00", "d2h": "#56B4E9", "h2d": "#E69F00"}
"""Colours of Okabe and Ito, which colour-blind people can tell apart."""

INK = {"F": "#ffffff", "B": "#ffffff", "d2h": "#000000", "h2d": "#000000"}
WORDS = {"F": "forward", "B": "backward", "d2h": "copy to the host", "h2d": "copy back"}
HELD, PLAIN = "#009E73", "#555555"


def number(value: float) -> str:
    """With one decimal at most."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(x: float, y: float, said: str, more: str = "") -> str:
    """One line of text."""
    return f'<text x="{number(x)}" y="{number(y)}"{" " + more if more else ""}>{said}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A filled rectangle."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} fill="{fill}"{" " + more if more else ""}/>'


def draw() -> str:
    """The picture, as SVG."""
    boxes = compute()
    found = layers(boxes)
    end = boxes[-1].end
    scale = (WIDTH - LEFT - RIGHT) / end
    copies = [box for layer in found for box in (layer.offload, layer.reload) if box is not None]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12" fill="#000000" role="img">',
        f"<title>1F1B on rank {RANK} of {RANKS}: compute and copies over time</title>",
        "<!-- Drawn by docs/one_f_one_b.py. -->",
        rect(0, 0, WIDTH, HEIGHT, "#ffffff"),
        *legend(),
        *lanes(end, scale),
    ]
    for box in boxes:
        lines += draw_box(box, LANES["compute"], scale, f"{box.lane}{box.microbatch}", 12)
    for box in copies:
        lines += draw_box(box, LANES[box.lane], scale, str(box.microbatch), 9)
    lines += [*chart(found, end, scale), "</svg>", ""]
    return "\n".join(lines)


def legend() -> Iterator[str]:
    """What the colours mean."""
    x = LEFT
    for key, word in WORDS.items():
        yield rect(x, 12, 14, 14, FILL[key])
        yield text(x + 19, 23.5, word)
        x += 46 + 6.3 * len(word)
    yield text(WIDTH - RIGHT, 23.5, "digits: the microbatch", 'text-anchor="end" fill="#333333"')


def lanes(end: float, scale: float) -> Iterator[str]:
    """Names of the lanes, and their grounds."""
    for name, top in LANES.items():
        yield rect(LEFT, top, end * scale, BOX, "#f2f2f2")
        yield text(LEFT - 8, top + BOX / 2 + 4, name, 'text-anchor="end"')


def draw_box(box: Box, top: float, scale: float, said: str, size: int) -> Iterator[str]:
    """A box with its microbatch."""
    x, width = LEFT + box.begin * scale, (box.end - box.begin) * scale
    yield rect(x + 0.5, top, width - 1, BOX, FILL[box.lane])
    style = f'text-anchor="middle" font-size="{size}" fill="{INK[box.lane]}"'
    yield text(x + width / 2, top + BOX / 2 + size * 0.36, said, style)


def chart(found: list[Layer], end: float, scale: float) -> Iterator[str]:
    """How much is on the device, with offload and without."""
    bottom = CHART_TOP + CHART_HEIGHT
    plain = on_device(found, with_offload=False)
    held = on_device(found, with_offload=True)
    top = max(count for _, count in plain)
    unit = (CHART_HEIGHT - 8) / top

    def path(steps: list[tuple[float, int]]) -> str:
        drawn = f"M{LEFT} {bottom}"
        for time, count in steps:
            drawn += f"H{number(LEFT + time * scale)}V{number(bottom - count * unit)}"
        return drawn

    for tick in range(0, top + 1, LAYERS):
        y = bottom - tick * unit
        yield f'<path d="M{LEFT} {number(y)}H{WIDTH - RIGHT}" stroke="#dddddd"/>'
        yield text(LEFT - 8, y + 4, str(tick), 'text-anchor="end"')
    yield f'<path d="{path(held)}V{bottom}Z" fill="{HELD}" fill-opacity="0.75"/>'
    dashes = f'fill="none" stroke="{PLAIN}" stroke-width="1.6" stroke-dasharray="5 3"'
    yield f'<path d="{path(plain)}" {dashes}/>'
    yield f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="#000000"/>'
    for tick in range(0, int(end) + 1, 5):
        x = LEFT + tick * scale
        yield f'<path d="M{number(x)} {bottom}v4" stroke="#000000"/>'
        yield text(x, bottom + 17, str(tick), 'text-anchor="middle"')
    yield text(
        LEFT + end * scale / 2, bottom + 35, "time; one forward takes 1", 'text-anchor="middle"'
    )
    middle = CHART_TOP + CHART_HEIGHT / 2
    turned = f'text-anchor="middle" transform="rotate(-90 18 {number(middle)})"'
    label = LEFT + 5 * scale
    yield text(label, bottom - top * unit - 5, "without offload", f'fill="{PLAIN}"')
    yield text(label, bottom - 4 * unit - 4, "with offload", 'fill="#00674b"')
    yield text(18, middle - 5, "layers&#8217; saved", turned)
    yield text(18, middle + 9, "tensors on device", turned)


if __name__ == "__main__":
    TARGET.write_text(draw())
    print(f"wrote {TARGET}", file=sys.stderr)
