"""What every bucket of keys promises: compare-and-set, time to live, a watch that misses no end."""

import asyncio
import time
from collections.abc import Callable

import pytest

from kvatlas.events.bus import Bus, KeyChange
from kvatlas.schemas.errors import InvalidSubject, KeyExists, RevisionConflict
from testkit.bus import Collected

Connect = Callable[[], Bus]


def story(changes: list[KeyChange]) -> list[tuple[str, str, bytes | None]]:
    return [(change.key, change.reason, change.value) for change in changes]


async def test_a_fresh_bucket_has_no_keys(bus: Bus) -> None:
    assert await bus.keys("kv_test").get("a") is None


async def test_what_is_put_is_got(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    revision = await keys.put("a.b", b"1")
    entry = await keys.get("a.b")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("a.b", b"1", revision)
    assert await keys.put("a.b", b"") > revision
    entry = await keys.get("a.b")
    assert entry is not None
    assert entry.value == b""


async def test_an_entry_says_when_it_was_written_by_the_brokers_clock(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    await keys.put("a", b"1")
    first = await keys.get("a")
    await keys.put("a", b"2")
    second = await keys.get("a")
    assert first is not None
    assert second is not None
    assert abs(first.written_ms - time.time_ns() // 1_000_000) < 60_000
    assert second.written_ms >= first.written_ms


async def test_connections_see_each_others_keys(connect: Connect) -> None:
    async with connect() as one, connect() as other:
        await one.keys("kv_test").put("a", b"1")
        entry = await other.keys("kv_test").get("a")
        assert entry is not None
        assert entry.value == b"1"


async def test_create_refuses_what_exists(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    await keys.create("a", b"1")
    with pytest.raises(KeyExists):
        await keys.create("a", b"2")
    entry = await keys.get("a")
    assert entry is not None
    assert entry.value == b"1"


async def test_update_wants_the_present_revision(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    first = await keys.create("a", b"1")
    second = await keys.update("a", b"2", first)
    assert second > first
    with pytest.raises(RevisionConflict):
        await keys.update("a", b"3", first)
    await keys.put("b", b"other keys do not matter")
    await keys.update("a", b"3", second)


async def test_one_of_many_at_a_time_wins(connect: Connect) -> None:
    async with connect() as bus:
        keys = bus.keys("kv_test")
        revision = await keys.create("a", b"0")
        tries = [keys.update("a", b"%d" % n, revision) for n in range(8)]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, RevisionConflict) for outcome in outcomes) == 7


async def test_a_deleted_key_is_gone_and_can_be_created_again(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    await keys.delete("never.was")
    first = await keys.create("a", b"1")
    with pytest.raises(RevisionConflict):
        await keys.delete("a", first + 100)
    await keys.delete("a", first)
    assert await keys.get("a") is None
    second = await keys.create("a", b"2")
    assert second > first
    with pytest.raises(KeyExists):
        await keys.create("a", b"3")


@pytest.mark.parametrize("key", ["", ".", "a.", "a b", "a.*", ">", "a\n"])
async def test_a_key_that_is_no_key_is_invalid(bus: Bus, key: str) -> None:
    with pytest.raises(InvalidSubject):
        await bus.keys("kv_test").put(key, b"")
    with pytest.raises(InvalidSubject):
        await bus.keys("kv_test").get(key)


async def test_a_watch_reports_the_present_then_each_change(connect: Connect) -> None:
    async with connect() as bus, connect() as other:
        keys = bus.keys("kv_test")
        await keys.put("a", b"1")
        await keys.put("b", b"1")
        await keys.put("a", b"2")
        changes = Collected[KeyChange]()
        await other.keys("kv_test").watch(changes)
        assert story(changes.items) == [("b", "put", b"1"), ("a", "put", b"2")]
        await keys.delete("b")
        await keys.put("c", b"3")
        assert story(await changes.count(4))[2:] == [("b", "deleted", None), ("c", "put", b"3")]
        revisions = [change.revision for change in changes.items]
        assert revisions == sorted(set(revisions))


async def test_a_watch_of_an_empty_bucket_returns(bus: Bus) -> None:
    changes = Collected[KeyChange]()
    keys = bus.keys("kv_test")
    await keys.watch(changes)
    assert changes.items == []
    await keys.put("a", b"1")
    assert story(await changes.count(1)) == [("a", "put", b"1")]


async def test_a_closed_watch_reports_nothing(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    closed, other = Collected[KeyChange](), Collected[KeyChange]()
    watch = await keys.watch(closed)
    await keys.watch(other)
    await watch.close()
    await watch.close()
    await keys.put("a", b"1")
    await other.count(1)
    assert closed.items == []


async def test_a_key_ends_with_its_time_to_live_and_watches_are_told(connect: Connect) -> None:
    async with connect() as bus, connect() as other:
        keys = bus.keys("kv_test")
        changes = Collected[KeyChange]()
        await other.keys("kv_test").watch(changes)
        await keys.create("kept", b"1")
        revision = await keys.create("renewed", b"1", ttl_seconds=1.0)
        await keys.update("renewed", b"2", revision, ttl_seconds=60.0)
        await keys.create("short", b"1", ttl_seconds=1.0)
        await changes.until(lambda items: any(item.reason == "expired" for item in items))
        assert story(changes.items)[-1] == ("short", "expired", None)
        assert await keys.get("short") is None
        assert await keys.get("renewed") is not None
        ended = changes.items[-1].revision
        assert await keys.create("short", b"again", ttl_seconds=60.0) > ended


async def test_a_late_watch_is_told_of_a_recent_expiry(bus: Bus) -> None:
    keys = bus.keys("kv_test")
    early, late = Collected[KeyChange](), Collected[KeyChange]()
    await keys.watch(early)
    await keys.create("short", b"1", ttl_seconds=1.0)
    await early.until(lambda items: items[-1:] != [] and items[-1].reason == "expired")
    await keys.watch(late)
    assert story(late.items) == [("short", "expired", None)]
