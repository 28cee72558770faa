import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseMissing,
    LeaseRelease,
    LeaseReleased,
    LeaseRequest,
    TransferAnswer,
    TransferRequest,
    decode_source_announced,
    decode_transfer_answer,
    encode_transfer,
)
from kvatlas.worker_hooks.transfer import MemoryFabric, MemorySource
from kvatlas.worker_hooks.transfer.lease_server import LeaseServer
from kvatlas.worker_hooks.transfer.lease_table import LeaseLimits
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_block, a_chain, a_hash

SIZE, NUM_SLOTS = 256, 8
FINGERPRINT = bytes(range(16))


class Owner:
    """A server over a pool with blocks 0 to 5 in the slots of the same number."""

    def __init__(self, pool: ServePool) -> None:
        self.pool, self.now_ns = pool, 1000
        for number in range(6):
            pool.commit(number, a_hash(number), a_block(number, SIZE))
        self.source = MemorySource(MemoryFabric(), "w1/0:1", pool)
        self.not_held: list[bytes] = []
        self.server = LeaseServer(
            pool,
            [self.source],
            FINGERPRINT,
            epoch=1,
            limits=LeaseLimits(max_blocks=4, max_ttl_ms=100),
            on_not_held=self.not_held.append,
            clock_ns=lambda: self.now_ns,
        )

    def ask(self, message: TransferRequest) -> TransferAnswer:
        return decode_transfer_answer(self.server.answer(encode_transfer(message)))

    def lease(self, *numbers: int, known: int = 0, transport: str = "memory") -> TransferAnswer:
        return self.ask(
            LeaseRequest(
                fingerprint=FINGERPRINT,
                hashes=a_chain(*numbers),
                ttl_ms=1000,
                requester="w2/0",
                transports=("other", transport),
                known_metadata=known,
            )
        )

    def granted(self, *numbers: int) -> LeaseGranted:
        answer = self.lease(*numbers)
        assert isinstance(answer, LeaseGranted)
        return answer


@pytest.fixture
def owner() -> Iterator[Owner]:
    with (
        tempfile.TemporaryDirectory(dir=default_folder()) as folder,
        ServePool.create("w1", NUM_SLOTS, SIZE, folder=Path(folder)) as pool,
    ):
        yield Owner(pool)


def test_a_grant_says_where_the_blocks_are_and_what_they_must_be(owner: Owner) -> None:
    granted = owner.granted(3, 1)
    assert granted.rows == ((3 * SIZE, SIZE, 0), (SIZE, SIZE, 0))
    wanted = [owner.pool.checksum_of(3), owner.pool.checksum_of(1)]
    assert list(struct.unpack("<2Q", granted.checksums)) == wanted
    assert (granted.missing_from, granted.missing_reason, granted.epoch) == (2, "", 1)


def test_leased_blocks_stay_until_the_lease_ends(owner: Owner) -> None:
    granted = owner.granted(3)
    assert granted.expires_in_ms == 100
    end_ns = owner.now_ns + 100 * 1_000_000
    assert owner.pool.try_evict([3], now_ns=end_ns - 1) == []
    assert owner.pool.try_evict([3], now_ns=end_ns) == [3]


def test_a_released_block_can_go_at_once(owner: Owner) -> None:
    granted = owner.granted(3)
    released = owner.ask(LeaseRelease(lease_id=granted.lease_id))
    assert released == LeaseReleased(lease_id=granted.lease_id, was_held=True)
    assert owner.pool.try_evict([3], now_ns=owner.now_ns) == [3]
    again = owner.ask(LeaseRelease(lease_id=granted.lease_id))
    assert again == LeaseReleased(lease_id=granted.lease_id, was_held=False)


def test_the_grant_ends_at_the_first_block_that_is_not_held(owner: Owner) -> None:
    granted = owner.granted(0, 1, 9, 2)
    assert (granted.missing_from, granted.missing_reason) == (2, "not_held")
    assert owner.not_held == [a_chain(9, 2)]


def test_nothing_held_is_missing(owner: Owner) -> None:
    assert owner.lease(9) == LeaseMissing(reason="not_held")


