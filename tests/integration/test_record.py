"""`kvatlas record` beside a real publisher, and `kvatlas decode` of what it wrote."""

import asyncio
import json
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.events.subjects import events_subject
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import AllBlocksCleared
from kvatlas.worker_hooks.recordings.captures import Frame, read_capture
from kvatlas.worker_hooks.recordings.recording import Listener, RecordOptions, record
from testkit.builders import a_batch
from testkit.commands import run_command
from testkit.waiting import until

END = (-1).to_bytes(8, "big", signed=True)


def batch(block: int, token: int) -> bytes:
    event = ["BlockStored", [block], None, [token, token], 2, None, "GPU"]
    return msgspec.msgpack.encode([1.0, [event], 0])


def test_replayed_and_live_batches_are_recorded_once(tmp_path: Path) -> None:
    """Batches 0 and 1 are in the replay, 1 comes live as well, 2 comes live only."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as live:
        replay = context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, replay)]

        def serve() -> None:
            with replay:
                live.recv()  # the subscription
                peer, _, first = replay.recv_multipart()
                assert first == bytes(8)
                for sequence in (0, 1):
                    number = sequence.to_bytes(8, "big")
                    parts = [peer, b"", b"kv@w@m", number, batch(sequence, 90)]
                    replay.send_multipart(parts)
                replay.send_multipart([peer, b"", b"", END, b""])
                for sequence in (1, 2):
                    number = sequence.to_bytes(8, "big")
                    live.send_multipart([b"kv@w@m", number, batch(sequence, 90)])

        server = threading.Thread(target=serve)
        server.start()
        options = RecordOptions(
            f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", max_batches=3, seconds=60
        )
        frames = list(record(options))
        server.join()
    assert frames == [Frame(batch(n, 90), "kv@w@m", n) for n in range(3)]


async def test_a_redacted_recording_decodes_and_has_no_tokens(tmp_path: Path) -> None:
    file = tmp_path / "engine.kvcap"
    with zmq.Context() as context, context.socket(zmq.XPUB) as live:
        port = live.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            live.recv()
            for sequence in range(2):
                live.send_multipart([b"", sequence.to_bytes(8, "big"), batch(sequence, 70_007)])

        server = threading.Thread(target=serve)
        server.start()
        arguments = ["record", "--endpoint", f"tcp://127.0.0.1:{port}", "--redact"]
        ended = await run_command(*arguments, "--batches", "2", "--seconds", "60", str(file))
        assert ended.status == 0, ended.err
        await asyncio.to_thread(server.join)
    assert all(b"\xce\x00\x01\x11\x77" not in frame.payload for frame in read_capture(file).frames)
    printed = await run_command("decode", "--engine", "vllm", "--json", str(file))
    report = json.loads(printed.out.splitlines()[-1])
    assert report["workers"]["engine"]["0"]["0"]["hbm"]["blocks"] == 2
    assert report["counts"]["rejected"] == {}


async def test_the_stream_is_recorded_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "stream.jsonl"
    async with embedded_server(tmp_path / "nats") as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream())
        publisher = bus.publisher(KV_EVENTS)
        for worker in ("w1", "w2"):
            payload = encode(a_batch(AllBlocksCleared(), worker=worker))
            await publisher.publish(events_subject("m", InstanceId(worker, 0)), payload)
        await publisher.flush()
        ended = await run_command(
            "record", "--nats", server.url, "--worker", "w2", "--batches", "1", str(file)
        )
        assert ended.status == 0, ended.err
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["worker"], row["events"]) == ("w2", [["cleared", None]])
    printed = await run_command("decode", str(file))
    assert printed.status == 0, printed.err
    assert "w2/0 epoch 1 #1.0: cleared every tier" in printed.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_recording_with_its_summary(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "engine.kvcap"
    with zmq.Context() as context, context.socket(zmq.XPUB) as live:
        port = live.bind_to_random_port("tcp://127.0.0.1")
        arguments = ["record", "--endpoint", f"tcp://127.0.0.1:{port}", str(file)]
        command = [sys.executable, "-P", "-m", "kvatlas", *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        await asyncio.to_thread(live.recv)
        live.send_multipart([b"", bytes(8), batch(1, 2)])
        await until(lambda: file.stat().st_size > 0)
        process.send_signal(number)
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().endswith(f"1 batches in {file}\n")


async def test_a_signal_ends_a_recording_of_the_log_with_its_summary(tmp_path: Path) -> None:
    file = tmp_path / "stream.jsonl"
    command = ["record", "--nats", "nats://127.0.0.1:1", str(file)]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-P", "-m", "kvatlas", *command],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    await process.stderr.readline()  # that there is no broker
    process.send_signal(signal.SIGTERM)
    out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, f"0 batches in {file}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
async def test_a_full_disk_ends_a_recording_with_one_line(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as live:
        port = live.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            live.recv()
            live.send_multipart([b"", bytes(8), batch(1, 2)])

        server = threading.Thread(target=serve)
        server.start()
        arguments = ["--endpoint", f"tcp://127.0.0.1:{port}", "--seconds", "60", "/dev/full"]
        ended = await run_command("record", *arguments)
        await asyncio.to_thread(server.join)
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert "/dev/full" in line
    assert "No space left" in line


def test_an_endpoint_that_says_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.recordings.recording.QUIET_SECONDS", 0.2)
    monkeypatch.setattr("kvatlas.worker_hooks.recordings.recording._SILENT_SECONDS", 0.2)
    told: list[str] = []
    further_looks = iter(range(4))  # in which nothing is told again

    def is_stopped() -> bool:
        return len(told) >= 2 and next(further_looks, None) is None

    options = RecordOptions("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", seconds=60.0)
    assert list(record(options, Listener(on_silent=told.append, is_stopped=is_stopped))) == []
    replay, live = told
    assert "tcp://127.0.0.1:2" in replay
    assert "--replay-endpoint" in replay
    assert "tcp://127.0.0.1:1" in live
    assert "--endpoint" in live
