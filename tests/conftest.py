"""Every behaviour test runs on every backend."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import emulated
import pytest
import torch
from helpers import saving
from helpers.optional import skips_what_needs_more
from helpers.quick import mark_slow
from helpers.sessions import begin_step
from helpers.sessions import make_backend as make_backend

from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._checkpoint import recompute
from pp_offload.backends import Backend

if TYPE_CHECKING:
    from helpers.virtual_training import Training

# Tests run side by side, and compute little: threads of their own would wait for each other.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

if torch.cuda.is_available():  # kernels whose backward gives the same bits each time
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)

# The same examples each time, whatever was found before and however slow the machine is; new ones
# are for the fuzzer. A test that is not through after an hour hangs: pyproject.toml has the limit.
try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    pass  # see helpers/optional.py
else:
    settings.register_profile(
        "anywhere",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
        derandomize=True,
    )
    settings.load_profile("anywhere")

BEFORE_2_13 = torch.__version__ < (2, 13)
"""Then torch cannot send from a stage to another one of the same rank over gloo, as at the turn of
a V, and its non-reentrant checkpoints can be given no forward-mode AD and no ``vmap``.
"""

CORE = Path(__file__).parent / "core"
"""Tests of the promises by public names, marked ``core``."""

ON_THE_HOST = ["cpu", "cpu threads", "late", "eager", "random"]
ACCELERATORS = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("emulated", marks=pytest.mark.emulated),
]
BACKENDS = [*ON_THE_HOST, *ACCELERATORS]
TWO_BACKENDS = ["cpu", "late", *ACCELERATORS]
"""Where neither the order of copies nor who makes them can matter: one whose copies are made at
once, and one whose copies are late."""

on_two_backends = pytest.mark.parametrize("backend", TWO_BACKENDS, indirect=True)
"""For a test of the ``backend`` fixture, or of another on top of it."""
DELAYS: dict[str, dict[str, int]] = {
    "fast": {},
    "slow-d2h": {"d2h_us": 2000},
    "slow-h2d": {"h2d_us": 2000},
}
"""Of the emulated accelerator; so long that what comes next never waits by luck."""


def skip_on_emulated(backend: Backend, reason: str) -> None:
    """Where PyTorch or that device cannot do something, with offload or without."""
    if backend.device.type == "emulated":
        pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What takes a backend can be run on the accelerator of tests."""
    parser.addoption(
        "--emulated",
        choices=DELAYS,
        help="build the accelerator of tests/emulated, and run what takes a backend on it alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the emulated accelerator where it is asked for, which is before any backward."""
    delays = config.getoption("emulated")
    if delays is not None:
        try:
            emulated.load().set_delays(**DELAYS[delays])
        except emulated.EmulatedDeviceError as failure:
            raise pytest.UsageError(str(failure)) from None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """A file that needs a package which is not installed is skipped."""
    with skips_what_needs_more():
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m core`` only its folder is read: reading all the others takes half a minute."""
    if config.option.markexpr != "core" or CORE in (collection_path, *collection_path.parents):
        return None
    return None if collection_path in CORE.parents else True


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of the promises are marked by their folder."""
    if CORE in item.path.parents:
        item.add_marker(pytest.mark.core)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What can run here.

    With the emulated accelerator, the default backend is another one: its tests and the others
    never mix. Without a GPU, its tests are there only to be asked for, and skipped then.
    """
    is_loaded = config.getoption("emulated") is not None
    selected = [item for item in items if bool(item.get_closest_marker("emulated")) is is_loaded]
    if not torch.cuda.is_available() and "gpu" not in config.option.markexpr:
        selected = [item for item in selected if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=list(set(items) - set(selected)))
    items[:] = selected
    delays = DELAYS.get(config.getoption("emulated"))
    mark_slow(items, is_sparse=bool(delays))  # with delays, a missing wait is seen in any case


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    return make_backend(request.param)


@pytest.fixture
def active(backend: Backend) -> Iterator[Backend]:
    """Each backend in turn, activated."""
    with backend.activate():
        yield backend


@pytest.fixture
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose plans are tested are small, and the floor would leave nothing to choose."""
    monkeypatch.setattr("pp_offload._groups.auto_bounds.LEAST_IN_FLIGHT_BYTES", 1)


@pytest.fixture
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    """See ``helpers.virtual_training.with_limit``."""
    from helpers.virtual_training import Training

    training = Training(**request.param)
    with training.running():
        yield training


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with saving.one_rank():
        yield


@pytest.fixture
def manager(backend: Backend) -> Iterator[PipelineOffloadManager]:
    """A fresh manager on each backend, for tensors of any size."""
    torch.manual_seed(0)
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    with use_backend(backend, config=config) as fresh:
        yield fresh


@pytest.fixture
def chunk(manager: PipelineOffloadManager) -> Any:
    """Of a microbatch that has begun in a step of this manager."""
    begin_step()
    return manager.cur_forward_chunk()


@pytest.fixture
def activations(backend: Backend) -> Iterator[OffloadActivations]:
    """A context on each backend, in which tensors of any size leave, three at a time."""
    with backend.activate():
        yield OffloadActivations(
            min_offload_size=1,
            max_fwd_stash_size=3,
            config=OffloadConfig(device_limit_bytes=None),
            backend=backend,
        )


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Tests collect garbage to see what is left; that need not look at what others imported.

    What is alive now is never collected. So the frames of a test that failed last must go before,
    which pytest keeps for a debugger until the next one: their engine would stay for the process.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_manager_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves no manager to the next, no engine of checkpoints that belong to no model, whose
    host memory the next one's budget would count, and nothing queued.
    """
    yield
    PipelineOffloadManager.reset_instance()
    recompute._of_default.clear()
    if request.node.get_closest_marker("emulated"):
        torch.get_device_module("emulated").synchronize()
