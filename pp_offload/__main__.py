"""Run a training script with :func:`pp_offload.patch`, which no line of it has to name.

    python -m pp_offload train.py --its --options
    torchrun --nproc-per-node 8 -m pp_offload train.py
    accelerate launch -m pp_offload train.py

With ``-m package.module`` in place of ``train.py`` it runs a module. Sizes and tiers come from the
environment, as of ``OffloadConfig.from_env``. At the end each process says what was offloaded.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from pp_offload.config import OffloadConfig
from pp_offload.integrations.patches import patch


def main() -> None:
    """Run what the command line names."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(__doc__ or "")
        return
    if not arguments[is_module:] or not (is_module or Path(arguments[0]).is_file()):
        text = f"no file {arguments[0]}" if arguments[is_module:] else "no script"
        others = "simulate, plan and the other commands are those of pp-offload"
        sys.exit(f"found {text}; expected a training script, as below; {others}\n\n{__doc__}")
    active = patch(OffloadConfig.from_env())
    try:
        sys.argv = arguments[is_module:]
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        sys.stderr.write(f"{rank}{active}\n")


if __name__ == "__main__":
    main()
