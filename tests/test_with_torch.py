"""What the script that tries other versions of torch would download, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import with_torch

CPU = {"torch": "https://index/torch-2.13.0+cpu.whl", "numpy": "https://index/numpy.whl"}
CUDA = {**CPU, "nvidia-cudnn-cu13": "https://index/cudnn.whl", "triton": "https://index/t.whl"}
LOCAL = {name: f"file:///wheels/{name}.whl" for name in CUDA}


def test_names_of_a_report() -> None:
    report = {
        "install": [
            {"metadata": {"name": "Torch"}, "download_info": {"url": "file:///wheels/torch.whl"}}
        ]
    }
    assert with_torch.names(report) == {"torch": "file:///wheels/torch.whl"}


@pytest.mark.parametrize("allow_cuda", [False, True])
@pytest.mark.parametrize("local_only", [False, True])
def test_files_on_this_machine_may_be_installed(allow_cuda: bool, local_only: bool) -> None:
    assert with_torch.why_not(LOCAL, allow_cuda=allow_cuda, local_only=local_only) is None


def test_a_build_for_the_cpu_may_be_downloaded_unless_all_has_to_be_here() -> None:
    assert with_torch.why_not(CPU, allow_cuda=False, local_only=False) is None
    reason = with_torch.why_not(CPU, allow_cuda=False, local_only=True)
    assert reason == "torch would be downloaded"


def test_small_parts_of_a_cuda_build_on_this_machine_may_be_downloaded() -> None:
    mixed = {**LOCAL, "cuda-bindings": "https://index/bindings.whl"}
    assert with_torch.why_not(mixed, allow_cuda=False, local_only=False) is None


def test_a_cuda_build_is_downloaded_only_if_that_is_said() -> None:
    reason = with_torch.why_not(CUDA, allow_cuda=False, local_only=False)
    assert reason is not None and "--allow-cuda" in reason
    assert with_torch.why_not(CUDA, allow_cuda=True, local_only=False) is None


def test_a_torch_for_the_cpu_beside_local_cuda_packages_is_still_looked_at() -> None:
    mixed = {**LOCAL, "triton": "https://index/t.whl"}
    reason = with_torch.why_not(mixed, allow_cuda=False, local_only=True)
    assert reason == "triton would be downloaded"


def test_the_smoke_suite_is_in_these_files() -> None:
    """Others are not collected, for some need at import what an old torch has not."""
    tests = Path(__file__).parent
    marked = {
        path.relative_to(tests.parent).as_posix()
        for path in tests.rglob("test_*.py")
        if "pytest.mark." + "smoke" in path.read_text()
    }
    assert marked == set(with_torch.SMOKE)
