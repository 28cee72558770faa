"""`python -m dynamo.indexer` and the engines that tell it what they hold, one ZMQ socket each."""

import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from array import array
from typing import Any

import msgpack  # type: ignore[import-not-found]
import zmq
from serving import serve  # type: ignore[import-not-found]

MODEL, TOPIC = "m", b"kv-events"
EVENT_BLOCKS = 64
#: a batch every so often while events are being told
TICK_SECONDS = 0.01


class Indexer:
    """The peer's process; one thread of its index is its fastest on two cores."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.sequences: list[int] = []
        self.block_tokens = 0
        self.load: Load | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, port: int, workers: int, block_tokens: int) -> str:
        """Start it and register the workers; returns when it has heard of each."""
        self.block_tokens = block_tokens
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        # else it writes a line per batch that came before it listened
        quiet = {**os.environ, "DYN_LOG": "error"}
        self.process = subprocess.Popen(command, stdout=sys.stderr, env=quiet)
        self.until_healthy()
        for worker in range(workers):
            socket = self.context.socket(zmq.PUB)
            socket.sndhwm = 0
            at = socket.bind_to_random_port("tcp://127.0.0.1")
            self.post(
                "/register",
                instance_id=worker,
                endpoint=f"tcp://127.0.0.1:{at}",
                model_name=MODEL,
                block_size=block_tokens,
            )
            self.sockets.append(socket)
            self.sequences.append(0)
        self.until_subscribed(list(range(block_tokens)))
        return MODEL

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        """Let the workers from first to last store a prompt.

        Their engines name it alike: of a block that is known by another name the indexer finds no
        child.
        """
        step, parent = EVENT_BLOCKS * self.block_tokens, None
        for begin in range(0, len(tokens), step):
            event = self.stored(tokens[begin : begin + step], parent)
            parent = event["block_hashes"][-1]
            for worker in range(first, last + 1):
                self.tell(worker, [event])

    def load_on(self, events_per_second: int, events: int, blocks: int, first: int) -> None:
        """Tell batches of stores and removals by the workers from `first` on, until `load_off`."""
        self.load = Load(self, events_per_second, events, blocks, first)
        self.load.start()

    def load_off(self) -> dict[str, float]:
        """Return how many events were told, and in how many seconds."""
        assert self.load
        return self.load.end()

    def stored(self, tokens: list[int], parent: int | None) -> dict[str, Any]:
        """Return an engine's event of fresh blocks."""
        hashes = [random.getrandbits(63) for _ in range(len(tokens) // self.block_tokens)]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self.block_tokens,
        }

    def tell(self, worker: int, events: list[dict[str, Any]]) -> None:
        """Publish one batch of a worker."""
        sequence = struct.pack(">Q", self.sequences[worker])
        batch = msgpack.packb([time.time(), events, None])
        self.sequences[worker] += 1
        self.sockets[worker].send_multipart([TOPIC, sequence, batch])

    def until_healthy(self) -> None:
        """Return when its HTTP API answers."""
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise TimeoutError("the indexer did not start")

    def until_subscribed(self, tokens: list[int]) -> None:
        """Store a block again and again until every worker is known to hold it."""
        event = self.stored(tokens, None)
        for _ in range(200):
            for worker in range(len(self.sockets)):
                self.tell(worker, [event])
            time.sleep(0.05)
            scores = self.post("/query", model_name=MODEL, token_ids=tokens)["scores"]
            if len(scores) == len(self.sockets):
                return
        raise TimeoutError("the indexer does not listen to all workers")

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to one question."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def close(self) -> None:
        """End the process."""
        if self.load is not None:
            self.load.end()
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.context.destroy(0)


class Load(threading.Thread):
    """Stores of fresh blocks, removed again a batch later: the index stays as large as it is."""

    def __init__(
        self, indexer: Indexer, events_per_second: int, events: int, blocks: int, first: int
    ) -> None:
        super().__init__()
        self.indexer, self.first, self.blocks = indexer, first, blocks
        self.events, self.batch_seconds = events, events / events_per_second
        self.ended = threading.Event()
        self.num_batches = 0
        self.seconds = 0.0

    def run(self) -> None:
        """Tell batches at their times until ended."""
        started = time.perf_counter()
        held: dict[int, list[int]] = {}
        num_workers = len(self.indexer.sockets) - self.first
        while not self.ended.is_set():
            due = int((time.perf_counter() - started) / self.batch_seconds)
            for number in range(self.num_batches, due):
                self.tell(self.first + number % num_workers, held)
            self.num_batches = max(due, self.num_batches)
            self.ended.wait(TICK_SECONDS)
        self.seconds = time.perf_counter() - started

    def tell(self, worker: int, held: dict[int, list[int]]) -> None:
        """Tell one batch: as many removals as stores, except in a worker's first."""
        num_tokens = self.blocks * self.indexer.block_tokens
        stores = [
            self.indexer.stored(array("I", random.randbytes(4 * num_tokens)).tolist(), None)
            for _ in range(self.events // 2)
        ]
        old = held.get(worker, [])
        removals = [
            {"type": "BlockRemoved", "block_hashes": old[at : at + self.blocks]}
            for at in range(0, len(old), self.blocks)
        ]
        held[worker] = [each for store in stores for each in store["block_hashes"]]
        self.indexer.tell(worker, stores + removals)

    def end(self) -> dict[str, float]:
        """Stop; return what was told."""
        self.ended.set()
        self.join()
        return {"events": self.num_batches * self.events, "seconds": self.seconds}


if __name__ == "__main__":
    indexer = Indexer()
    try:
        serve(
            {
                "start": indexer.start,
                "hold": indexer.hold,
                "load_on": indexer.load_on,
                "load_off": indexer.load_off,
            }
        )
    finally:
        indexer.close()
