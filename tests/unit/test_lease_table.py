import pytest

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.transfer import LeaseRequest
from kvatlas.worker_hooks.transfer.lease_table import LeaseLimits, LeaseTable
from testkit.blocks import a_chain

FINGERPRINT = bytes(range(16))
MS = 1_000_000


def a_table(
    max_leases: int = 8, max_bytes: int = 1 << 20, max_blocks: int = 8, max_ttl_ms: int = 1000
) -> LeaseTable:
    limits = LeaseLimits(max_leases, max_bytes, max_blocks, max_ttl_ms)
    return LeaseTable(FINGERPRINT, 5, 1024, limits, first_lease_id=100)


def a_request(
    num_blocks: int = 2, fingerprint: bytes = FINGERPRINT, epoch: int = 0, ttl_ms: int = 100
) -> LeaseRequest:
    return LeaseRequest(
        fingerprint=fingerprint,
        hashes=a_chain(*range(num_blocks)),
        ttl_ms=ttl_ms,
        requester="w2/0",
        transports=("nixl",),
        epoch=epoch,
    )


def reason(table: LeaseTable, request: LeaseRequest) -> str:
    refusal = table.refusal(request)
    return refusal.reason if refusal else ""


def test_ids_rise_from_the_first() -> None:
    table = a_table()
    assert [table.grant("w2/0", (slot,), 10).lease_id for slot in (0, 1)] == [100, 101]


def test_another_fingerprint_is_incompatible() -> None:
    assert reason(a_table(), a_request(fingerprint=bytes(16))) == "incompatible"
    assert reason(a_table(), a_request()) == ""


def test_another_epoch_is_the_wrong_one_and_none_is_any() -> None:
    assert reason(a_table(), a_request(epoch=4)) == "wrong_epoch"
    assert reason(a_table(), a_request(epoch=5)) == reason(a_table(), a_request(epoch=0)) == ""


def test_too_many_leases_are_busy() -> None:
    table = a_table(max_leases=1)
    table.grant("w2/0", (0,), 10)
    assert reason(table, a_request()) == "busy"
    table.expire(10)
    assert reason(table, a_request()) == ""


def test_too_many_bytes_are_busy() -> None:
    table = a_table(max_bytes=3000)
    assert table.admit(a_request(4)) == (2, "busy")
    table.grant("w2/0", (0, 0), 10)
    assert table.leased_bytes == 2048
    assert reason(table, a_request()) == "busy"


def test_a_large_request_gets_as_much_as_a_lease_may_have() -> None:
    assert a_table(max_blocks=3).admit(a_request(4)) == (3, "too_large")
    assert a_table(max_blocks=4).admit(a_request(4)) == (4, "")


def test_a_lease_is_no_longer_than_the_limit() -> None:
    table = a_table(max_ttl_ms=50)
    assert table.expiry_ns(20, now_ns=7) == 7 + 20 * MS
    assert table.expiry_ns(90, now_ns=7) == 7 + 50 * MS


def test_releasing_one_of_two_leases_keeps_the_slot_until_the_other_ends() -> None:
    table = a_table()
    first = table.grant("w2/0", (0, 1), 30)
    table.grant("w3/0", (1, 2), 20)
    assert table.release(first.lease_id) == {0: 0, 1: 20}
    table.validate()


def test_a_second_release_and_a_foreign_one_find_nothing() -> None:
    table = a_table()
    lease = table.grant("w2/0", (0,), 30)
    assert table.release(lease.lease_id) == {0: 0}
    assert table.release(lease.lease_id) is None
    assert table.release(1) is None


def test_leases_expire_in_the_order_of_their_ends() -> None:
    table = a_table()
    late, early, released = (table.grant("w2/0", (0,), at) for at in (30, 10, 20))
    table.release(released.lease_id)
    assert table.expire(9) == []
    assert table.expire(30) == [early, late]
    assert len(table) == table.leased_bytes == 0
    table.validate()


@pytest.mark.parametrize("key", ["max_leases", "max_bytes", "max_blocks", "max_ttl_ms"])
def test_bounds_below_one_are_refused(key: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        LeaseLimits(**{key: 0}).validate()
    assert caught.value.key == key
