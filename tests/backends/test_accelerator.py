"""The accelerator's backend: on a GPU, and as far as it can be seen without one."""

from __future__ import annotations

import os
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.processes import HANG_S
from helpers.sessions import assert_idle
from helpers.threaded import at_once
from helpers.toy import batches, make_model, run_step, same_bits
from torch import nn

from pp_offload import OffloadConfig, OffloadModel, offload_layers, use_backend
from pp_offload.backends import AcceleratorBackend, accelerator


class Current(threading.local):
    """What PyTorch keeps for each thread: its current stream."""

    def __init__(self) -> None:
        self.stream: object = f"compute of {threading.get_ident()}"
        self.device = 1


class Meeting(torch.Tensor):
    """A tensor whose copy waits for that of another thread."""

    barrier = threading.Barrier(2, timeout=HANG_S)
    inside: list[object] = []

    def copy_(self, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        Meeting.barrier.wait()
        Meeting.inside.append(accelerator.accelerator_stream(0))
        return self


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    """In place of what PyTorch keeps."""
    current = Current()
    for name in ("stream", "device"):
        get, put = partial(getattr, current, name), partial(setattr, current, name)
        monkeypatch.setattr(accelerator, f"accelerator_{name}", lambda *index, get=get: get())
        monkeypatch.setattr(accelerator, f"set_accelerator_{name}", put)
    return current


def backend_without_a_device() -> AcceleratorBackend:
    """All that a copy asks of it."""
    backend = AcceleratorBackend.__new__(AcceleratorBackend)
    backend.device = torch.device("cpu")
    backend.current_stream = partial(lambda index: accelerator.accelerator_stream(index), 0)
    backend._ask = bool
    return backend


def test_threads_that_copy_at_once_keep_their_streams(current: Current) -> None:
    """Both are inside the same copy stream at a time, and each goes back to its own."""
    backend = backend_without_a_device()
    shared = torch.Stream(device="cpu")

    def copy() -> None:
        mine = current.stream
        target = torch.zeros(1).as_subclass(Meeting)
        for _ in range(20):
            backend.copy(shared, [target], [torch.zeros(1)], "group")
            assert current.stream is mine

    at_once([copy, copy])
    assert len(Meeting.inside) == 40 and all(stream is shared for stream in Meeting.inside)


def test_each_capture_has_a_number_of_its_own(current: Current) -> None:
    """Also on the same stream, if anybody asked in between; no thread outside numbers it anew."""
    backend, capturing = backend_without_a_device(), set[object]()
    backend._ask = lambda: current.stream in capturing  # a device tells of the current one alone
    backend._capture, backend._capturing = 0, None
    before = current.stream
    capturing.add(before)
    assert backend.capture_id() == 1
    assert at_once([backend.capture_id]) == [0]
    assert backend.capture_id() == 1
    backend.joined()
    assert backend.capture_id() == 2
    current.stream = side = torch.Stream(device="cpu")  # not part of it yet
    assert backend.capture_id() == 0
    assert current.stream is side
    current.stream = before
    assert backend.capture_id() == 2
    for number, is_asked_by_another in ((3, True), (4, False)):
        capturing.clear()
        if is_asked_by_another:
            at_once([backend.capture_id])
        else:
            assert backend.capture_id() == 0
        capturing.add(before)
        assert backend.capture_id() == number


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "fraction", "gaps", "expected"),
    [(44, None, 0, 64), (44, 1.0, 0, 64), (44, 0.4, 0, 32), (44, None, 10, 54), (0, 0.1, 20, 0)],
)
def test_memory_is_what_tensors_of_this_process_may_have(
    free: int, fraction: float | None, gaps: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device of 80 GiB, 20 of them reserved by PyTorch, with gaps."""
    asked: Any = {"mem_get_info": lambda device: (free * GIB, 80 * GIB)}
    if fraction is not None:
        asked["get_per_process_memory_fraction"] = lambda device: fraction
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**asked))
    stats = {
        "reserved_bytes": {"all": {"current": 20 * GIB}},
        "inactive_split_bytes": {"all": {"peak": gaps * GIB}},
    }
    monkeypatch.setattr(accelerator, "accelerator_stats", lambda index: stats)
    assert backend_without_a_device().memory_bytes() == expected * GIB


def test_one_work_queue_for_all_copies_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron sets 1 to overlap the communication of tensor parallelism. ROCm has other queues."""
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(accelerator, "_with_number", lambda device: device)  # it need not be here

    def warnings(cuda: str | None, **connections: str) -> list[str]:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        variables = {f"CUDA_DEVICE_MAX_{name}": number for name, number in connections.items()}
        monkeypatch.setattr(os, "environ", variables)
        accelerator._warn_of_one_queue.cache_clear()
        caplog.clear()
        for _ in range(2):
            AcceleratorBackend(torch.device("cuda", 0))
        return list(caplog.messages)

    (line,) = warnings("13.0", CONNECTIONS="1")
    assert "with CUDA_DEVICE_MAX_COPY_CONNECTIONS=8" in line
    assert warnings("13.0", CONNECTIONS="8", COPY_CONNECTIONS="1")
    assert not warnings(None, CONNECTIONS="1")
    assert not warnings("13.0", CONNECTIONS="1", COPY_CONNECTIONS="8")
    assert not warnings("13.0", CONNECTIONS="8")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_is_not_here_is_refused_by_each_product(device: str) -> None:
    for make in (
        lambda: AcceleratorBackend(torch.device(device)),
        lambda: OffloadModel(nn.Sequential(nn.Linear(2, 2)), device, num_slices=1),
        lambda: offload_layers(nn.Sequential(nn.Linear(2, 2)), ["0"], device=device),
    ):
        with pytest.raises(ValueError, match=f"{device}.* finds no .*; pass device=.cpu"):
            make()


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_copies_that_begin_late(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = AcceleratorBackend.copy

    def sleep_and_copy(self: AcceleratorBackend, stream: Any, *args: Any) -> None:
        if stream is getattr(self, direction):
            with stream:
                torch.cuda._sleep(50_000_000)  # some 30 ms
        copy(self, stream, *args)

    monkeypatch.setattr(AcceleratorBackend, "copy", sleep_and_copy)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend("cuda"), config=config) as manager:
        on, off = (make_model(width=64, groups=g, device="cuda") for g in (("mix", "mlp"), ()))
        for step in range(4):
            inputs = [x.cuda() for x in batches(4, 64, step, length=5 + step)]
            expected = run_step(off, inputs, in_flight=2, offload=False)
            assert same_bits(run_step(on, inputs, in_flight=2), expected), step
        torch.cuda.synchronize()
        assert_idle(manager)
