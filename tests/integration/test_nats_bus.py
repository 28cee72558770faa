"""What only NATS does: connecting, permissions, refusals, and buckets that others can read."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from kvatlas.events.bus import KeyChange, Message
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.nats.publishing.publisher import NatsPublisher
from kvatlas.schemas.errors import BusUnavailable, InvalidSetting, NoResponder, StreamRefused
from testkit.bus import Collected, a_stream
from testkit.ports import kept_port
from testkit.waiting import until

USERS = """
authorization { users: [
  { user: admin, password: right }
  { user: w1, password: right, permissions: {
      publish: { allow: ["test.w1", "$JS.API.STREAM.INFO.TEST"] }
      subscribe: { allow: ["_INBOX.>"] } } }
] }
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with embedded_server(tmp_path) as server:
        yield server


def as_user(url: str, user: str, password: str = "right") -> str:
    return url.replace("nats://", f"nats://{user}:{password}@")


async def test_connecting_waits_for_a_broker_that_comes_later(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, kept_port())
    await server.start()
    await server.stop()
    connecting = asyncio.create_task(NatsBus.connect(server.url))
    done, _ = await asyncio.wait((connecting,), timeout=0.1)
    assert not done
    await server.restart()
    async with await connecting as bus:
        assert bus.connected
    await server.stop()


async def test_what_becomes_of_the_connection_is_told_good_news_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = EmbeddedServer(tmp_path, kept_port())
    await server.start()
    await server.stop()
    connecting = asyncio.create_task(NatsBus.connect(server.url))
    away = ": look at --nats or nats.url; retrying"
    await until(lambda: any(line.endswith(away) for line in caplog.messages))
    await server.restart()
    async with await connecting:
        assert caplog.messages[-1] == f"connected to the broker at {server.url}"
        await server.kill()
        await server.restart()
        await until(lambda: f"connected again to the broker at {server.url}" in caplog.text)
    await server.stop()


async def test_a_name_that_is_unknown_is_told_with_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connecting = asyncio.create_task(NatsBus.connect("nats://no-such-host.invalid"))
    await until(lambda: "this name cannot be resolved" in caplog.text)
    assert "look at --nats or nats.url; retrying" in caplog.text
    connecting.cancel()
    await asyncio.wait((connecting,))


async def test_connecting_gives_up_when_told_to(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, kept_port())
    await server.start()
    await server.stop()
    before = asyncio.all_tasks()
    with pytest.raises(BusUnavailable, match=r"no broker at nats://127.* within 0.1 s"):
        await NatsBus.connect(server.url, wait_seconds=0.1)
    assert asyncio.all_tasks() == before


async def test_connecting_can_be_cancelled(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, kept_port())
    await server.start()
    await server.stop()
    before = asyncio.all_tasks()
    connecting = asyncio.create_task(NatsBus.connect(server.url))
    await asyncio.wait((connecting,), timeout=0.05)
    connecting.cancel()
    await asyncio.wait((connecting,))
    assert asyncio.all_tasks() == before


async def test_one_of_several_addresses_is_enough(server: EmbeddedServer, tmp_path: Path) -> None:
    other = EmbeddedServer(tmp_path / "other", kept_port())
    await other.start()
    await other.stop()
    async with await NatsBus.connect(f"{other.url},{server.url}") as bus:
        assert bus.connected