def test_an_evicted_block_is_missing_and_one_that_came_back_is_not(owner: Owner) -> None:
    owner.granted(3)
    owner.now_ns += 10**9
    owner.pool.try_evict([3], now_ns=owner.now_ns)
    assert owner.lease(3) == LeaseMissing(reason="not_held")
    owner.pool.commit(7, a_hash(3), a_block(3, SIZE))
    assert owner.granted(3).rows == ((7 * SIZE, SIZE, 0),)


def test_of_two_copies_the_one_that_is_left_is_found(owner: Owner) -> None:
    owner.pool.commit(7, a_hash(3), a_block(3, SIZE))
    owner.granted(3)
    owner.now_ns += 10**9
    owner.pool.try_evict([3], now_ns=owner.now_ns)
    assert owner.granted(3).rows == ((7 * SIZE, SIZE, 0),)


def test_blocks_are_found_after_more_came_than_the_journal_keeps(owner: Owner) -> None:
    owner.granted(0)
    for _ in range(NUM_SLOTS + 1):
        owner.pool.commit(7, a_hash(9), a_block(9, SIZE))
        owner.pool.try_evict([7])
    owner.pool.commit(7, a_hash(8), a_block(8, SIZE))
    assert owner.granted(8, 0).missing_from == 2


def test_a_request_that_is_too_large_gets_its_beginning(owner: Owner) -> None:
    granted = owner.granted(0, 1, 2, 3, 4)
    assert (granted.missing_from, granted.missing_reason) == (4, "too_large")


def test_metadata_travels_only_to_those_who_lack_it(owner: Owner) -> None:
    first = owner.granted(0)
    assert first.metadata == owner.source.reference.metadata
    again = owner.lease(0, known=first.metadata_version)
    assert isinstance(again, LeaseGranted)
    assert (again.metadata, again.metadata_version) == (b"", first.metadata_version)


def test_without_a_common_transport_there_is_no_lease(owner: Owner) -> None:
    answer = owner.lease(0, transport="nixl")
    assert isinstance(answer, LeaseMissing)
    assert answer.reason == "no_transport"


def test_another_fingerprint_gets_nothing(owner: Owner) -> None:
    request = LeaseRequest(
        fingerprint=bytes(16),
        hashes=a_chain(0),
        ttl_ms=100,
        requester="w2/0",
        transports=("memory",),
    )
    answer = owner.ask(request)
    assert isinstance(answer, LeaseMissing)
    assert answer.reason == "incompatible"


@pytest.mark.parametrize("payload", [b"", b"\x93", b"junk", bytes(1000)])
async def test_what_cannot_be_read_is_answered_and_kills_nothing(
    owner: Owner, payload: bytes
) -> None:
    answer = decode_transfer_answer(await owner.server.handle(payload))
    assert isinstance(answer, LeaseMissing)
    assert answer.reason == "malformed"
    assert owner.granted(0).missing_from == 1


async def test_a_source_is_announced_under_a_key(owner: Owner) -> None:
    async with MemoryBroker().connect() as bus:
        keys = bus.keys("sources")
        await owner.server.announce(owner.source, keys, "w1.0")
        entry = await keys.get("w1.0")
    assert entry is not None
    announced = decode_source_announced(entry.value)
    reference = owner.source.reference
    assert (announced.agent, announced.metadata) == (reference.agent, reference.metadata)


def test_an_owner_that_leaves_grants_no_more_and_knows_what_is_still_read(owner: Owner) -> None:
    granted = owner.lease(0, 1)
    assert isinstance(granted, LeaseGranted)
    owner.lease(2)
    owner.server.is_closing = True
    refused = owner.lease(3)
    assert isinstance(refused, LeaseMissing)
    assert (refused.reason, refused.detail) == ("busy", "the owner leaves")
    assert owner.server.num_leases == 2
    owner.ask(LeaseRelease(lease_id=granted.lease_id))
    assert owner.server.num_leases == 1
    owner.now_ns += 100_000_000
    assert owner.server.num_leases == 0
