"""The smoke suite with a torch of one's choice, in a new virtual environment outside the checkout.

    python3.11 tools/with_torch.py 2.13.0
    python3.11 tools/with_torch.py 2.14.1 --local-only     # of files on this machine alone
    python3.12 tools/with_torch.py 2.11.0 --allow-cuda     # gigabytes

For x86-64 Linux the package index has most versions of torch as CUDA builds alone, of about 3 GB
with what they depend on. So pip is asked first what it would install; with packages for CUDA in it,
nothing is downloaded unless ``--allow-cuda`` is given. Status: 0 all passed, 1 a test failed, 2 bad
arguments, 3 that torch cannot be had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("numpy", "pytest", "setuptools>=77")
SMOKE = (
    "tests/common/test_torch_private.py",
    "tests/core/test_products_and_schedules.py",
    "tests/test_parallel.py",
)
"""Files of the suite. Others may need at import what an old torch has not."""

CUDA = ("nvidia-", "cuda-", "triton")
"""How packages begin that only a CUDA build needs."""

SMALL = ("cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "nvidia-nvjitlink", "nvidia-nvtx")
"""Those of them of 50 MB at most, which may be downloaded."""

CANNOT = 3
"""The status where that torch cannot be had."""

NOT_THERE = "cannot be had from where pip looks"


def names(report: Mapping[str, Any]) -> dict[str, str]:
    """What pip would install: addresses by name."""
    packages = report.get("install", ())
    return {each["metadata"]["name"].lower(): each["download_info"]["url"] for each in packages}


def why_not(wanted: Mapping[str, str], *, allow_cuda: bool, local_only: bool) -> str | None:
    """Why this is not to be installed; None if it may be.

    Args:
        wanted: Addresses by name of a package.
        allow_cuda: CUDA builds may be downloaded.
        local_only: Torch and what only CUDA builds need has to lie on this machine.
    """
    for_cuda = [name for name in wanted if name.startswith(CUDA) and name not in SMALL]
    large = [name for name in wanted if name == "torch" or name in for_cuda]
    remote = [name for name in large if urlparse(wanted[name]).scheme != "file"]
    if not remote or allow_cuda:
        return None
    if local_only:
        return f"{', '.join(remote)} would be downloaded"
    if any(name != "torch" for name in large):
        return "it is a CUDA build, of gigabytes; give --allow-cuda to download it"
    return None


def ask_pip(python: str, requirements: Sequence[str]) -> dict[str, str] | None:
    """What pip would install, without downloading a wheel; None if it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [python, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        run = subprocess.run(
            [*command, "--only-binary", ":all:", "--report", report, *requirements],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            return None
        return names(json.loads(report.read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment, install, and run the tests."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="of torch, such as 2.13.0")
    parser.add_argument("--allow-cuda", action="store_true", help="download a CUDA build too")
    parser.add_argument(
        "--local-only", action="store_true", help="download no torch, and nothing for CUDA"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="with_torch_") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        requirements = [f"torch=={options.version}", *BESIDE]
        wanted = ask_pip(python, requirements)
        reason = NOT_THERE
        if wanted is not None:
            allowed = {"allow_cuda": options.allow_cuda, "local_only": options.local_only}
            reason = why_not(wanted, **allowed) or ""
        if reason:
            print(f"torch {options.version}: not run: {reason}")
            return CANNOT
        pip = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--only-binary", ":all:", *requirements], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", ROOT], check=True)
        tests = [python, "-m", "pytest", "-m", "smoke", "-p", "no:cacheprovider", *SMOKE]
        return int(subprocess.run(tests, cwd=ROOT, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