async def test_wrong_credentials_are_told_and_not_tried_for_ever(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with embedded_server(tmp_path, settings=USERS) as server:
        for url in (server.url, as_user(server.url, "admin", "wrong")):
            with pytest.raises(InvalidSetting, match="credentials"):
                await NatsBus.connect(url)
    assert asyncio.all_tasks() == before


async def test_a_password_in_an_address_is_in_no_error_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with embedded_server(tmp_path, settings=USERS) as server:
        async with NatsBus(as_user(server.url, "admin")):
            pass
        for user in ("admin", "nobody"):
            with pytest.raises(InvalidSetting) as wrong:
                await NatsBus.connect(as_user(server.url, user, "secret"))
            assert "secret" not in str(wrong.value)
    with pytest.raises(BusUnavailable) as away:
        await NatsBus.connect(as_user(server.url, "admin", "secret"), wait_seconds=0.05)
    assert "secret" not in str(away.value)
    assert not any(word in caplog.text for word in ("right@", ":right", "secret"))


@pytest.mark.parametrize("address", ["nats://host:port", "nats://none:1"])
async def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(InvalidSetting, match="servers"):
        await NatsBus.connect(address)


async def test_a_key_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no such file"):
        await NatsBus.connect("nats://127.0.0.1:1", creds_file=tmp_path / "none.creds")


@pytest.mark.parametrize("option", ["creds_file", "nkey_file"])
async def test_the_seed_of_an_nkey_lets_a_user_in_and_another_one_does_not(
    tmp_path: Path, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    nkeys: Any = pytest.importorskip("nkeys")
    public: list[str] = []
    for name in ("one", "other"):
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        (tmp_path / name).write_bytes(bytes(seed))
        public.append(nkeys.from_seed(bytearray(seed)).public_key.decode())
    allowed = f"authorization {{ users: [ {{ nkey: {public[0]} }} ] }}"

    def bus_with(file: Path) -> NatsBus:
        if option == "creds_file":
            return NatsBus(broker.url, creds_file=file)
        return NatsBus(broker.url, nkey_file=file)

    async with embedded_server(tmp_path / "nats", settings=allowed) as broker:
        async with bus_with(tmp_path / "one") as bus:
            await bus.declare_stream(a_stream())
            # the file says another user by the time of the next connect, then the first again
            (tmp_path / "kept").write_bytes((tmp_path / "one").read_bytes())
            (tmp_path / "one").write_bytes((tmp_path / "other").read_bytes())
            await broker.restart()
            await until(lambda: "look at nats.credentials" in str(bus.conditions.reasons))
            assert str(tmp_path / "one") in bus.conditions.reasons["broker_away"]
            (tmp_path / "one").write_text("")
            await until(lambda: "expected a credentials file" in str(bus.conditions.reasons))
            (tmp_path / "one").write_bytes((tmp_path / "kept").read_bytes())
            await until(lambda: bus.connected)
            assert bus.conditions.present == ()
        with pytest.raises(InvalidSetting, match=f"it refuses them of {tmp_path / 'other'}"):
            await bus_with(tmp_path / "other").open()
    assert caplog.text.count("look at nats.credentials") <= 3


async def test_a_denied_subject_is_refused_and_holds_up_no_other(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, settings=USERS) as server:
        async with NatsBus(as_user(server.url, "admin")) as admin:
            await admin.declare_stream(a_stream())
        async with NatsBus(as_user(server.url, "w1")) as bus:
            publisher = bus.publisher("TEST")
            await publisher.publish("test.w1", b"1")
            await publisher.publish("test.W2", b"not mine")
            await publisher.publish("test.w1", b"2")
            with pytest.raises(StreamRefused, match=r"test\.W2: permission denied"):
                await publisher.flush()
            await publisher.publish("test.w1", b"3")
            await publisher.flush()
            assert await bus.last_sequence("TEST") == 3


READER = """
authorization { users: [
  { user: admin, password: right }
  { user: reader, password: right, permissions: {
      publish: { allow: [
        "$JS.API.STREAM.INFO.TEST", "$JS.API.CONSUMER.CREATE.TEST.>", "$JS.FC.TEST.>"
        "$JS.API.CONSUMER.MSG.NEXT.TEST.>"
        "$KV.kv_test.>", "$JS.API.STREAM.MSG.GET.KV_kv_test"
        "$JS.API.STREAM.INFO.KV_kv_test", "$JS.API.CONSUMER.CREATE.KV_kv_test.>"
        "$JS.FC.KV_kv_test.>" ] }
      subscribe: { allow: ["_INBOX.>"] } } }
] }
"""


async def test_the_permissions_in_the_manual_are_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        embedded_server(tmp_path, settings=READER) as server,
        NatsBus(as_user(server.url, "admin")) as admin,
        NatsBus(as_user(server.url, "reader")) as bus,
    ):
        await admin.declare_stream(a_stream())
        await admin.keys("kv_test").put("there", b"1")
        publisher = admin.publisher("TEST")
        for number in range(5000):
            await publisher.publish("test.a", b"%d" % number)
        await publisher.flush()
        got = Collected[Message]()
        follower = await bus.follow("TEST", 1, got)
        await got.count(5000)
        assert len([message async for message in bus.read_range("TEST", 1, 9999)]) == 5000
        changes = Collected[KeyChange]()
        keys = bus.keys("kv_test")
        await keys.watch(changes)
        revision = await keys.create("a", b"1", ttl_seconds=60.0)
        await keys.update("a", b"2", revision)
        assert await keys.get("a") is not None
        await keys.delete("a")
        assert [change.key for change in await changes.count(4)] == ["there", "a", "a", "a"]
        assert follower.num_healed == 0
    assert "denies a permission" not in caplog.text


async def test_what_the_stream_refuses_is_told_once(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        small = StreamConfig(name="TEST", subjects=["test.>"], max_msg_size=100)
        await client.jsm().add_stream(small)
        publisher = bus.publisher("TEST")
        for size in (10, 1000, 10):
            await publisher.publish("test.a", bytes(size))
        with pytest.raises(StreamRefused, match="message size exceeds maximum"):
            await publisher.flush()
        await publisher.flush()
        assert await bus.last_sequence("TEST") == 2


async def test_a_refusal_is_told_to_the_next_of_its_subject(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        small = StreamConfig(name="TEST", subjects=["test.>"], max_msg_size=100)
        await client.jsm().add_stream(small)
        publisher = bus.publisher("TEST")
        await publisher.publish("test.a", bytes(1000))
        while publisher.num_unacked:
            await publisher.publish("test.b", b"")
            await bus.last_sequence("TEST")
        with pytest.raises(StreamRefused, match=r"test\.a"):
            await publisher.publish("test.a", b"")
        await publisher.publish("test.a", b"")
        await publisher.flush()


async def test_a_subject_outside_the_stream_is_refused(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        await publisher.publish("elsewhere.a", b"")
        await publisher.publish("test.a", b"")
        with pytest.raises(StreamRefused, match=r"elsewhere\.a: no subject of this stream"):
            await publisher.flush()
        assert await bus.last_sequence("TEST") == 1


async def test_a_stream_that_is_declared_late_gets_what_waited(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus:
        publisher = bus.publisher("TEST")
        for number in range(5):
            await publisher.publish("test.a", b"%d" % number)
        await bus.declare_stream(a_stream())
        await publisher.flush()
        got = [message.payload async for message in bus.read_range("TEST", 1, 99)]
        assert got == [b"0", b"1", b"2", b"3", b"4"]


async def test_streams_of_one_subject_are_refused(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream("ONE"))
        with pytest.raises(StreamRefused, match="overlap"):
            await bus.declare_stream(a_stream("TWO"))


async def test_a_stream_that_does_not_fit_the_storage_is_refused(tmp_path: Path) -> None:
    limits = 'jetstream { max_file: 1MB, store_dir: "%s" }' % (tmp_path / "streams")
    async with embedded_server(tmp_path, settings=limits) as server, NatsBus(server.url) as bus:
        with pytest.raises((StreamRefused, BusUnavailable), match="insufficient storage"):
            await bus.declare_stream(a_stream(max_bytes=1 << 30))


async def test_a_bucket_is_one_for_every_nats_client(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        keys = bus.keys("kv_test")
        await keys.put("lease.w1.0", b"1")
        bucket = await client.jetstream().key_value("kv_test")
        assert (await bucket.get("lease.w1.0")).value == b"1"
        changes = Collected[KeyChange]()
        await keys.watch(changes)
        await bucket.put("theirs", b"2")
        await bucket.delete("lease.w1.0")
        await changes.count(3)
        assert [(c.key, c.reason) for c in changes.items] == [
            ("lease.w1.0", "put"),
            ("theirs", "put"),
            ("lease.w1.0", "deleted"),
        ]


async def test_a_follower_of_a_stream_made_anew_is_told_and_goes_on(
    server: EmbeddedServer,
) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        got, holes = Collected[Message](), Collected[tuple[int, int]]()
        for number in range(3):
            await publisher.publish("test.a", b"%d" % number)
        follower = await bus.follow("TEST", 1, got, lambda *hole: holes(hole))
        await got.count(3)
        await client.jsm().delete_stream("TEST")
        await bus.declare_stream(a_stream())
        for number in range(3, 10):
            await publisher.publish("test.a", b"%d" % number)
        messages = await got.count(10)
        assert [int(message.payload) for message in messages] == list(range(10))
        assert holes.items == [(4, 1)]
        assert follower.num_healed == 1


async def test_a_follower_beyond_the_stream_is_told_that_it_went_back(
    server: EmbeddedServer,
) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        for number in range(3):
            await publisher.publish("test.a", b"%d" % number)
        await publisher.flush()
        got, holes = Collected[Message](), Collected[tuple[int, int]]()
        await bus.follow("TEST", 100, got, lambda *hole: holes(hole))
        await got.count(3)
        assert holes.items == [(100, 1)]


async def test_following_from_the_next_message_is_no_hole(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        await publisher.publish("test.a", b"1")
        await publisher.flush()
        got, holes = Collected[Message](), Collected[tuple[int, int]]()
        await bus.follow("TEST", 2, got, lambda *hole: holes(hole))
        await publisher.publish("test.a", b"2")
        await got.count(1)
        assert holes.items == []


async def test_a_callback_that_raises_is_logged_and_stops_nothing(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    got = Collected[Message]()

    def fussy(message: Message) -> None:
        got(message)
        if message.payload == b"1":
            raise ValueError("no ones")

    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        await bus.follow("TEST", 1, fussy)
        publisher = bus.publisher("TEST")
        for number in range(3):
            await publisher.publish("test.a", b"%d" % number)
        assert [message.payload for message in await got.count(3)] == [b"0", b"1", b"2"]
    assert "a callback of the bus failed" in caplog.text


async def test_a_subject_that_the_broker_would_cut_the_connection_for_is_refused(
    server: EmbeddedServer,
) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        with pytest.raises(StreamRefused, match="a subject of 5005 bytes"):
            await publisher.publish("test." + "x" * 5_000, b"")
        with pytest.raises(NoResponder):
            await bus.request("kv.lease." + "x" * 5_000, b"", 1.0)
        await publisher.publish("test.a", b"")
        await publisher.flush()
        assert await bus.last_sequence("TEST") == 1


async def test_a_range_goes_on_when_its_consumer_is_gone(server: EmbeddedServer) -> None:
    """As when its reader took longer for a batch than the broker keeps a consumer."""
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        for number in range(1, 2501):
            await publisher.publish("test.a", b"%d" % number)
        await publisher.flush()
        got: list[int] = []
        async for message in bus.read_range("TEST", 1, 2500):
            got.append(int(message.payload))
            if len(got) in (1, 1500):
                for consumer in await client.jsm().consumers_info("TEST"):
                    await client.jsm().delete_consumer("TEST", consumer.name)
        assert got == list(range(1, 2501))


# --- batches of the broker's fast ingest, ADR-0007 -----------------------------------------------


async def connected(bus: NatsBus, subject: str = "test.a") -> NatsPublisher:
    """Return a publisher that sends at once; its first message, the number 1, is stored."""
    publisher = bus.publisher("TEST")
    await publisher.publish(subject, b"1")
    await publisher.flush()
    return publisher


async def in_one_go(bus: NatsBus, count: int) -> NatsPublisher:
    """Publish 1..count as fast as it goes; return the publisher, which has everything stored."""
    publisher = await connected(bus)
    for number in range(2, count + 1):
        await publisher.publish("test.a", b"%d" % number)
    await publisher.flush()
    return publisher


async def numbers(bus: NatsBus) -> list[int]:
    return [int(message.payload) async for message in bus.read_range("TEST", 1, 99_999)]


async def test_a_busy_publisher_goes_through_batches(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = await in_one_go(bus, 5000)
        assert publisher.num_batches > 0
        assert publisher.num_failed_batches == publisher.num_resent == publisher.num_unacked == 0
        assert await numbers(bus) == list(range(1, 5001))


async def test_a_batch_is_stored_soon_though_nobody_flushes(server: EmbeddedServer) -> None:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = await connected(bus)
        for number in range(2, 501):
            await publisher.publish("test.a", b"%d" % number)
        await until(lambda: publisher.num_unacked == 0)
        assert publisher.num_batches > 0
        assert await numbers(bus) == list(range(1, 501))


async def test_publishers_beside_each_other_share_a_batch(server: EmbeddedServer) -> None:
    async def publish(publisher: NatsPublisher, subject: str) -> None:
        for number in range(1000):
            await publisher.publish(subject, b"%d" % number)
            if number % 100 == 0:
                await publisher.flush()

    async with NatsBus(server.url, busy_messages=8) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        subjects = [f"test.w{worker}" for worker in range(5)]
        await asyncio.gather(*(publish(publisher, subject) for subject in subjects))
        await publisher.flush()
        assert publisher.num_batches > 0
        assert publisher.num_failed_batches == publisher.num_resent == 0
        for subject in subjects:
            got = [m.payload async for m in bus.read_range("TEST", 1, 9999) if m.subject == subject]
            assert got == [b"%d" % number for number in range(1000)]


async def test_a_stream_that_takes_no_batches_gets_everything_once(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        await client.jsm().add_stream(StreamConfig(name="TEST", subjects=["test.>"]))
        publisher = await in_one_go(bus, 3000)
        assert (publisher.num_batches, publisher.num_failed_batches) == (1, 1)
        assert await numbers(bus) == list(range(1, 3001))
    assert "TEST: batch publish is disabled; publishing without batches" in caplog.text


async def test_more_batches_than_the_broker_takes_leave_the_single_way(
    server: EmbeddedServer,
) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        await bus.declare_stream(a_stream())
        for other in range(1000):
            await client.publish("test.x", b"0", f"{client.new_inbox()}.{other}.10.fail.1.0.$FI")
        await client.flush()
        publisher = await in_one_go(bus, 3000)
        assert (publisher.num_batches, publisher.num_failed_batches) == (1, 1)
        assert [n for n in await numbers(bus) if n] == list(range(1, 3001))


async def test_what_the_stream_refuses_in_a_batch_is_told_and_the_rest_is_stored(
    server: EmbeddedServer,
) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        small = StreamConfig(name="TEST", subjects=["test.>"], max_msg_size=100, allow_batched=True)
        await client.jsm().add_stream(small)
        publisher = await connected(bus)
        for number in range(2, 2001):
            subject = "test.a" if number != 1500 else "test.b"
            await publisher.publish(subject, (b"%d" % number).rjust(1 if number != 1500 else 1000))
        with pytest.raises(StreamRefused, match=r"test\.b: message size exceeds maximum"):
            await publisher.flush()
        await publisher.flush()
        assert publisher.num_failed_batches == 1
        got = list(dict.fromkeys(await numbers(bus)))
        assert got == [*range(1, 1500), *range(1501, 2001)]


async def test_a_denied_subject_in_a_batch_holds_up_no_other(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, settings=USERS) as server:
        async with NatsBus(as_user(server.url, "admin")) as admin:
            await admin.declare_stream(a_stream())
        async with NatsBus(as_user(server.url, "w1")) as bus:
            publisher = await connected(bus, "test.w1")
            for number in range(2, 2001):
                await publisher.publish("test.w1" if number != 700 else "test.W2", b"%d" % number)
            with pytest.raises(StreamRefused, match=r"test\.W2: permission denied"):
                await publisher.flush()
            assert publisher.num_batches > 0
        async with NatsBus(as_user(server.url, "admin")) as admin:
            got = list(dict.fromkeys(await numbers(admin)))
            assert got == [number for number in range(1, 2001) if number != 700]


async def test_messages_that_grow_in_a_batch_do_not_stop_it(server: EmbeddedServer) -> None:
    async with NatsBus(server.url, max_unacked_bytes=100_000) as bus:
        await bus.declare_stream(a_stream())
        publisher = await connected(bus)
        for number in range(2, 1001):
            await publisher.publish("test.a", (b"%d" % number).rjust(10 if number < 500 else 9000))
        await publisher.flush()
        assert publisher.num_batches > 0
        assert publisher.num_failed_batches == publisher.num_resent == 0
        assert await numbers(bus) == list(range(1, 1001))


# --- buckets and streams that are not as the settings say ----------------------------------------


async def test_a_bucket_with_other_replicas_is_told_once_with_what_to_change(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with NatsBus(server.url) as owner, NatsBus(server.url, replicas=3) as bus:
        await owner.keys("kv_test").put("a", b"1")
        await owner.objects("OBJECTS").put("a", [b"1"])
        for _ in range(3):
            assert await bus.keys("kv_test").get("a") is not None
            assert len(await bus.objects("OBJECTS").entries()) == 1
        expected = [
            f"stream {name}: num_replicas is 1, expected 3; change it "
            f"(nats stream edit {name} --replicas 3) or log.replicas"
            for name in ("KV_kv_test", "OBJ_OBJECTS")
        ]
        await until(lambda: all(one in bus.conditions.reasons["limits_differ"] for one in expected))
        assert owner.conditions.present == ()
    assert caplog.text.count("limits_differ") <= 2


async def test_a_stream_with_other_limits_is_told_until_they_are_as_expected(
    server: EmbeddedServer,
) -> None:
    async with NatsBus(server.url) as bus, await nats.connect(server.url) as client:
        await bus.declare_stream(a_stream(max_bytes=1 << 20))
        await bus.declare_stream(a_stream(max_bytes=2 << 20))
        expected = "nats stream edit TEST --max-bytes 2097152"
        assert expected in bus.conditions.reasons["limits_differ"]
        info = await client.jsm().stream_info("TEST")
        await client.jsm().update_stream(info.config.evolve(max_bytes=2 << 20))
        await bus.declare_stream(a_stream(max_bytes=2 << 20))
        assert bus.conditions.present == ()


WRITER = """
authorization { users: [
  { user: admin, password: right }
  { user: writer, password: right, permissions: {
      publish: { allow: ["$KV.kv_test.>", "$JS.API.STREAM.MSG.GET.KV_kv_test"] }
      subscribe: { allow: ["_INBOX.>"] } } }
] }
"""


async def test_a_user_who_may_not_look_at_a_bucket_uses_it_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        embedded_server(tmp_path, settings=WRITER) as server,
        NatsBus(as_user(server.url, "admin")) as admin,
        NatsBus(as_user(server.url, "writer")) as bus,
    ):
        await admin.keys("kv_test").put("a", b"1")
        assert await bus.keys("kv_test").put("a", b"2")
        await until(lambda: "a permission that we can do without" in caplog.text)
        assert bus.conditions.present == ()
