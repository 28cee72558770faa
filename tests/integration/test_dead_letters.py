"""Garbage in a real log: one letter each, whatever reads it, and a command to look at them."""

import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from kvatlas.events.bus import Message
from kvatlas.events.codec import MAX_BATCH_BYTES, encode
from kvatlas.events.dead_letters import (
    MAX_KEPT_BYTES,
    DeadLetter,
    address_of,
    encode_letter,
    read_letters,
)
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.streams import (
    KV_DEAD_LETTERS,
    KV_EVENTS,
    dead_letters_stream,
    events_stream,
)
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.dead_letters import (
    DeadLetterSettings,
    DeadLetterWriter,
    UnreadableMessage,
)
from kvatlas.indexer.service.index_service import IndexService
from testkit.builders import a_batch, hashes, stored, up
from testkit.commands import run_command, running, started
from testkit.ports import kept_port
from testkit.waiting import until, until_told

SUBJECT = "kv.events.model.w1.0"
#: so that a batch can be larger than readers take
LARGE = "max_payload: 16MB"


def with_a_bad_event(seq: int) -> bytes:
    """Return a batch that stores block 2, with an event before it that is none."""
    fields = msgspec.msgpack.decode(encode(a_batch(seq=seq)))
    return msgspec.msgpack.encode([*fields[:6], [["stored", 5], stored(2)]])


GARBAGE: list[tuple[str, str, bytes]] = [
    ("payload", SUBJECT, b"\xc1 \x1b[2J no batch"),
    ("payload", "kv.control.w1.0", b""),
    ("too_large", SUBJECT, bytes(MAX_BATCH_BYTES + 1)),
    ("version", SUBJECT, msgspec.msgpack.encode([900, "w1"])),
    ("spoofed", SUBJECT, encode(a_batch(worker="w2"))),
    ("subject", "kv.events.nonsense", encode(a_batch())),
    ("event", SUBJECT, with_a_bad_event(seq=2)),
]


KINDS = Counter(kind for kind, _, _ in GARBAGE).items()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with embedded_server(tmp_path / "nats", kept_port(), LARGE) as server:
        yield server


@pytest.fixture
async def bus(server: EmbeddedServer) -> AsyncIterator[NatsBus]:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream(max_bytes=128 << 20))
        await bus.declare_stream(dead_letters_stream())
        yield bus


def a_service(bus: NatsBus, name: str, settings: DeadLetterSettings | None = None) -> IndexService:
    settings = settings or DeadLetterSettings()
    return IndexService(bus, IndexState(ReferenceIndex()), name=name, dead_letters=settings)


def letters_by(service: IndexService) -> DeadLetterWriter:
    assert service.letters is not None
    return service.letters


async def put(bus: NatsBus, subject: str, *payloads: bytes) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for payload in payloads:
        await publisher.publish(subject, payload)
    await publisher.flush()


async def put_garbage_in_between(bus: NatsBus) -> int:
    """Publish a good batch, the garbage, a good batch; return the last message's sequence."""
    await put(bus, SUBJECT, encode(a_batch(up(), stored(1))))
    for _, subject, payload in GARBAGE:
        await put(bus, subject, payload)
    await put(bus, SUBJECT, encode(a_batch(stored(3), seq=3)))
    return len(GARBAGE) + 2


async def all_letters(bus: NatsBus) -> list[DeadLetter]:
    return sorted([one async for one in read_letters(bus)], key=lambda one: one.stream_sequence)


async def until_stored(bus: NatsBus, num_letters: int) -> None:
    """Return once so many letters came, those in place of equal ones included."""

    async def are_stored() -> bool:
        return await bus.last_sequence(KV_DEAD_LETTERS) >= num_letters

    await until_told(are_stored)


async def test_replicas_leave_one_letter_a_message_and_a_restart_none(
    bus: NatsBus, server: EmbeddedServer
) -> None:
    async with NatsBus(server.url) as other, a_service(bus, "one") as one:
        async with a_service(other, "two") as two:
            last = await put_garbage_in_between(bus)
            for service in (one, two):
                await until(lambda s=service: s.state.stream_sequence == last)  # type: ignore[misc]
                matches = service.index.match(hashes(1, 2, 3))
                assert [match.num_blocks for match in matches] == [3], "what is good is folded in"
                written = letters_by(service).num_written
                await until(lambda w=written: w.total() == len(GARBAGE))  # type: ignore[misc]
        letters = await all_letters(bus)
        assert [(one.stream_sequence, one.kind) for one in letters] == [
            (at, kind) for at, (kind, _, _) in enumerate(GARBAGE, 2)
        ]
        for letter, (_, subject, payload) in zip(letters, GARBAGE, strict=True):
            assert (letter.subject, letter.num_bytes) == (subject, len(payload))
            assert letter.payload == payload[:MAX_KEPT_BYTES]
            assert letter.by in ("one", "two")
        written_so_far = await bus.last_sequence(KV_DEAD_LETTERS)
        async with a_service(other, "two") as again:
            await again.wait_ready()
            assert letters_by(again).num_waiting == 0, "all of it has a letter"
            await put(bus, SUBJECT, b"news")
            await until(lambda: letters_by(again).num_written.total() == 1)
        await until(lambda: letters_by(one).num_written["payload"] == 3)
        assert await bus.last_sequence(KV_DEAD_LETTERS) == written_so_far + 2
        assert len(await all_letters(bus)) == len(GARBAGE) + 1


