"""When copies end that share a link, and what they cost compute, in closed forms."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from pp_offload.simulate import DEVICES, Hardware
from pp_offload.simulate.clocks import HostClock, VirtualStream
from pp_offload.simulate.link import Link

SLOW = replace(DEVICES["H100"], link_bytes_per_s=1.0, copy_latency_s=0, launch_s=0)
"""A byte a second each way, and a host that takes no time."""


class Copies:
    """Streams of copies on one link; each method launches one and gives its end."""

    def __init__(self, **changes: Any) -> None:
        self.host = HostClock(replace(SLOW, **changes))
        self.link = Link(self.host)
        self.d2h, self.h2d, self.other = (VirtualStream(self.host) for _ in range(3))

    def out(self, nbytes: int) -> float:
        return self._launch(self.d2h, nbytes, to_host=True)

    def out_elsewhere(self, nbytes: int) -> float:
        return self._launch(self.other, nbytes, to_host=True)

    def back(self, nbytes: int) -> float:
        return self._launch(self.h2d, nbytes, to_host=False)

    def _launch(self, stream: VirtualStream, nbytes: int, *, to_host: bool) -> float:
        return stream.launch_until(lambda begin: self.link.copy(begin, nbytes, to_host=to_host))


def test_directions_are_not_in_each_others_way() -> None:
    copies = Copies()
    assert [copies.out(10), copies.back(10), copies.out(5), copies.back(1)] == [10, 10, 15, 11]
    assert (copies.link.bytes_to_host, copies.link.bytes_to_device) == (15, 11)


def test_a_link_may_be_faster_one_way() -> None:
    copies = Copies(h2d_bytes_per_s=2.0)
    assert [copies.out(10), copies.back(10)] == [10.0, 5.0]
    copies = Copies(h2d_bytes_per_s=2.0, both_links_bytes_per_s=2.0)
    assert [copies.out(10), copies.back(10)] == [10.0, 10.0], "a byte a second is left"


def test_each_copy_has_its_latency() -> None:
    copies = Copies(copy_latency_s=0.5)
    assert [copies.out(10), copies.out(10)] == [10.5, 21.0]


def test_with_a_bound_for_both_the_second_has_what_is_left() -> None:
    copies = Copies(both_links_bytes_per_s=1.5)
    assert copies.out(10) == 10.0
    assert copies.back(10) == 15.0, "half a byte a second for 10 s, then a whole one"
    assert copies.out(10) == pytest.approx(22.5), "2.5 bytes until then, 7.5 after it"


def test_a_link_that_goes_one_way_at_a_time_makes_the_second_wait() -> None:
    copies = Copies(both_links_bytes_per_s=1.0)
    assert [copies.out(10), copies.back(10), copies.out(10)] == [10.0, 20.0, 30.0]


def test_streams_of_one_direction_share_it() -> None:
    copies = Copies()
    assert [copies.out(10), copies.out_elsewhere(10)] == [10.0, 20.0]
    assert copies.back(10) == 10.0


def test_devices_of_a_host_share_its_memory_equally() -> None:
    node: dict[str, Any] = {"host_bytes_per_s": 8.0, "num_devices_per_host": 4}
    copies = Copies(**node)
    assert [copies.out(10), copies.back(10)] == [10.0, 10.0], "two bytes a second are both"
    copies = Copies(**node | {"num_devices_per_host": 16})
    assert [copies.out(10), copies.back(10)] == [20.0, 40.0], "half a byte a second in all"


def test_what_a_host_has_is_that_of_no_device_above_its_link() -> None:
    hardware = replace(SLOW, host_bytes_per_s=100.0)
    assert (hardware.d2h_rate, hardware.both_copies_bytes_per_s) == (1.0, 2.0)
    assert replace(SLOW, both_links_bytes_per_s=1.25).both_copies_bytes_per_s == 1.25
    assert SLOW.both_copies_bytes_per_s == 2.0


def test_a_copy_begins_again_where_one_before_it_has_ended() -> None:
    """The other direction is in use from 2 to 4 and from 6 to 8."""
    copies = Copies(both_links_bytes_per_s=1.0)
    for begin in (2.0, 6.0):
        assert copies.link.copy(begin, 2, to_host=False) == begin + 2
    assert copies.out(5) == 9.0


def random_copies(seed: int, both: float) -> list[tuple[str, float, int]]:
    """Launched in some order on a link with that bound; their directions, ends and bytes."""
    draw = random.Random(seed)
    copies, found = Copies(both_links_bytes_per_s=both), []
    for _ in range(60):
        way, nbytes = draw.choice(["out", "back"]), draw.randrange(1, 20)
        found.append((way, getattr(copies, way)(nbytes), nbytes))
    return found


def is_within_the_law(seed: int, both: float) -> bool:
    """Whether no more bytes have gone by any copy's end than the link can move by then."""
    found = random_copies(seed, both)
    for _, end, _ in found:
        for ways, rate in ((("out",), 1.0), (("back",), 1.0), (("out", "back"), both)):
            moved = sum(nbytes for way, done, nbytes in found if way in ways and done <= end)
            if moved > rate * end * (1 + 1e-9):
                return False
    return True


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("both", [1.0, 1.3, 1.9])
def test_no_order_of_copies_is_above_the_law(seed: int, both: float) -> None:
    assert is_within_the_law(seed, both)


@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_is_asked_for_all_it_has_idles_never(seed: int) -> None:
    """As long as both directions have something to do."""
    found = random_copies(seed, both=1.0)
    assert max(end for _, end, _ in found) == pytest.approx(sum(one[2] for one in found))


def test_what_is_over_for_the_host_is_forgotten() -> None:
    copies = Copies()
    for _ in range(100):
        copies.host.wait_until(copies.out(1))
    assert len(copies.link._uses) <= 2


def test_compute_is_slower_while_copies_run() -> None:
    copies = Copies(d2h_slowdown=0.5, h2d_slowdown=0.25)
    copies.out(4)
    assert copies.link.compute(0.0, 10.0) == 12.0, "two of its ten seconds in the first four"
    assert copies.link.compute(1.0, 1.0) == 3.0
    assert copies.link.compute(4.0, 10.0) == 14.0
    copies.back(8)
    assert copies.link.compute(0.0, 10.0) == 14.0, "one second in four, three in the next four"


def test_compute_before_the_first_copy_is_as_fast_as_ever() -> None:
    copies = Copies(d2h_slowdown=0.25)
    copies.host.wait_until(5.0)
    copies.out(4)
    assert copies.link.compute(0.0, 5.0) == 5.0
    assert copies.link.compute(0.0, 8.0) == 9.0


def test_an_instant_link_takes_no_time() -> None:
    for both in (None, inf):
        copies = Copies(link_bytes_per_s=inf, both_links_bytes_per_s=both)
        assert [copies.out(10), copies.back(10)] == [0.0, 0.0]


FAULTS: dict[str, tuple[type, str, Any]] = {
    "directions never share": (Hardware, "both_copies_bytes_per_s", 1e30),
    "one direction has no bound": (Link, "_uses_after", lambda link, now_s: []),
    "later copies take all": (Link, "_left", lambda *_, to_host: 1.0),
    "copies are forgotten": (Link, "_forget_past", lambda link: link._uses.clear()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_link_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert not all(is_within_the_law(seed, 1.3) for seed in range(5))
