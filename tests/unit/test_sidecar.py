"""The sidecar in one process with its engine's ends, over the memory bus."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec
import pytest

from kvatlas.events.codec import decode, encode
from kvatlas.events.leases import LeaseValue, lease_key
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus, MemoryPublisher
from kvatlas.events.streams import EPOCHS_BUCKET, KV_EVENTS, LEASES_BUCKET, events_stream
from kvatlas.events.subjects import (
    control_subject,
    events_subject,
    inventory_subject,
    lease_subject,
)
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.reader import InstanceView
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.digest import digest_of, split_hashes
from kvatlas.schemas.errors import SidecarUnavailable, StreamRefused
from kvatlas.schemas.fleet import Trust, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    ENGINE_STALLED,
    WIRE_VERSION,
    BlockRemoved,
    BlockStored,
    ControlRecord,
    EventBatch,
    Inventory,
    KvEvent,
    NamespacesOverBudget,
    SourceDegraded,
    WorkerDown,
    WorkerUp,
)
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseMissing,
    LeaseRequest,
    decode_transfer_answer,
    encode_transfer,
)
from kvatlas.worker_hooks.raw_events import RawStored
from kvatlas.worker_hooks.reporting.ring import Lost
from kvatlas.worker_hooks.sidecar import service as sidecar_service
from kvatlas.worker_hooks.sidecar.exchange import BlockExchange
from kvatlas.worker_hooks.transfer.memory import MemoryFabric
from testkit.fold import Fold
from testkit.sidecars import BLOCK_BYTES, DESCRIPTOR, beside, folded, sidecar_options
from testkit.waiting import WAIT_SECONDS, until, until_told

W = InstanceId("w", 0)


def tokens_of(*blocks: int) -> bytes:
    return array("I", [block * 10 + i for block in blocks for i in range(4)]).tobytes()


def chain_of(*blocks: int) -> list[bytes]:
    packed = BlockHasher(DESCRIPTOR.namespace("m", None, None)).chain(tokens_of(*blocks))
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


@asynccontextmanager
async def a_broker() -> AsyncIterator[tuple[MemoryBroker, MemoryBus]]:
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        yield broker, bus


@asynccontextmanager
async def a_fold(bus: MemoryBus) -> AsyncIterator[Fold]:
    async with folded(bus, W) as folds:
        yield folds[W]


async def test_what_the_engine_says_is_in_the_log(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        one.hook.stored([1, 2], None, tokens_of(1, 2))
        one.hook.removed([2])
        flushed = await one.channel.flush()
        await until(lambda: fold.seq >= flushed.seq)
        assert fold.held[Tier.hbm] == set(chain_of(1))
        assert isinstance(fold.events[0], WorkerUp)
        assert fold.events[0].info == one.options.worker_info()
        await until(lambda: fold.num_digests >= 10)


async def test_it_says_goodbye_after_everything_else(tmp_path: Path) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            await one.channel.flush()
            one.hook.stored([1], None, tokens_of(1))
            one.sidecar.stop("signal SIGTERM")
            assert await one.running == "signal SIGTERM"
        await until(lambda: fold.down != "")
        assert fold.down == "signal SIGTERM"
        assert fold.held[Tier.hbm] == set(chain_of(1))
        assert await bus.keys(LEASES_BUCKET).get("lease.w.0") is None


async def test_the_inventory_comes_on_request_and_once_for_many(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        one.hook.stored([1, 2], None, tokens_of(1, 2))
        await one.channel.flush()
        answers = await asyncio.gather(
            *(bus.request(inventory_subject(W), b"", 30.0) for _ in range(3))
        )
        (first_seq,) = msgspec.msgpack.decode(answers[0])
        assert set(answers) == {answers[0]}
        await one.channel.flush()
        await until(lambda: fold.seq >= first_seq)
        parts = [e for e in fold.events if isinstance(e, Inventory) and e.tier is Tier.hbm]
        assert [part.hashes for part in parts] == [b"".join(chain_of(1, 2))]
        assert parts[0].as_of_seq == first_seq - 1


async def test_a_broker_that_is_away_costs_nothing(tmp_path: Path) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        own = broker.connect()
        async with beside(sidecar_options(tmp_path), own) as one:
            one.hook.stored([1], None, tokens_of(1))
            await one.channel.flush()
            own.cut()
            for block in range(2, 200):
                one.hook.stored([block], block - 1, tokens_of(block))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await one.channel.flush()
            status = await one.channel.status()
            assert not status.is_connected
            assert status.num_blocks == 199
            own.restore()
            flushed = await one.channel.flush()
            await until(lambda: fold.seq >= flushed.seq)
        assert fold.gaps == []
        assert fold.held[Tier.hbm] == set(chain_of(*range(1, 200)))


async def test_an_outbox_that_overflows_is_a_gap_and_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.events.memory.bus.MAX_UNACKED", 4)
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        own = broker.connect()
        async with beside(sidecar_options(tmp_path, max_outbox_bytes=65_536), own) as one:
            await one.channel.flush()
            own.cut()
            for round_ in range(10):
                for block in range(1, 400):
                    one.hook.stored([block], None, tokens_of(block))
                    one.hook.removed([block])
                one.hook.stored([1000 + round_], None, tokens_of(1000 + round_))
                await until(lambda: one.reader.waiting_bytes == 0)
            status = await one.channel.status()
            assert status.waiting_bytes <= 2 * 65_536
            own.restore()
            flushed = await one.channel.flush()
            await until(lambda: fold.seq >= flushed.seq)
            assert (await one.channel.status()).counters["outbox_overflows"] == 1
        assert fold.gaps
        assert fold.is_whole
        assert fold.held[Tier.hbm] == {h for r in range(10) for h in chain_of(1000 + r)}


async def test_events_that_waited_for_too_long_are_a_gap_and_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.events.memory.bus.MAX_UNACKED", 2)
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        own = broker.connect()
        options = sidecar_options(tmp_path, max_outbox_seconds=0.2, digest_seconds=0.05)
        async with beside(options, own) as one:
            one.hook.stored([1], None, tokens_of(1))
            await one.channel.flush()
            own.cut()
            for block in range(2, 10):  # more than the publisher takes: the rest waits before it
                one.hook.stored([block], None, tokens_of(block))
                await until(lambda: one.reader.waiting_bytes == 0)

            async def overflowed() -> bool:
                return (await one.channel.status()).counters["outbox_overflows"] > 0

            await until_told(overflowed)
            own.restore()
            flushed = await one.channel.flush()
            await until(lambda: fold.seq >= flushed.seq and fold.is_whole)
        assert fold.gaps
        assert fold.held[Tier.hbm] == {h for block in range(1, 10) for h in chain_of(block)}


async def test_an_epoch_that_was_declared_dead_is_followed_by_another(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        one.hook.stored([1, 2], None, tokens_of(1, 2))
        first = await one.channel.flush()
        record = ControlRecord(WIRE_VERSION, *W, first.epoch, "expired", "lease", "test", 1)
        publisher = bus.publisher(KV_EVENTS)
        await publisher.publish(control_subject(W), encode(record))
        await until(lambda: fold.epoch > first.epoch and fold.is_whole)
        second = await one.channel.flush()
        assert second.epoch > first.epoch
        assert fold.held[Tier.hbm] == set(chain_of(1, 2))
        # a record about the old epoch is old news
        await publisher.publish(control_subject(W), encode(record))
        one.hook.stored([3], 2, tokens_of(3))
        third = await one.channel.flush()
        assert third.epoch == second.epoch


async def test_a_newer_incarnation_stops_the_older(tmp_path: Path) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        folders = (tmp_path / "a", tmp_path / "b")
        for folder in folders:
            folder.mkdir()
        older_options, newer_options = (
            sidecar_options(folder, lease_ttl_seconds=1.0) for folder in folders
        )
        async with beside(older_options, broker.connect()) as older:
            await older.channel.flush()
            async with beside(newer_options, broker.connect()) as newer:
                flushed = await newer.channel.flush()
                assert await asyncio.wait_for(older.running, WAIT_SECONDS) == "fenced"
                assert fold.epoch == flushed.epoch
                assert fold.down == ""


async def test_an_instance_that_meets_a_newer_lease_stops_at_once(tmp_path: Path) -> None:
    async with a_broker() as (broker, bus):
        newer = msgspec.msgpack.encode(LeaseValue(time.time_ns() // 1_000_000 + 60_000))
        await bus.keys(LEASES_BUCKET).put("lease.w.0", newer)
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            assert await one.running == "fenced"


@pytest.mark.parametrize("garbage", [msgspec.msgpack.encode([2**60]), b"\xc1", bytes(5_000)])
async def test_a_lease_that_is_none_stops_nobody(tmp_path: Path, garbage: bytes) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        await bus.keys(LEASES_BUCKET).put("lease.w.0", garbage)
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            flushed = await one.channel.flush()
            await until(lambda: fold.seq >= flushed.seq)
            entry = await bus.keys(LEASES_BUCKET).get("lease.w.0")
            assert entry is not None
            assert msgspec.msgpack.decode(entry.value, type=LeaseValue).epoch == flushed.epoch


@pytest.mark.parametrize("value", [b"9" * 5_000, b"%d" % 10**30, b"%d" % 2**44, b"-1", b"", b"x"])
async def test_an_epoch_that_is_none_keeps_no_worker_from_starting(
    tmp_path: Path, value: bytes
) -> None:
    async with a_broker() as (broker, bus):
        await bus.keys(EPOCHS_BUCKET).put("w.0", value)
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            flushed = await one.channel.flush()
            assert abs(flushed.epoch - time.time_ns() // 1_000_000) < 3_600_000


async def test_an_epoch_that_was_seen_above_and_is_over_makes_a_new_one_begin(
    tmp_path: Path,
) -> None:
    """What it says has no effect: a forged epoch, or one of a bucket that was lost."""
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        one.hook.stored([1], None, tokens_of(1))
        first = await one.channel.flush()
        higher = first.epoch + 40_000
        await publish_record(bus, higher)
        await until(lambda: fold.epoch == higher + 1)
        await until(lambda: fold.held[Tier.hbm] == set(chain_of(1)))
        assert (await one.channel.status()).counters["superseded"] == 1


async def test_an_epoch_far_ahead_makes_none_begin(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        first = await one.channel.flush()
        await publish_record(bus, 2**44)
        await publish_record(bus, first.epoch + 5_000)

        async def is_above() -> bool:
            return (await one.channel.status()).epoch > first.epoch

        await until_told(is_above)
        assert (await one.channel.status()).epoch < first.epoch + 3_600_000


async def test_one_whose_name_another_has_now_does_not_take_it_back(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        first = await one.channel.flush()
        newer = msgspec.msgpack.encode(LeaseValue(first.epoch + 7_000))
        await bus.keys(LEASES_BUCKET).put("lease.w.0", newer)
        await publish_record(bus, first.epoch + 5_000)
        assert await asyncio.wait_for(one.running, WAIT_SECONDS) == "fenced"


async def publish_record(bus: MemoryBus, epoch: int) -> None:
    record = ControlRecord(WIRE_VERSION, "w", 0, epoch, "expired", "lease", "me", 0)
    publisher = bus.publisher(KV_EVENTS)
    await publisher.publish(control_subject(W), encode(record))
    await publisher.flush()


async def test_a_forged_epoch_hides_a_living_worker_for_a_few_renewals_only(
    tmp_path: Path,
) -> None:
    settings = IndexServiceLimits(poll_seconds=0.02, lease_missing_seconds=600.0)
    async with a_broker() as (broker, bus):
        options = sidecar_options(tmp_path, lease_ttl_seconds=2.0, digest_seconds=0.05)
        async with (
            IndexService(bus, IndexState(ReferenceIndex()), settings=settings) as service,
            beside(options, broker.connect()) as one,
        ):
            one.hook.stored([1], None, tokens_of(1))
            first = await one.channel.flush()
            forged = EventBatch(
                WIRE_VERSION, "w", 0, first.epoch + 50_000, 1, 0, (WorkerUp(options.worker_info()),)
            )
            publisher = bus.publisher(KV_EVENTS)
            await publisher.publish(events_subject("m", W), encode(forged))
            await publisher.flush()
            await until(lambda: view_of(service).epoch == forged.epoch)
            await until(lambda: view_of(service).epoch > forged.epoch)
            await until(lambda: view_of(service).trust is Trust.exact)
            await until(lambda: view_of(service).num_blocks == 1)


FORGED = WorkerInfo("http://forged", ("m",), DESCRIPTOR)


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (1, [WorkerUp(FORGED)]),
        (1, [SourceDegraded("forged")]),
        (1, [NamespacesOverBudget(bytes(16), "forged")]),
        (1, [WorkerDown("forged")]),
        (2**53 - 1_000, []),
        (500, [WorkerUp(FORGED)]),
    ],
    ids=["up", "doubted", "muted", "down", "last-sequence", "up-and-a-later-sequence"],
)
@pytest.mark.parametrize("holds_blocks", [True, False], ids=["holds", "idle"])
async def test_what_is_forged_in_a_living_epoch_ends_by_itself(
    tmp_path: Path, ahead: int, said: list[KvEvent], holds_blocks: bool
) -> None:
    settings = IndexServiceLimits(poll_seconds=0.02, lease_missing_seconds=600.0)
    async with a_broker() as (broker, bus):
        options = sidecar_options(
            tmp_path, base_url="http://own", lease_ttl_seconds=2.0, digest_seconds=0.05
        )
        async with (
            IndexService(bus, IndexState(ReferenceIndex()), settings=settings) as service,
            beside(options, broker.connect()) as one,
        ):
            if holds_blocks:
                one.hook.stored([1], None, tokens_of(1))
            first = await one.channel.flush()
            forged = EventBatch(WIRE_VERSION, "w", 0, first.epoch, first.seq + ahead, 0, (*said,))
            publisher = bus.publisher(KV_EVENTS)
            await publisher.publish(events_subject("m", W), encode(forged))
            await publisher.flush()
            last = await bus.last_sequence(KV_EVENTS)
            await until(lambda: service.state.stream_sequence >= last)

            def is_as_before() -> bool:
                view = view_of(service)
                own = view.info is not None and view.info.base_url == "http://own"
                is_exact = view.trust is Trust.exact and not view.muted
                return own and is_exact and view.num_blocks == holds_blocks

            await until(is_as_before)


def view_of(service: IndexService) -> InstanceView:
    view = service.index.instance(W)
    assert view is not None
    return view


async def test_a_batch_that_the_broker_refuses_is_a_gap_that_heals(tmp_path: Path) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        own = RefusingBus(broker, refuse_from=3)
        async with beside(sidecar_options(tmp_path), own) as one:
            one.hook.stored([1], None, tokens_of(1))
            await one.channel.flush()
            one.hook.stored([2], 1, tokens_of(2))
            await until(lambda: own.num_refused > 0)
            flushed = await one.channel.flush()
            await until(lambda: fold.seq >= flushed.seq)
            assert fold.gaps
            assert fold.is_whole
            assert fold.held[Tier.hbm] == set(chain_of(1, 2))
            assert (await one.channel.status()).counters["refused_batches"] == 1


class RefusingBus(MemoryBus):
    """A bus whose broker refuses one message, or so many, and of some kinds of events only."""

    def __init__(
        self,
        broker: MemoryBroker,
        refuse_from: int,
        times: int = 1,
        only: tuple[type[KvEvent], ...] = (),
    ) -> None:
        super().__init__(broker)
        self.refuse_from, self.times, self.num_refused = refuse_from, times, 0
        self._only = only

    def refuses(self, batch: EventBatch) -> bool:
        """Whether it takes a batch not."""
        if batch.seq < self.refuse_from or self.num_refused >= self.times:
            return False
        return not self._only or any(isinstance(event, self._only) for event in batch.events)

    def publisher(self, stream_name: str) -> MemoryPublisher:
        made = super().publisher(stream_name)
        publish = made.publish

        async def maybe(subject: str, payload: bytes) -> None:
            if self.refuses(decode(payload).batch):
                self.num_refused += 1
                raise StreamRefused("for once")
            await publish(subject, payload)

        made.publish = maybe  # type: ignore[method-assign]
        return made


async def test_a_flush_under_way_keeps_no_sidecar_from_stopping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        own = RefusingBus(broker, refuse_from=2, times=10**9, only=(BlockStored, Inventory))
        async with beside(sidecar_options(tmp_path), own) as one:
            await one.channel.flush()
            one.hook.stored([1], None, tokens_of(1))
            flushing = asyncio.create_task(one.channel.flush())
            await until(lambda: own.num_refused > 0)
            one.sidecar.stop("signal SIGTERM")
            assert await asyncio.wait_for(one.running, WAIT_SECONDS) == "signal SIGTERM"
            with pytest.raises(SidecarUnavailable, match="went away"):
                await flushing
        await until(lambda: fold.down == "signal SIGTERM")
    # a flush that never waits is ended by the test's timeout, which shows only here
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_an_engine_that_never_stops_writing_keeps_no_sidecar_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            await one.channel.flush()
            # the engine appends two blocks for each one that the sidecar takes
            read, numbers = one.reader.read, iter(range(1, 10**8))

            def read_one(max_bytes: int) -> list[bytes | Lost]:
                for number in (next(numbers), next(numbers)):
                    one.hook.stored([number], None, tokens_of(number))
                return read(1)

            monkeypatch.setattr(one.reader, "read", read_one)
            one.hook.stored([10**9], None, tokens_of(0))
            one.sidecar.stop("signal SIGTERM")
            assert await asyncio.wait_for(one.running, WAIT_SECONDS) == "signal SIGTERM"
        await until(lambda: fold.down == "signal SIGTERM")


async def test_a_ring_whose_records_cannot_be_read_keeps_no_sidecar_from_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            await one.channel.flush()
            monkeypatch.setattr(one.reader, "read", lambda max_bytes: [])
            one.hook.stored([1], None, tokens_of(1))
            for _ in range(10):
                assert (await one.channel.status()).is_connected
            one.sidecar.stop("signal SIGTERM")
            assert await asyncio.wait_for(one.running, WAIT_SECONDS) == "signal SIGTERM"
        await until(lambda: fold.down == "signal SIGTERM")


async def test_a_broker_that_refuses_everything_is_named_less_and_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_service, "REFUSED_SECONDS", 0.01)
    async with a_broker() as (broker, _):
        own = RefusingBus(broker, refuse_from=2, times=10**9)
        async with beside(sidecar_options(tmp_path), own) as one:
            await one.channel.flush()
            one.hook.stored([1], None, tokens_of(1))
            await until(lambda: own.num_refused >= 12)
    lines = [r.getMessage() for r in caplog.records if "refuses events" in r.getMessage()]
    pauses = [float(line.rpartition(" in ")[2].removesuffix(" s")) for line in lines]
    assert len(lines) < own.num_refused
    assert pauses == [0.01 * 2**n for n in range(len(pauses))]


async def test_an_engine_without_a_sign_of_life_is_doubted_until_it_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_service, "LOOK_SECONDS", 0.01)
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        async with beside(
            sidecar_options(tmp_path, engine_silent_seconds=0.2), broker.connect()
        ) as one:
            one.hook.stored([1], None, tokens_of(1))
            await one.channel.flush()
            one.ring.beat()
            await until(lambda: fold.doubt.startswith(ENGINE_STALLED))
            # an inventory, by which a reader that begins later knows it, says it as well
            fold.doubt = ""
            await bus.request(inventory_subject(W), b"", WAIT_SECONDS)
            await until(lambda: fold.doubt.startswith(ENGINE_STALLED))
            one.ring.beat()
            await until(lambda: fold.doubt == "")
            status = await one.channel.status()
        assert status.counters["engine_stalls"] >= 1
        assert fold.held[Tier.hbm] == set(chain_of(1))


async def test_a_quarantined_instance_goes_on_and_so_does_one_that_is_spoken_of_in_riddles(
    tmp_path: Path,
) -> None:
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        first = await one.channel.flush()
        record = ControlRecord(WIRE_VERSION, *W, first.epoch, "quarantined", "sums", "test", 1)
        publisher = bus.publisher(KV_EVENTS)
        await publisher.publish(control_subject(W), encode(record))
        await publisher.publish(control_subject(W), b"riddle")
        one.hook.stored([1], None, tokens_of(1))
        flushed = await one.channel.flush()
        await until(lambda: fold.seq >= flushed.seq)
        assert flushed.epoch == first.epoch
        assert fold.held[Tier.hbm] == set(chain_of(1))


async def test_the_inventory_is_told_now_and_then_unasked(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(
            sidecar_options(tmp_path, digest_seconds=0.02, inventory_seconds=0.1),
            broker.connect(),
        ),
    ):
        await until(lambda: sum(isinstance(e, Inventory) for e in fold.events) >= 10)
        # with it comes who speaks, for readers that begin there
        assert sum(isinstance(event, WorkerUp) for event in fold.events) >= 3


async def test_events_that_are_no_events_cost_themselves(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        ring = one.hook._ring
        extra = {"offset": -1, "kind": "image", "id": "x", "length": 1}
        for bad in (
            b"",
            b"\xc1",
            b"rubbish",
            msgspec.msgpack.encode(["unknown", 1]),
            msgspec.msgpack.encode(["stored", ["text"], None, b"", 0]),
            msgspec.msgpack.encode(["stored", [1], None, b"", 99]),
            msgspec.msgpack.encode(["stored", [1], None, b"1234", 0, None, None, [extra], 0, 0]),
            msgspec.msgpack.encode(["stored", [1], None, b"", 0, None, None, [], 2**63, 0]),
        ):
            ring.append(bad)
        one.hook.stored([1], None, b"123")  # not four tokens
        one.hook.stored([1], None, tokens_of(1))
        flushed = await one.channel.flush()
        await until(lambda: fold.seq >= flushed.seq)
        assert fold.held[Tier.hbm] == set(chain_of(1))
        counters = (await one.channel.status()).counters
        assert counters["malformed_events"] == 8
        assert counters["rejected_events"] == 1


async def test_a_restarted_sidecar_learns_all_from_a_listing(tmp_path: Path) -> None:
    options = sidecar_options(tmp_path)
    async with a_broker() as (broker, bus), a_fold(bus) as fold:
        async with beside(options, broker.connect()) as one:
            one.hook.stored([1, 2, 3], None, tokens_of(1, 2, 3))
            first = await one.channel.flush()
        listing = [RawStored((n,), n - 1 or None, tokens_of(n)) for n in (1, 2, 3)]
        async with beside(options, broker.connect()) as one:
            one.hook.answer_listings(lambda: iter(listing))
            await until(lambda: fold.epoch > first.epoch)
            one.hook.pump()
            flushed = await one.channel.flush()
            await until(lambda: fold.seq >= flushed.seq)
            assert fold.held[Tier.hbm] == set(chain_of(1, 2, 3))
            assert fold.num_digests > 0


async def test_a_listing_that_fails_is_asked_for_again_but_not_for_ever(tmp_path: Path) -> None:
    num_asked = 0

    def broken() -> Iterator[RawStored]:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("dictionary changed size during iteration")

    async with (
        a_broker() as (broker, _),
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        one.hook.answer_listings(broken)
        for _ in range(20):
            one.hook.pump()
            await one.channel.flush()
        assert num_asked == 4


async def test_blocks_travel_between_two_sidecars(tmp_path: Path) -> None:
    fabric = MemoryFabric()
    async with (
        a_broker() as (broker, _),
        beside(sidecar_options(tmp_path, "a", transport="memory"), broker.connect(), fabric) as a,
        beside(sidecar_options(tmp_path, "b", transport="memory"), broker.connect(), fabric) as b,
    ):
        for one in (a, b):
            await until(lambda one=one: one.sidecar._exchange is not None)  # type: ignore[misc]
        blocks = chain_of(1, 2, 3)
        assert a.pool is not None
        assert b.pool is not None
        for slot, block in enumerate(blocks[:2]):
            a.pool.commit(slot, block, block * (BLOCK_BYTES // 16))
        b.pool.offer([7, 8, 9], b"".join(blocks))
        owners = [InstanceId("b", 0), InstanceId("nobody", 0), InstanceId("a", 0)]
        ended = await b.channel.pull(b"".join(blocks), [7, 8, 9], owners, 30.0)
        assert ended.held == (0, 1)
        assert [index for index, _ in ended.missing] == [2]
        assert ended.num_bytes == 2 * BLOCK_BYTES
        assert ended.transport == "memory"
        assert (await b.channel.status()).counters["pulled_blocks"] == 2
        assert b.pool.block(8) == blocks[1] * (BLOCK_BYTES // 16)
        assert (await b.channel.status()).transport == "memory"


@pytest.mark.parametrize("leaving", [InstanceId("a", 0), InstanceId("b", 0)])
async def test_a_pull_under_way_ends_before_the_owner_or_the_reader_that_leaves(
    tmp_path: Path, leaving: InstanceId
) -> None:
    fabric, options = MemoryFabric(), {"transport": "memory", "drain_seconds": WAIT_SECONDS}
    async with (
        a_broker() as (broker, bus),
        folded(bus, leaving) as folds,
        beside(sidecar_options(tmp_path, "a", **options), broker.connect(), fabric) as a,
        beside(sidecar_options(tmp_path, "b", **options), broker.connect(), fabric) as b,
    ):
        for one in (a, b):
            await until(lambda one=one: one.sidecar._exchange is not None)  # type: ignore[misc]
        exchange = a.sidecar._exchange
        assert exchange is not None
        assert a.pool is not None
        assert b.pool is not None
        [block] = chain_of(1)
        a.pool.commit(0, block, block * (BLOCK_BYTES // 16))
        b.pool.offer([7], block)
        agent = f"a/0@{exchange._epoch}"
        fabric.freeze(agent)
        owners = [InstanceId("a", 0)]
        pulling = asyncio.create_task(b.channel.pull(block, [7], owners, WAIT_SECONDS))
        await until(lambda: exchange.num_leases == 1)
        leaves = a if leaving.worker == "a" else b
        leaves.sidecar.stop("test")
        await until(lambda: folds[leaving].down == "test")
        keys = bus.keys(LEASES_BUCKET)

        async def is_given_back() -> bool:
            return await keys.get(lease_key(leaving)) is None

        await until_told(is_given_back)
        assert not leaves.running.done()
        fabric.thaw(agent)
        assert (await pulling).held == (0,)
        assert b.pool.block(7) == block * (BLOCK_BYTES // 16)
        assert await leaves.running == "test"


async def test_blocks_asked_for_in_vain_are_removed_from_the_index(tmp_path: Path) -> None:
    fabric = MemoryFabric()
    options = sidecar_options(tmp_path, transport="memory")
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(options, broker.connect(), fabric) as one,
    ):
        await until(lambda: one.sidecar._exchange is not None)
        one.hook.stored([1], None, tokens_of(1))
        await one.channel.flush()
        asked = LeaseRequest(
            fingerprint=bytes(16),
            hashes=b"".join(chain_of(1, 2)),
            ttl_ms=100,
            requester="r",
            transports=("memory",),
        )
        answer = await bus.request(lease_subject(W), encode_transfer(asked), 30.0)
        assert isinstance(decode_transfer_answer(answer), LeaseMissing)
        flushed = await one.channel.flush()
        await until(lambda: fold.seq >= flushed.seq)
        # block 1 is the engine's, if not the pool's
        removed = [event.hashes for event in fold.events if isinstance(event, BlockRemoved)]
        assert removed == [chain_of(1, 2)[1]]
        assert digest_of(fold.held[Tier.hbm]) == digest_of(chain_of(1))


class GatedExchange(BlockExchange):
    """An exchange whose transport is loaded when the gate opens."""

    gate: asyncio.Event

    async def __aenter__(self) -> Self:
        await self.gate.wait()
        return await super().__aenter__()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    GatedExchange.gate = asyncio.Event()
    monkeypatch.setattr(sidecar_service, "BlockExchange", GatedExchange)
    return GatedExchange.gate


async def test_a_pull_waits_while_the_transport_loads(tmp_path: Path, gate: asyncio.Event) -> None:
    fabric = MemoryFabric()
    async with (
        a_broker() as (broker, _),
        beside(sidecar_options(tmp_path, transport="memory"), broker.connect(), fabric) as one,
    ):
        asked = [
            asyncio.create_task(one.channel.pull(bytes(16), [0], [], seconds))
            for seconds in (0.05, 30.0)
        ]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().missing for task in done] == [((0, "not_ready"),)]
        assert len(waiting) == 1
        gate.set()
        [ended] = await asyncio.gather(*waiting)
        assert ended.missing == ((0, "no_owner"),)
        counters = (await one.channel.status()).counters
        assert (counters["missing_not_ready"], counters["missing_no_owner"]) == (1, 1)
        assert counters["pulled_blocks"] == 0


async def test_a_peer_is_told_to_come_again_while_the_transport_loads(
    tmp_path: Path, gate: asyncio.Event
) -> None:
    asked = encode_transfer(
        LeaseRequest(
            fingerprint=bytes(16),
            hashes=bytes(16),
            ttl_ms=100,
            requester="r",
            transports=("memory",),
        )
    )
    async with (
        a_broker() as (broker, bus),
        beside(
            sidecar_options(tmp_path, transport="memory"), broker.connect(), MemoryFabric()
        ) as one,
    ):

        async def ask() -> str:
            missing = decode_transfer_answer(
                await bus.request(lease_subject(W), asked, WAIT_SECONDS)
            )
            assert isinstance(missing, LeaseMissing)
            return missing.reason

        await one.channel.flush()  # it is on the bus
        assert await ask() == "not_ready"
        gate.set()
        await until(lambda: one.sidecar._exchange is not None)
        assert await ask() == "not_held"


async def test_without_a_transport_pulls_and_leases_say_so(tmp_path: Path) -> None:
    async with (
        a_broker() as (broker, bus),
        beside(sidecar_options(tmp_path), broker.connect()) as one,
    ):
        await until(lambda: one.sidecar._exchange is not None)
        ended = await one.channel.pull(bytes(32), [0, 1], [InstanceId("a", 0)], 0.5)
        assert ended.missing == ((0, "no_transport"), (1, "no_transport"))
        asked = LeaseRequest(
            fingerprint=bytes(16), hashes=bytes(16), ttl_ms=100, requester="r", transports=("x",)
        )
        answer = await bus.request(lease_subject(W), encode_transfer(asked), 30.0)
        missing = decode_transfer_answer(answer)
        assert isinstance(missing, LeaseMissing)
        assert missing.reason == "no_transport"


async def test_a_tenant_that_tells_too_much_is_muted_for_a_while_and_costs_no_other(
    tmp_path: Path,
) -> None:
    fabric = MemoryFabric()
    options = sidecar_options(
        tmp_path,
        transport="memory",
        namespace_burst_blocks=3.0,
        namespace_blocks_per_second=1.0,
        namespace_mute_seconds=60.0,
    )
    packed = BlockHasher(DESCRIPTOR.namespace("m", None, "tenant")).chain(tokens_of(*range(1, 7)))
    tenants = list(split_hashes(packed))
    async with (
        a_broker() as (broker, bus),
        a_fold(bus) as fold,
        beside(options, broker.connect(), fabric) as one,
    ):
        await until(lambda: one.sidecar._exchange is not None)
        assert one.pool is not None
        one.hook.stored([1, 2, 3, 4], None, tokens_of(1, 2, 3, 4), cache_salt="tenant")
        await one.channel.flush()
        one.hook.stored([5, 6], 4, tokens_of(5, 6))
        one.hook.stored([11, 12], None, tokens_of(1, 2))
        one.pool.commit(0, tenants[5], bytes(BLOCK_BYTES))
        asked = LeaseRequest(
            fingerprint=bytes(16),
            hashes=tenants[5],
            ttl_ms=100,
            requester="r",
            transports=("memory",),
        )
        # told or not: who asks for a block that is held gets it
        answer = await bus.request(lease_subject(W), encode_transfer(asked), 30.0)
        assert isinstance(decode_transfer_answer(answer), LeaseGranted)
        flushed = await one.channel.flush()
        await until(lambda: fold.seq >= flushed.seq)
        root = BlockHasher(DESCRIPTOR.namespace("m", None, "tenant")).root
        assert fold.muted == {root}
        assert fold.held[Tier.hbm] == {*tenants[:4], *chain_of(1, 2)}
        one.sidecar._reporter._budgets._muted[root] = 0.0  # its time is over
        await until(lambda: fold.held[Tier.hbm] == {*tenants, *chain_of(1, 2)})
        await until(lambda: fold.muted == set())
        mutes = [event.roots for event in fold.events if isinstance(event, NamespacesOverBudget)]
        assert (mutes[0], mutes[-1]) == (root, b"")
        stores = b"".join(event.hashes for event in fold.events if isinstance(event, BlockStored))
        assert stores.count(tenants[5]) == 0  # told by the inventory at the end only
        assert stores.count(chain_of(1)[0]) == 1
        counters = (await one.channel.status()).counters
        assert (counters["withheld_blocks"], counters["namespace_mutes"]) == (2, 1)
        assert counters["muted_namespaces"] == 0


async def test_batches_carry_the_minor_that_they_are_written_in(tmp_path: Path) -> None:
    options = sidecar_options(tmp_path, wire_version=100)
    async with a_broker() as (broker, bus), beside(options, broker.connect()) as one:
        one.hook.stored([1], None, tokens_of(1))
        await one.channel.flush()
        last = await bus.last_sequence(KV_EVENTS)
        batches = [decode(m.payload).batch async for m in bus.read_range(KV_EVENTS, 1, last)]
        assert {batch.v for batch in batches} == {100}
