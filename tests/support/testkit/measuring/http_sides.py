"""The services that the HTTP benchmark asks: kvatlas and its peer, with a fleet each."""

import base64
import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import msgspec
import xxhash

from testkit.measuring.http_client import connected, post
from testkit.measuring.http_fleet import (
    BATCH_EVENTS,
    BLOCK_TOKENS,
    HASHER,
    LOAD_BLOCKS,
    LOAD_EVENTS_PER_SECOND,
    MODEL,
    NUM_HOLDERS,
    NUM_WORKERS,
    speak_for_fleet,
)
from testkit.measuring.peer import Peer

#: of XXH3-64, as Dynamo names the tokens of a block
DYNAMO_SEED = 1337
JSON = "content-type: application/json"
MSGPACK = "content-type: application/x-msgpack"
OCTETS = "content-type: application/octet-stream"

_json: Callable[[Any], bytes] = msgspec.json.encode


class Side(Protocol):
    """A service that is told of a fleet, and the forms in which it can be asked."""

    port: int

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        """Let the workers from first to last hold a prompt."""
        ...

    def requests(self, tokens: list[int]) -> dict[str, bytes]:
        """Return a prepared request in each form; `json`, `packed` and `by_hash` are among them."""
        ...

    def matches(self, answer: bytes) -> dict[int, int]:
        """Return the matched tokens of each worker that has any."""
        ...

    def loaded(self) -> contextlib.AbstractContextManager[list[float]]:
        """Let events be applied meanwhile; leaves events told per second in the list."""
        ...


class Kvatlas:
    """`kvatlas serve` and a process that speaks for 16 workers."""

    def __init__(self, nats_url: str, port: int) -> None:
        self.port = port
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=speak_for_fleet, args=(nats_url, theirs), daemon=True)
        self._process.start()
        self._call("up")

    def close(self) -> None:
        """End the fleet's process."""
        self._pipe.send(None)
        self._process.join(10)

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        self._call("hold", array("I", tokens).tobytes(), first, last)

    def requests(self, tokens: list[int]) -> dict[str, bytes]:
        packed = array("I", tokens).tobytes()
        chain = HASHER.chain(packed)
        hashes = [chain[at : at + 16].hex() for at in range(0, len(chain), 16)]
        hashed = {"model": MODEL, "num_tokens": len(tokens)}
        bodies: dict[str, tuple[Any, str]] = {
            "json": ({"model": MODEL, "token_ids": tokens}, JSON),
            "base64": ({"model": MODEL, "token_ids_b64": base64.b64encode(packed).decode()}, JSON),
            "msgpack": ({"model": MODEL, "tokens": packed}, MSGPACK),
            "by_hash": (hashed | {"block_hashes": hashes}, JSON),
            "by_hash_msgpack": (hashed | {"block_hashes": chain}, MSGPACK),
        }
        coded = {
            form: post(
                "/v1/score",
                (_json if kind == JSON else msgspec.msgpack.encode)(body),
                kind,
            )
            for form, (body, kind) in bodies.items()
        }
        # full blocks only: their number gives the number of tokens
        path = f"/v1/score?model={MODEL}"
        return coded | {
            "by_hash_octets": post(f"{path}&prompt=block_hashes", chain, OCTETS),
            "packed": post(path, packed, OCTETS),
        }

    def matches(self, answer: bytes) -> dict[int, int]:
        candidates = json.loads(answer)["candidates"]
        return {int(c["worker"][1:]): c["match_tokens"] for c in candidates if c["match_tokens"]}

    @contextlib.contextmanager
    def loaded(self) -> Generator[list[float], None, None]:
        before, started = self._num_events(), time.perf_counter()
        told: list[float] = []
        self._call("load_on")
        yield told
        self._call("load_off")
        told.append((self._num_events() - before) / (time.perf_counter() - started))

    def _num_events(self) -> int:
        request = b"GET /v1/index/stats HTTP/1.1\r\nhost: bench\r\n\r\n"
        with connected(self.port) as connection:
            stats = json.loads(connection.ask(request))
        return int(stats["index"]["events"])

    def _call(self, *call: object) -> None:
        self._pipe.send(call)
        answer = self._pipe.recv()
        if answer != "done":
            raise RuntimeError(answer)


class Dynamo:
    """The peer and its engines, in a process of their own."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        peer.ask("start", port=self.port, workers=NUM_WORKERS, block_tokens=BLOCK_TOKENS)

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        self._peer.ask("hold", tokens=tokens, first=first, last=last)

    def requests(self, tokens: list[int]) -> dict[str, bytes]:
        packed, step = array("I", tokens).tobytes(), 4 * BLOCK_TOKENS
        hashes = [
            xxhash.xxh3_64_intdigest(packed[at : at + step], DYNAMO_SEED)
            for at in range(0, len(packed), step)
        ]
        signed = [each - (1 << 64) if each >> 63 else each for each in hashes]
        by_hash = _json({"model_name": MODEL, "block_hashes": signed})
        by_tokens = post("/query", _json({"model_name": MODEL, "token_ids": tokens}), JSON)
        # the peer reads nothing but JSON: packed tokens and hashes are sent as those
        return {
            "json": by_tokens,
            "packed": by_tokens,
            "by_hash": post("/query_by_hash", by_hash, JSON),
            "by_hash_octets": post("/query_by_hash", by_hash, JSON),
        }

    def matches(self, answer: bytes) -> dict[int, int]:
        scores = json.loads(answer)["scores"]
        return {int(worker): ranks["0"] for worker, ranks in scores.items() if ranks["0"]}

    @contextlib.contextmanager
    def loaded(self) -> Generator[list[float], None, None]:
        told: list[float] = []
        self._peer.ask(
            "load_on",
            events_per_second=LOAD_EVENTS_PER_SECOND,
            events=BATCH_EVENTS,
            blocks=LOAD_BLOCKS,
            first=NUM_HOLDERS,
        )
        yield told
        found = self._peer.ask("load_off")
        told.append(found["events"] / found["seconds"])


@contextlib.contextmanager
def kvatlas_side(program: Sequence[str] = ("-m", "kvatlas")) -> Generator[Kvatlas, None, None]:
    """Run `kvatlas serve`, or a program that runs it, and its fleet."""
    command = [sys.executable, "-P", *program, "serve", "--port", "0", "--json"]
    command += ["--parent-pid", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            announced = json.loads(process.stdout.readline())
            side = Kvatlas(announced["nats"], int(announced["router"].rpartition(":")[2]))
            yield side
            side.close()
        finally:
            process.terminate()


@contextlib.contextmanager
def dynamo_side() -> Generator[Dynamo, None, None]:
    """Run the peer."""
    with Peer("dynamo_indexer_http.py") as peer:
        yield Dynamo(peer)
