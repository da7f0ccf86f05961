"""A step that goes through the disk, under PyTorch's profiler.

Does compute stand still while bytes are on their way to the file and back? The trace shows it: look
for gaps between kernels, and whether copies run beside them. On a device that the profiler does not
know it has the host's side alone.

    python benchmarks/disk_step.py --device cuda --dir /scratch --trace trace.json

Figures
    step_ms         median of a forward and a backward, without the profiler
    step_ms_none    the same without offload
    written_bytes   to the file, in the profiled step
    read_bytes      from it
    host_peak_bytes of the staging memory that these pass through
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from large_groups import Layers
from machine import DEVICES, MIB, device_of
from torch.profiler import ProfilerActivity, profile, supported_activities

from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import default_backend


def measure(options: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], profile]:
    """The figures, and the profile of one more step."""
    device = device_of(options.device)
    layers = Layers(device, options.layers, int(options.group_mib * MIB), options.width)
    config = OffloadConfig(
        device_limit_bytes=None,
        min_offloaded_tensor_size=1,
        tiers=("disk",),
        disk_dir=directory,
        max_in_flight_bytes=int(options.cap_mib * MIB),
    )
    activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    with use_backend(default_backend(device), config=config) as manager:
        none = [layers.step(offload=False) for _ in range(options.rounds + 1)][1:]
        ours = [layers.step(offload=True) for _ in range(options.rounds + 1)][1:]
        before = manager.statistics()
        with profile(activities=activities) as found:
            layers.step(offload=True)
        after = manager.statistics()
    return {
        "step_ms": statistics.median(ours) * 1e3,
        "step_ms_none": statistics.median(none) * 1e3,
        "written_bytes": after.disk_bytes_written - before.disk_bytes_written,
        "read_bytes": after.disk_bytes_read - before.disk_bytes_read,
        "host_peak_bytes": after.host_bytes_peak,
    }, found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--dir", type=Path, help="for the file; default: that of temporary files")
    parser.add_argument("--cap-mib", type=float, default=2048, help="that may be in flight")
    parser.add_argument("--group-mib", type=float, default=256)
    parser.add_argument("--layers", type=int, default=8, help="groups in a step")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=12, help="of the profiler's table")
    parser.add_argument("--trace", type=Path, help="write the trace of the profiled step here")
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.cap_mib, options.group_mib, options.width, options.rounds = 0.1, 0.05, 32, 1
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        figures, found = measure(options, Path(directory))
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.rows))
    for name, value in figures.items():
        is_time = name.startswith("step")
        print(f"{name:16}{value if is_time else value / MIB:10.1f} {'' if is_time else 'MiB'}")
    if options.trace:
        found.export_chrome_trace(str(options.trace))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
