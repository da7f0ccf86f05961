"""The link between a device and its host, and what went over it.

link = Link(hardware)
stream.launch(link.seconds(tensor.nbytes, to_host=True))
link.bytes_to_host
"""

from __future__ import annotations

from pp_offload.simulate.hardware import Hardware


class Link:
    """Times of copies, and counts of their bytes.

    Args:
        hardware: Has its rate.

    Attributes:
        bytes_to_host: That left the device so far.
        bytes_to_device: That came.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self._hardware = hardware

    def seconds(self, nbytes: int, *, to_host: bool) -> float:
        """How long one more copy takes, which is counted."""
        if to_host:
            self.bytes_to_host += nbytes
        else:
            self.bytes_to_device += nbytes
        return self._hardware.copy_latency_s + nbytes / self._hardware.link_bytes_per_s