async def test_a_flood_costs_a_bounded_number_of_letters_and_hides_nobody(bus: NatsBus) -> None:
    settings = DeadLetterSettings(letters_per_second=0.001, burst=100, share=0.5)
    async with a_service(bus, "one", settings) as service:
        await put(bus, SUBJECT, encode(a_batch(up(), stored(1))), *[b"\xc1"] * 5_000)
        await put(bus, "kv.events.model.w2.0", b"\xc1")
        await put(bus, SUBJECT, encode(a_batch(stored(2), seq=2)))
        await until(lambda: service.state.stream_sequence == 5_003)
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [2]
        letters = letters_by(service)
        await until(lambda: letters.num_waiting == 0)
        assert (letters.num_written.total(), letters.num_dropped) == (51, 4_950)
        assert [one.worker for one in await all_letters(bus)] == ["w1"] * 50 + ["w2"]


async def test_letters_wait_for_a_broker_that_comes_back(
    bus: NatsBus, server: EmbeddedServer
) -> None:
    async with a_service(bus, "one") as service:
        letters = letters_by(service)
        await put(bus, SUBJECT, b"\xc1")
        await until(lambda: letters.num_written.total() == 1)
        await server.kill()
        await until(lambda: not bus.connected)
        letters.put(
            Message(2, SUBJECT, b"", 0), UnreadableMessage("w1", "payload", "came before the kill")
        )
        await server.start()
        await until(lambda: letters.num_written.total() == 2)
        assert [one.stream_sequence for one in await all_letters(bus)] == [1, 2]
        assert letters.num_dropped == 0


USERS = """
authorization { users: [
  { user: admin, password: right }
  { user: index, password: right, permissions: {
      publish: { allow: ["$JS.API.>", "$JS.FC.>", "$KV.>"] }
      subscribe: { allow: ["_INBOX.>"] } } }
] }
"""


async def test_who_may_not_write_letters_reads_on(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, settings=USERS) as server:
        url = server.url.replace("nats://", "nats://{}:right@")
        async with NatsBus(url.format("admin")) as admin, NatsBus(url.format("index")) as bus:
            await admin.declare_stream(events_stream(max_bytes=64 << 20))
            await admin.declare_stream(dead_letters_stream())
            async with a_service(bus, "one") as service:
                await put(admin, SUBJECT, b"\xc1", b"\xc1", encode(a_batch(up(), stored(1))))
                await until(lambda: letters_by(service).num_dropped == 2)
                assert [match.num_blocks for match in service.index.match(hashes(1))] == [1]
                assert service.failure is None
            assert await all_letters(admin) == []


NO_STREAM = """
authorization { users: [
  { user: index, password: right, permissions: {
      publish: { deny: ["$JS.API.STREAM.CREATE.KV_DEAD_LETTERS"] } } }
] }
"""


async def test_an_indexer_starts_though_the_stream_cannot_be_made(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, settings=NO_STREAM) as server:
        url = server.url.replace("nats://", "nats://index:right@")
        async with running("indexer", "--nats", url, "--port", "0", "--json") as indexer:
            async with NatsBus(url) as bus:
                await put(bus, SUBJECT, b"\xc1", encode(a_batch(up(), stored(1))))
            address = f"{indexer['indexer']}/metrics"

            async def is_folded() -> bool:
                return "kv_index_blocks 1.0" in await text_of(address)

            await until_told(is_folded)
            assert 'kv_dead_letters_total{kind="payload"} 0.0' in await text_of(address)


async def test_an_indexer_writes_them_and_a_command_shows_them(
    bus: NatsBus, server: EmbeddedServer, tmp_path: Path
) -> None:
    nats = ("--nats", server.url)
    empty = await run_command("dead-letters", *nats)
    assert (empty.status, empty.out) == (0, "no dead letters\n")
    async with running("indexer", *nats, "--port", "0", "--json") as indexer:
        await put_garbage_in_between(bus)
        await until_stored(bus, len(GARBAGE))
        shown = [f'kv_dead_letters_total{{kind="{kind}"}} {count}.0' for kind, count in KINDS]
        shown.append("kv_dead_letters_dropped_total 0.0")

        async def are_counted() -> bool:
            metrics = await text_of(f"{indexer['indexer']}/metrics")
            return all(line in metrics for line in shown)

        await until_told(are_counted)  # once their being stored is confirmed
    listed = await run_command("dead-letters", *nats, "--json")
    rows = [json.loads(line) for line in listed.out.splitlines()]
    assert [row["kind"] for row in rows] == [kind for kind, _, _ in GARBAGE]
    of_w1 = await run_command("dead-letters", *nats, "--json", "--worker", "w1")
    found = [json.loads(line) for line in of_w1.out.splitlines()]
    assert found == [row for row in rows if row["worker"] == "w1"]
    (by,) = {row["by"] for row in rows}
    assert by.startswith(f"{socket.gethostname()}:"), "a name that no other replica has"
    table = (await run_command("dead-letters", *nats, "--limit", "2")).out.splitlines()
    assert table[0].split() == ["sequence", "time", "(UTC)", "worker", "kind", "bytes", "reason"]
    assert [line.split()[0] for line in table if line.split()[0].isdigit()] == ["7", "8"]
    await a_message_can_be_taken_out(nats, tmp_path)


