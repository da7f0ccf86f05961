"""Does a cap of one group cost time? Forward on the accelerator of the tests, whose work sleeps.

Each group computes for longer than its copy takes, so the copy of one is over when the next one is
computed, and nothing has to wait. A cap that is taken too literally has compute wait for the copy
of the group that was just sent: that is the row with 0, where it is asked for.

    python benchmarks/cap_cliff.py --json cliff.json

Figures, by cap
    forward_ms, none_ms   minimum of a forward with offload and, in turns with it, without
    ratio                 of these
    virtual_ratio         the same on the virtual accelerator, whose launches take no time
    cap_bytes             as it was at the end, where the engine chooses
    bitwise_equal         whether gradients are those without offload
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from in_flight_caps import Cap, same_bits
from machine import device_of
from paced_programs import ITEM_BYTES, Node, Program, Run, hardware
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import default_backend
from pp_offload.simulate import VirtualBackend

NUMEL = 2**16
GROUP_BYTES = NUMEL * ITEM_BYTES
CAPS: dict[str, Cap] = {
    "0": 0,
    "1 group - 1 B": GROUP_BYTES - 1,
    "1 group": GROUP_BYTES,
    "1.5 groups": GROUP_BYTES * 3 // 2,
    "2 groups": 2 * GROUP_BYTES,
    "auto": "auto",
}
NUM_FIRST = 3
"""Steps after which a cap is chosen."""


def program(num_groups: int) -> Program:
    """A microbatch of groups with one kernel and one saved tensor each."""
    groups = ((Node(NUMEL, 1, 2),),) * num_groups
    return Program(0, groups, 1, 1, host_waits=False, bounds=None, need=0.0)


def config_of(cap: Cap) -> OffloadConfig:
    return OffloadConfig(
        device_limit_bytes=None, min_offloaded_tensor_size=1, max_in_flight_bytes=cap
    )


class Steps:
    """Steps of which the forward is timed.

    Args:
        run: What runs.
        device: Where.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run = run
        self._device = device
        self._x = torch.ones(NUMEL, device=device)

    def step(self, *, offload: bool) -> tuple[float, Tensor]:
        """Milliseconds from the begin of a forward to the end of its compute, and a gradient."""
        torch.accelerator.synchronize()
        begin, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        leaf = self._x.add(0)  # the host goes ahead meanwhile
        leaf.requires_grad_()
        if offload:
            off_interface.reset()
        begin.record()
        y = self._run.forward(leaf, offload=offload)
        end.record()
        self._run.backward(y)
        torch.accelerator.synchronize()
        assert leaf.grad is not None
        return begin.elapsed_time(end), leaf.grad


def measure(steps: Steps, cap: Cap, rounds: int) -> dict[str, Any]:
    """With and without offload in turns."""
    device = torch.device("emulated", 0)
    ours, none, is_equal = [], [], True
    with use_backend(default_backend(device), config=config_of(cap)) as manager:
        for _ in range(NUM_FIRST):
            steps.step(offload=True)
        for _ in range(rounds):
            ours_ms, found = steps.step(offload=True)
            none_ms, expected = steps.step(offload=False)
            ours.append(ours_ms)
            none.append(none_ms)
            is_equal &= same_bits([expected], [found])
        cap_bytes = manager.offloader.engine.mover.in_flight.bound.nbytes
    return {
        "forward_ms": min(ours),
        "none_ms": min(none),
        "ratio": min(ours) / min(none),
        "cap_bytes": cap_bytes,
        "bitwise_equal": is_equal,
    }


def virtual_ratio(num_groups: int, cap: Cap, kernel_s: float, copy_s: float) -> float:
    """Of forwards, by clocks."""
    backend = VirtualBackend(hardware(0, copy_s), lambda *call: kernel_s)
    run = Run(program(num_groups), backend.device, backend.synchronize)
    x = torch.ones(NUMEL, device="meta")
    with use_backend(backend, config=config_of(cap)):
        for _ in range(NUM_FIRST + 1):
            backend.synchronize()
            begin_s = backend.compute.free_at_s
            off_interface.reset()
            y = run.forward(x.detach().requires_grad_(), offload=True)
            end_s = backend.compute.record_event().time_s
            run.backward(y)
    return (end_s - begin_s) / (num_groups * kernel_s)


def table(figures: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'in flight':>13}  cap KiB  forward ms  without  ratio  virtual  same bits"]
    for name, one in figures.items():
        lines.append(
            f"{name:>13}  {one['cap_bytes'] / 1024:7.1f}  {one['forward_ms']:10.2f}  "
            f"{one['none_ms']:7.2f}  {one['ratio']:5.3f}  {one['virtual_ratio']:7.3f}  "
            f"{'yes' if one['bitwise_equal'] else 'NO':>9}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help="in a forward")
    parser.add_argument("--kernel-ms", type=float, default=10, help="of a group's forward")
    parser.add_argument("--copy-ms", type=float, default=8, help="of a group, each way")
    parser.add_argument("--rounds", type=int, default=10, help="of which the minimum counts")
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.groups, options.kernel_ms, options.copy_ms, options.rounds = 3, 1, 0.8, 1
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    device = device_of("emulated")
    kernel_s, copy_s = options.kernel_ms / 1e3, options.copy_ms / 1e3
    copy_us = round(copy_s * 1e6)
    module = torch.get_device_module(device)
    module.set_delays(kernel_us=round(kernel_s * 1e6), h2d_us=copy_us, d2h_us=copy_us)
    steps = Steps(Run(program(options.groups), device, torch.accelerator.synchronize), device)
    figures = {}
    for name, cap in CAPS.items():
        figures[name] = measure(steps, cap, options.rounds)
        figures[name]["virtual_ratio"] = virtual_ratio(options.groups, cap, kernel_s, copy_s)
    module.set_delays()
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
