"""Statistics of a step, and as a logger takes them."""

from __future__ import annotations

from dataclasses import fields, replace

from pp_offload import OffloadStatistics
from pp_offload._core.statistics import COUNTERS

NAMES = [field.name for field in fields(OffloadStatistics)]

GAUGES = """host_bytes_in_use host_bytes_peak host_bytes_reserved bytes_in_flight
bytes_reloaded_unused live_tensors step_ms stalled_ms disk_bytes_in_use disk_bytes_peak""".split()


def numbered(first: int) -> OffloadStatistics:
    """Each number is another one."""
    return OffloadStatistics(**{name: first + 7 * i for i, name in enumerate(NAMES)})


def test_every_number_is_a_counter_or_is_as_it_is_now() -> None:
    assert sorted([*COUNTERS, *GAUGES]) == sorted(NAMES)
    before, now = numbered(3), numbered(1000)
    difference = now.since(before)
    for name in COUNTERS:
        assert getattr(difference, name) == 997, name
    for name in GAUGES:
        assert getattr(difference, name) == getattr(now, name), name


def test_a_logger_gets_plain_numbers() -> None:
    figures = replace(numbered(1), stalled_ms=2.5).as_dict("offload/")
    assert list(figures) == [f"offload/{name}" for name in NAMES]
    assert all(type(number) in (int, float) for number in figures.values())
    assert figures["offload/stalled_ms"] == 2.5
    assert numbered(1).as_dict()["bytes_offloaded"] == 1
    unknown = replace(numbered(1), stalled_ms=None).as_dict()
    assert set(NAMES) - set(unknown) == {"stalled_ms"}


def test_a_table_has_what_is_not_zero() -> None:
    none = OffloadStatistics(**dict.fromkeys(NAMES, 0))
    statistics = replace(none, bytes_offloaded=3 * 2**29, taken_back=2, stalled_ms=1.25)
    assert [line.rsplit(maxsplit=2) for line in statistics.table().splitlines()] == [
        ["bytes offloaded", "1.50", "GiB"],
        ["taken", "back", "2"],
        ["stalled", "ms", "1.25"],
    ]
