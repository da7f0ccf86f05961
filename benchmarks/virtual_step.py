"""Step time and peak memory on a virtual accelerator, in the steady state of 1F1B.

Nothing is measured: the engine runs on streams with clocks and tensors without data. Each row is a
stage of a GPT: two layers with four microbatches in flight, unless options say otherwise. ``need``
is how much of compute's time the copies of one direction take: above 1 no choice of options keeps
the step. A peak that the device has no memory for is marked with a star.

    python benchmarks/virtual_step.py --hidden 4096 8192 --gib 0.5 0.75 1 --json virtual.json

Figures, of each width; a row for each bound in both directions, and one at default options
    step_ms        of a forward and a backward, in the steady state
    ratio_to_none  of step times
    peak_gib       of the device; parameters and gradients count
    stalled_ms     how long compute waited in a step
    need           of the copies: bytes of a microbatch over the link / step without offload
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import DEVICES, VirtualBackend

GIB = 2**30
HEAD_WIDTH = 128
MIN_NUMEL = 2**20
Row = dict[str, Any]


class Layer(nn.Module):
    """A layer of a GPT; attention and MLP are groups, with their norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        kind: Any = {"device": "meta", "dtype": torch.bfloat16}
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width, **kind), nn.LayerNorm(width, **kind)
        self.qkv = nn.Linear(width, 3 * width, **kind)
        self.out = nn.Linear(width, width, **kind)
        self.up = nn.Linear(width, 4 * width, **kind)
        self.down = nn.Linear(4 * width, width, **kind)

    def attn(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = self.qkv(self.attn_norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.mlp_norm(x))))

    def forward(self, x: Tensor, *, offload: bool) -> Tensor:
        for name, part in (("attn", self.attn), ("mlp", self.mlp)):
            with off_interface(offload, x, name):
                y = part(x)
            x = x + (off_interface.group_commit(y, name=name) if offload else y)
        return x


class Stage:
    """Layers of one rank, and its forwards and backwards in turn."""

    def __init__(self, width: int, length: int, num_layers: int) -> None:
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self._size = (1, length, width)

    def forward(self, *, offload: bool) -> Tensor:
        off_interface.init_chunk_handler(None, None, MIN_NUMEL)
        x = torch.empty(self._size, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for layer in self.layers:
            x = layer(x, offload=offload)
        return x

    @staticmethod
    def backward(y: Tensor) -> None:
        y.backward(torch.empty_like(y))


def row(options: argparse.Namespace, width: int, gib: float | None, *, offload: bool) -> Row:
    """One step after a first one, with these bytes in flight and in the window."""
    backend = VirtualBackend(DEVICES[options.device])
    compute = backend.compute
    nbytes: Any = "auto" if gib is None else int(gib * GIB)
    config = OffloadConfig(max_in_flight_bytes=nbytes, prefetch_bytes=nbytes)
    with use_backend(backend, config=config) as manager:
        stage = Stage(width, options.length, options.layers)
        for _ in range(3):  # the first one is timed
            off_interface.reset()
            waiting = deque(stage.forward(offload=offload) for _ in range(options.in_flight - 1))
            for number in range(options.in_flight + options.rounds):
                if number == options.in_flight:
                    begin_s, stalled_before_s = compute.free_at_s, compute.stalled_s
                    moved_before = manager.statistics().bytes_offloaded
                    backend.memory.take_peak()
                waiting.append(stage.forward(offload=offload))
                stage.backward(waiting.popleft())
            step_s = (compute.free_at_s - begin_s) / options.rounds
            stalled_s = (compute.stalled_s - stalled_before_s) / options.rounds
            peak_bytes = backend.memory.peak_bytes
            moved = (manager.statistics().bytes_offloaded - moved_before) // options.rounds
            while waiting:
                stage.backward(waiting.popleft())
            stage.layers.zero_grad()
            backend.synchronize()
    return {
        "width": width,
        "bounds": "none" if not offload else "default" if gib is None else f"{gib:g} GiB",
        "step_ms": step_s * 1e3,
        "peak_gib": peak_bytes / GIB,
        "stalled_ms": stalled_s * 1e3,
        "fits": peak_bytes <= backend.hardware.memory_bytes,
        "link_ms": moved / backend.hardware.link_bytes_per_s * 1e3,
    }


def rows(options: argparse.Namespace) -> list[Row]:
    found = []
    for width in options.hidden:
        none = row(options, width, None, offload=False)
        ours = [row(options, width, gib, offload=True) for gib in (None, *options.gib)]
        for one in (none, *ours):
            one["ratio_to_none"] = one["step_ms"] / none["step_ms"]
            one["need"] = one.pop("link_ms") / none["step_ms"]
            found.append(one)
    return found


def table(found: list[Row]) -> str:
    lines = [f"{'width':>6}  {'bounds':>9}  step ms  to none  peak GiB  stalled ms  need"]
    for one in found:
        peak = f"{one['peak_gib']:8.2f}{' ' if one['fits'] else '*'}"
        lines.append(
            f"{one['width']:>6}  {one['bounds']:>9}  {one['step_ms']:7.2f}  "
            f"{one['ratio_to_none']:7.3f}  {peak} {one['stalled_ms']:10.2f}  {one['need']:4.2f}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(DEVICES), default="H100")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a microbatch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=4, help="microbatches")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gib", type=float, nargs="*", default=[0.5, 0.75, 1.0])
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.gib, options.rounds = [1024], [0.0625], 2
    return options


def main() -> None:
    options = parse()
    found = rows(options)
    print(f"{options.device}, {options.layers} layers, s = {options.length}")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
