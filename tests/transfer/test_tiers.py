"""A tier is one file and one name: here is one, and whatever a user does with it."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from conftest import make_backend
from test_disk import saved_in_a_group
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import ConfigError, OffloadConfig, PipelineOffloadManager, config, use_backend
from pp_offload._memory.arena import Range
from pp_offload._memory.budget import Reserved, reserved_bytes
from pp_offload._memory.buffers import HostBuffer, Loan, Place, Spec
from pp_offload._memory.slabs import Slab
from pp_offload._transfer import tiers
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.ticket import Ticket, place
from pp_offload._transfer.tier import NO_HOST_MEMORY, Tier, TierSetup, TierStatistics
from pp_offload.errors import TierError

# The tier


class ToyBlock(Block):
    """Bytes that are in a buffer while they are on their way, and in ``packed`` while they rest."""

    __slots__ = ("nbytes", "num_payloads", "packed")

    packed: bytes | None

    def places(self, parts: list[Spec]) -> list[Place]:
        """Without bytes, for the buffer of the way back is another one."""
        places = super().places(parts)
        return [(begin, torch.empty_like(one, device="meta")) for begin, one in places]


class ToyTier(Tier):
    """Compresses what has arrived, and keeps that; in memory of its own, for all that is its own.

    Args:
        copies: Queues the copies.
        room_bytes: How much may be there.
    """

    name = "toy"
    is_gathering = True

    def __init__(self, copies: Copies, room_bytes: int = 2**30) -> None:
        self._copies = copies
        self._room_bytes = room_bytes
        self._all: list[weakref.ref[ToyBlock]] = []
        self._buffers: list[HostBuffer] = []
        self.peak = 0

    def allocate(self, batch: list[Ticket], nbytes: int) -> list[Block]:
        if self.statistics().host.in_use + nbytes > self._room_bytes:
            raise MemoryError("the toy is full; make it larger")
        block = ToyBlock(self, self._buffer(nbytes))
        block.nbytes, block.num_payloads, block.packed = nbytes, len(batch), None
        self._all.append(weakref.ref(block))
        self.peak = max(self.peak, self.statistics().host.in_use)
        return [place(batch, block)]

    def _buffer(self, nbytes: int) -> Loan:
        """Ordinary memory. Copies may use it for longer than whoever asked for it."""
        slab = Slab(torch.empty(nbytes, dtype=torch.uint8), Reserved(0))
        self._buffers.append(HostBuffer(nbytes, [Range(0, 0, nbytes, nbytes)], [slab]))
        return Loan(self._buffers[-1])

    def may_capture(self, block: Block | None = None) -> bool:
        return False  # a graph that runs again would copy to a buffer that is gone

    def store(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        return self._copies.copy_to_host(tickets, blocks)

    def poll(self) -> None:
        for block in self._living():
            if block.packed is None and block.offloaded is not None and block.offloaded.query():
                assert block.buffer is not None
                block.packed = zlib.compress(block.buffer.pieces[0].numpy())
                block.loan = None
        used = [one for one in self._buffers if not all(e.query() for e in one.last_uses())]
        lent = {block.buffer for block in self._living()}
        self._buffers = [one for one in self._buffers if one in lent or one in used]

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        asked = [ticket for ticket in tickets if ticket.device_tensor is None]
        for block in {ticket.block for ticket in asked}:
            assert isinstance(block, ToyBlock)
            if block.buffer is None and not self._unpack(block):
                if is_ahead:
                    return 0  # whoever needs it hears of it
                raise TierError(f"the toy lost {block.nbytes} bytes; do not play with it")
        num = self._copies.copy_to_device(asked)
        for ticket in asked:
            assert isinstance(ticket.block, ToyBlock)
            if ticket.block.packed is not None:
                ticket.block.loan = None
        return num

    def _unpack(self, block: ToyBlock) -> bool:
        """Into a new buffer, from which it can be copied; False if it cannot be."""
        assert block.packed is not None
        try:
            data = bytearray(zlib.decompress(block.packed))
        except zlib.error:
            return False
        loan = self._buffer(len(data))
        loan.buffer.pieces[0].copy_(torch.frombuffer(data, dtype=torch.uint8))
        block.offloaded, block.loan = None, loan
        return True

    def statistics(self) -> TierStatistics:
        living = self._living()
        in_use = sum(block.nbytes for block in living)
        return TierStatistics(
            num_payloads=sum(block.num_payloads for block in living),
            host=replace(NO_HOST_MEMORY, in_use=in_use, peak=self.peak),
        )

    def _living(self) -> list[ToyBlock]:
        living = [block for ref in self._all if (block := ref()) is not None]
        self._all = [weakref.ref(block) for block in living]
        return living


# Its use

ON_THE_HOST = ["cpu", "cpu threads", "late", "eager", "random"]
CHAINS = [("toy",), ("host", "toy")]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ToyTier]]:
    """Those that were made. The name is there until the test is over."""
    made: list[ToyTier] = []

    def make(setup: TierSetup) -> Tier:
        made.append(ToyTier(setup.copies))
        return made[-1]

    monkeypatch.setattr(config, "TIERS", list(config.TIERS))
    monkeypatch.setattr(tiers, "MAKERS", dict(tiers.MAKERS))
    tiers.add_tier("toy", make)
    yield made


def options(chain: tuple[str, ...], **others: int) -> OffloadConfig:
    """Little may be in flight, so that bytes come to rest."""
    cap = others.pop("max_in_flight_bytes", 3000)
    return OffloadConfig(
        min_offloaded_tensor_size=1, tiers=chain, max_in_flight_bytes=cap, **others
    )


def steps_are_equal(manager: PipelineOffloadManager, length: int = 9) -> bool:
    device = str(manager.backend.device)
    on, off = (make_model(width=32, groups=g, device=device) for g in (("mix", "mlp"), ()))
    for step in range(3):
        inputs = [x.to(device) for x in batches(5, 32, step, length=length + step)]
        expected = run_step(off, inputs, in_flight=3, offload=False)
        if not same_bits(run_step(on, inputs, in_flight=3), expected):
            return False
    return True


@pytest.mark.parametrize("kind", ON_THE_HOST)
def test_steps_are_equal_bit_for_bit(kind: str, toys: list[ToyTier]) -> None:
    with use_backend(make_backend(kind), config=options(("toy",))) as manager:
        assert steps_are_equal(manager)
        assert len(toys) == 1
        assert toys[0].peak > 0
        statistics = manager.statistics()
        assert statistics.host_bytes_peak == toys[0].peak
        assert (statistics.host_bytes_in_use, statistics.live_tensors) == (0, 0)
        assert_idle(manager)


@pytest.mark.parametrize("kind", ON_THE_HOST)
def test_it_takes_what_is_over_the_host_budget(kind: str, toys: list[ToyTier]) -> None:
    limit = reserved_bytes() + 2**19
    chain = options(("host", "toy"), host_budget_bytes=limit)
    with use_backend(make_backend(kind), config=chain) as manager:
        assert steps_are_equal(manager, length=95)
        assert reserved_bytes() <= limit
        assert 0 < toys[0].peak < manager.statistics().host_bytes_peak
        assert_idle(manager)


@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
def test_without_room_a_group_stays_on_the_device_with_one_warning(
    chain: tuple[str, ...], toys: list[ToyTier], caplog: pytest.LogCaptureFixture
) -> None:
    little = options(chain, host_budget_bytes=reserved_bytes())
    with use_backend(make_backend("late"), config=little) as manager:
        toys[0]._room_bytes = 100
        with caplog.at_level(logging.WARNING, logger="pp_offload"):
            assert steps_are_equal(manager)
        said = [record.getMessage() for record in caplog.records]
        assert sum("the toy is full; make it larger" in one for one in said) == 1
        assert manager.statistics().bytes_offloaded == 0
        assert_idle(manager)


@pytest.mark.parametrize("kind", ON_THE_HOST)
def test_what_it_lost_raises_when_it_is_asked_for(kind: str, toys: list[ToyTier]) -> None:
    with use_backend(make_backend(kind), config=options(("toy",), max_in_flight_bytes=0)) as on:
        x, h, loss = saved_in_a_group(on)
        expected = torch.autograd.grad((x * 1).sin().sum(), x)
        del h
        on.backend.synchronize()
        on.statistics()
        (block,) = toys[0]._living()
        packed = block.packed
        assert packed is not None, "it is at rest"
        block.packed = packed[:-1]
        for _ in range(2):
            with pytest.raises(TierError, match="the toy lost 160 bytes; do not play with it"):
                torch.autograd.grad(loss, x, retain_graph=True)
        block.packed = packed
        assert same_bits(torch.autograd.grad(loss, x), expected)
        del block, loss
        assert_idle(on)


@pytest.mark.parametrize("given", [("toys",), ("toy", "host"), ("toy", "toy"), "toy", ()])
def test_an_unknown_chain_is_an_error_that_lists_those_there_are(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig(tiers=given)
    assert "('host',), ('disk',), ('toy',), ('host', 'disk'), ('host', 'toy')" in str(error.value)
    assert "the host before the disk or the toy" in str(error.value)


def test_a_name_is_known_when_somebody_can_make_that_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "TIERS", ["host", "disk"])
    with pytest.raises(
        ConfigError, match=r"expected one of .*: a tuple, the host before the disk$"
    ):
        OffloadConfig(tiers=("toy",))
