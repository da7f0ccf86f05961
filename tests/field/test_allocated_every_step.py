"""F33: after the first step the system is not asked for host memory again."""

from __future__ import annotations

import pytest
from conftest import BACKENDS, make_backend
from toy import batches, make_model, run_step

from pp_offload import OffloadConfig, use_backend

pytestmark = pytest.mark.field("F33")

WIDTH = 64


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_no_allocation_after_the_first_step(kind: str, in_flight: int) -> None:
    backend = make_backend(kind)
    asked: list[int] = []
    allocate = backend.allocate_host

    def counting(nbytes: int) -> object:
        asked.append(nbytes)
        return allocate(nbytes)

    backend.allocate_host = counting  # type: ignore[method-assign,assignment]
    with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        device = str(backend.device)
        model = make_model(4, WIDTH, device=device)
        after_step = []
        for step in range(6):
            inputs = [x.to(device) for x in batches(6, WIDTH, step, 100)]
            run_step(model, inputs, in_flight=in_flight)
            manager.reset()
            after_step.append(len(asked))
        assert after_step[0] > 0
        assert after_step[1:] == [after_step[0]] * 5
        assert manager.statistics().host_allocations == len(asked)