async def a_message_can_be_taken_out(nats: tuple[str, str], folder: Path) -> None:
    for at in (2, 4, 8):
        out = folder / f"message-{at}"
        taken = await run_command("dead-letters", *nats, "--payload", str(at), "--out", str(out))
        payload = GARBAGE[at - 2][2]
        assert (taken.status, taken.out) == (0, f"{len(payload)} bytes in {out}\n")
        assert out.read_bytes() == payload, "all of it while the log has it"
    decoded = (await run_command("decode", str(out))).out
    assert "rejected (malformed_event): payload 1, event 0 (stored): Expected `array`" in decoded
    assert "w1/0 epoch 1: hbm 1" in decoded
    over = await run_command("dead-letters", *nats, "--payload", "5", "--out", str(out))
    assert over.status == 1
    assert "a file with other content, which is left as it is: name a file that is" in over.err
    assert out.read_bytes() == payload
    out = folder / "message-5"
    await run_command("dead-letters", *nats, "--payload", "5", "--out", str(out))
    decoded = (await run_command("decode", str(out))).out
    assert "rejected (malformed_batch): payload 1: wire version 900" in decoded
    none = await run_command("dead-letters", *nats, "--payload", "1", "--out", str(out))
    assert (none.status, none.err) == (1, "kvatlas: no dead letter about message 1 of the log\n")
    half = await run_command("dead-letters", *nats, "--payload", "1")
    assert (half.status, "--payload and --out belong together" in half.err) == (1, True)


async def test_whoever_follows_is_shown_each_message_once(
    bus: NatsBus, server: EmbeddedServer
) -> None:
    follow = ("dead-letters", "--nats", server.url, "--follow", "--json", "--worker", "w1")
    async with a_service(bus, "one"):
        await put(bus, SUBJECT, b"\xc1")
        async with started(*follow) as process:
            assert process.stdout is not None
            for at in (1, 3, 5):
                line = json.loads(await process.stdout.readline())
                assert (line["stream_sequence"], line["worker"]) == (at, "w1")
                again = bus.publisher(KV_DEAD_LETTERS)
                for letter in await all_letters(bus):  # as a slower replica writes them
                    await again.publish(address_of(letter), encode_letter(letter))
                await again.flush()
                await put(bus, "kv.events.model.w2.0", b"\xc1")
                await put(bus, SUBJECT, b"\xc1")


async def text_of(url: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return await answer.text()


async def test_what_garbage_says_is_no_command_to_a_terminal(
    bus: NatsBus, server: EmbeddedServer
) -> None:
    async with a_service(bus, "one") as service:
        await put(bus, SUBJECT, encode(a_batch(worker="\x1b[2J[bold]evil\n")))
        await until(lambda: letters_by(service).num_written.total() == 1)
    shown = (await run_command("dead-letters", "--nats", server.url)).out
    assert "\x1b" not in shown
    assert "[bold]evil" in shown.replace("\n", "").replace(" ", "")


async def test_a_subject_that_is_no_text_stops_no_reader(
    server: EmbeddedServer, bus: NatsBus
) -> None:
    """Brokers carry any bytes; a reader that ended there would meet them again on each connect."""
    async with a_service(bus, "one") as one:
        put_raw(server, b"kv.events.model.\xff\xfe.0", b"\xc1")
        put_raw(server, b"kv.events.model." + b"w" * 2000 + b".0", b"\xc1")
        await put(bus, SUBJECT, encode(a_batch(up(), stored(1))))
        await until(lambda: one.state.stream_sequence == 3)
        await until_stored(bus, 2)
    assert [letter.kind for letter in await all_letters(bus)] == ["subject", "payload"]
    assert [m.stream_sequence async for m in bus.read_range(KV_EVENTS, 1, 3)] == [1, 2, 3]


def put_raw(server: EmbeddedServer, subject: bytes, payload: bytes) -> None:
    """Publish as no client of ours could, and return when the broker has it."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as client:
        talk = client.makefile("rwb")
        assert talk.readline().startswith(b"INFO ")
        head = b"PUB %b %d" % (subject, len(payload))
        talk.write(b"\r\n".join((b'CONNECT {"verbose":false}', head, payload, b"PING", b"")))
        talk.flush()
        while (line := talk.readline()) != b"PONG\r\n":
            assert line == b"PING\r\n"


async def test_a_worker_that_is_no_text_is_refused_by_name(server: EmbeddedServer) -> None:
    result = await run_command("dead-letters", "--nats", server.url, "--worker", "\udcff")
    assert result.status == 1
    assert "Traceback" not in result.err
