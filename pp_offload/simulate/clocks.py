"""The host's clock, and those of streams. Times are in seconds since the device was made.

Work is given its start and its end when it is launched, for all that it waits for was launched
before and has its times already. So nothing ever runs, and there is no queue of events to come.

    host = HostClock(hardware)
    compute, d2h = VirtualStream(host), VirtualStream(host)
    compute.launch(1e-3)                      # the host goes on after 5 us
    d2h.wait_event(compute.record_event())    # d2h begins a millisecond later
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pp_offload.backends import Event
from pp_offload.simulate.hardware import Hardware


class HostClock:
    """The time of the host, which launches work and goes on.

    Args:
        hardware: Says what launches cost.

    Attributes:
        now_s: The time.
        blocked_s: How long it waited for work to end, or for room in a queue of launches.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.now_s = 0.0
        self.blocked_s = 0.0
        self.hardware = hardware

    def wait_until(self, time_s: float) -> None:
        """Block until then."""
        self.blocked_s += max(0.0, time_s - self.now_s)
        self.now_s = max(self.now_s, time_s)


class VirtualEvent:
    """A point in a stream's order, and its time.

    Attributes:
        time_s: When all before it has ended, which may be before it was recorded.
        recorded_s: When the host recorded it.
    """

    __slots__ = ("_host", "recorded_s", "time_s")

    def __init__(self, host: HostClock, time_s: float) -> None:
        self._host = host
        self.time_s = time_s
        self.recorded_s = host.now_s

    def __deepcopy__(self, memo: object) -> VirtualEvent:
        """Itself: it never changes, and a copied clock would stand still."""
        return self

    def query(self) -> bool:
        """Whether that time has come for the host."""
        return self.time_s <= self._host.now_s

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Milliseconds from here to ``end``."""
        return (end.time_s - self.time_s) * 1e3

    def synchronize(self) -> None:
        """Have the host wait until then."""
        self._host.wait_until(self.time_s)


class VirtualStream:
    """Work in order.

    Args:
        host: Launches it.

    Attributes:
        free_at_s: When all work launched so far has ended.
        busy_s: How long it worked.
        stalled_s: How long work that the host had launched waited for other streams.
        heard: Told of each work when nothing but other streams kept it waiting, when it begins,
            and when it ends.
    """

    def __init__(self, host: HostClock) -> None:
        self.free_at_s = 0.0
        self.busy_s = 0.0
        self.stalled_s = 0.0
        self.heard: tuple[Callable[[float, float, float], None], ...] = ()
        self._host = host
        self._may_begin_s = 0.0
        self._queued_ends_s: deque[float] = deque()

    def launch(self, seconds: float) -> float:
        """Launch work that takes so long, and first wait for room in the queue; its end."""
        if self.heard:
            return self.launch_until(lambda begin_s: begin_s + seconds)
        self.launch_all((seconds,))
        return self.free_at_s

    def launch_until(self, end_s: Callable[[float], float]) -> float:
        """The same for work whose end depends on when it begins, which is asked for once."""
        self._take_time()
        ready_s = max(self.free_at_s, self._host.now_s)
        begin_s = max(ready_s, self._may_begin_s)
        self.stalled_s += begin_s - ready_s
        self.free_at_s = end_s(begin_s)
        self.busy_s += self.free_at_s - begin_s
        self._queued_ends_s.append(self.free_at_s)
        for heard in self.heard:
            heard(ready_s, begin_s, self.free_at_s)
        return self.free_at_s

    def launch_all(self, seconds: Sequence[float]) -> None:
        """As :meth:`launch` for each, in one loop; nobody hears of them."""
        host, queue = self._host, self._queued_ends_s
        launch_s, most = host.hardware.launch_s, host.hardware.num_queued_launches
        now_s, may_begin_s, free_at_s = host.now_s, self._may_begin_s, self.free_at_s
        for took_s in seconds:
            now_s += launch_s
            while queue and queue[0] <= now_s:
                queue.popleft()
            if len(queue) >= most:
                host.now_s = now_s
                host.wait_until(queue.popleft())
                now_s = host.now_s
            begin_s = free_at_s if free_at_s > now_s else now_s
            if may_begin_s > begin_s:
                self.stalled_s += may_begin_s - begin_s
                begin_s = may_begin_s
            free_at_s = begin_s + took_s
            self.busy_s += free_at_s - begin_s
            queue.append(free_at_s)
        host.now_s, self.free_at_s = now_s, free_at_s

    def _take_time(self) -> None:
        """That of the host, for a launch."""
        host, queue = self._host, self._queued_ends_s
        host.now_s += host.hardware.launch_s
        while queue and queue[0] <= host.now_s:
            queue.popleft()
        if len(queue) >= host.hardware.num_queued_launches:
            host.wait_until(queue.popleft())

    def wait_event(self, event: Event) -> None:
        """Let nothing launched from now on begin before ``event``."""
        assert isinstance(event, VirtualEvent)
        self.wait_until(event.time_s)

    def wait_until(self, time_s: float) -> None:
        """Let nothing launched from now on begin before that."""
        if time_s > self._may_begin_s:
            self._may_begin_s = time_s

    def wait_stream(self, other: VirtualStream) -> None:
        """Let nothing launched from now on begin before all that ``other`` has now."""
        self.wait_until(other.ready_at_s)

    @property
    def ready_at_s(self) -> float:
        """When everything launched so far has ended, and all that is waited for."""
        free_at_s, may_begin_s = self.free_at_s, self._may_begin_s
        return free_at_s if free_at_s > may_begin_s else may_begin_s

    def record_event(self) -> VirtualEvent:
        """A new event at that point."""
        return VirtualEvent(self._host, self.ready_at_s)

    def synchronize(self) -> None:
        """Have the host wait for all of it."""
        self.record_event().synchronize()
