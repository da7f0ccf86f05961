"""Steps that go to the disk, predicted in numbers, on random pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.plans.beside_engine import (
    Found,
    compare,
    drawn_of_any_kind,
    ran_with_disk,
    run_and_recorded,
)
from helpers.plans.random_pipelines import draw_pipeline

from pp_offload.plan import predict, record

pytestmark = pytest.mark.usefixtures("small_floor")


def test_random_pipelines_cost_what_they_cost_the_engine() -> None:
    compare(range(6), ran_with_disk)


def test_where_the_file_is_does_not_matter(tmp_path: Path) -> None:
    """Nothing is recorded there, and nothing is predicted of it."""
    drawn = draw_pipeline(0)
    steps = []
    for config in (
        replace(drawn.config, tiers=("disk",)),
        replace(drawn.config, tiers=("disk",), disk_dir=tmp_path / "nowhere"),
    ):
        tapes = record(drawn.order, drawn.work, drawn.hardware, config)
        steps.append(predict(drawn.order, tapes, drawn.hardware, config=config))
    assert steps[0] == steps[1] and not any(tmp_path.iterdir())


# Work of a step that the next one begins with


def ran_with_slow_writes(seed: int) -> Found:
    """So slow that the disk writes for nobody when backward has taken all from host memory."""
    with drawn_of_any_kind(seed) as drawn:
        link = drawn.hardware.link_bytes_per_s
        hardware = replace(drawn.hardware, disk_write_bytes_per_s=link / 1000)
        config = replace(drawn.config, tiers=("disk",), max_in_flight_bytes=2**40)
        num_steps = max(2, drawn.num_steps)
        drawn = replace(drawn, hardware=hardware, config=config, num_steps=num_steps)
        return run_and_recorded(drawn)


@pytest.mark.parametrize("seed", [8, 10, 22])
def test_what_is_written_still_goes_on_in_the_next_step(seed: int) -> None:
    assert ran_with_slow_writes(seed).differences() == []


# Each rule counts
