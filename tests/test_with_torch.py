"""What the script that tries other versions of torch would download, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import with_torch

CPU = {"torch": "https://index/torch-2.13.0+cpu.whl", "numpy": "https://index/numpy.whl"}
CUDA = {**CPU, "nvidia-cudnn-cu13": "https://index/cudnn.whl", "triton": "https://index/t.whl"}
LOCAL = {name: f"file:///wheels/{name}.whl" for name in CUDA}


@pytest.mark.parametrize(
    ("wanted", "allow_cuda", "local_only", "expected"),
    [
        *((LOCAL, allow, local, None) for allow in (False, True) for local in (False, True)),
        (CPU, False, False, None),
        (CPU, False, True, "torch would be downloaded"),
        ({**LOCAL, "cuda-bindings": "https://index/bindings.whl"}, False, False, None),
        (CUDA, False, False, "--allow-cuda"),
        (CUDA, True, False, None),
        ({**LOCAL, "triton": "https://index/t.whl"}, False, True, "triton would be downloaded"),
    ],
)
def test_what_may_be_downloaded(
    wanted: dict[str, str], allow_cuda: bool, local_only: bool, expected: str | None
) -> None:
    reason = with_torch.why_not(wanted, allow_cuda=allow_cuda, local_only=local_only)
    assert reason is None if expected is None else expected in (reason or "")


def test_the_smoke_suite_is_in_these_files() -> None:
    """Others are not collected, for some need at import what an old torch has not."""
    tests = Path(__file__).parent
    marked = {
        path.relative_to(tests.parent).as_posix()
        for path in tests.rglob("test_*.py")
        if "pytest.mark." + "smoke" in path.read_text()
    }
    assert marked == set(with_torch.SMOKE)
