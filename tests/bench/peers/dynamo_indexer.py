"""The peer of ingest.py: engines that tell `python -m dynamo.indexer` over ZMQ what they store."""

import json
import os
import random
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-not-found]
import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from serving import serve  # type: ignore[import-not-found]

MODEL, TOPIC, BLOCK_TOKENS = "m", b"kv-events", 16
#: events of a worker that follow each other in one prompt
CHAIN_EVENTS = 8
VOCABULARY = 150_000
#: between two looks at what is visible
PAUSE_SECONDS = 0.005
WAIT_SECONDS = 120.0
#: prompts looked up once all is said to be visible
NUM_CHECKED = 50

Prompt = list[int]


class Engines:
    """The indexer's process and one ZMQ publisher a worker; nothing is kept for a late listener."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.sequences: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        #: of the next `publish`: (worker, frames), and each prompt with its worker
        self.messages: list[tuple[int, list[bytes]]] = []
        self.prompts: list[tuple[int, Prompt]] = []

    def start(self, port: int, workers: int, threads: int) -> str:
        """Start everything; return the peer's version when it hears every worker."""
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
        self.process = subprocess.Popen([*command, "--threads", str(threads)], stdout=sys.stderr)
        self._until(self._is_healthy)
        for worker in range(workers):
            self._add(worker)
        hello = self._tokens(1)
        events = {worker: self._stored(hello, 1, None) for worker in range(workers)}
        self._until(lambda: self._all_hear(events, hello))
        return version("ai-dynamo-runtime")

    def prepare(self, events: int, blocks: int) -> float:
        """Encode what `publish` sends, one event a message; return bytes per block on the wire."""
        self.messages, self.prompts = [], []
        num_workers = len(self.sockets)
        for first in range(0, events // CHAIN_EVENTS, num_workers):
            group = range(min(num_workers, events // CHAIN_EVENTS - first))
            prompts = [self._tokens(CHAIN_EVENTS * blocks) for _ in group]
            self.prompts += zip(group, prompts, strict=True)
            parents: list[int | None] = [None] * len(group)
            for place in range(CHAIN_EVENTS):
                for worker in group:
                    step = BLOCK_TOKENS * blocks
                    tokens = prompts[worker][place * step : (place + 1) * step]
                    event = self._stored(tokens, blocks, parents[worker])
                    parents[worker] = event["block_hashes"][-1]
                    self.messages.append((worker, self._frames(worker, event)))
        wire = sum(len(frame) for _, frames in self.messages for frame in frames)
        return wire / (len(self.messages) * blocks)

    def publish(self) -> float:
        """Send all; return the seconds until the last prompt of every worker is visible."""
        last = dict(self.prompts)
        started = time.perf_counter()
        for worker, frames in self.messages:
            self.sockets[worker].send_multipart(frames)
        for worker, prompt in last.items():
            while self._depth(worker, prompt) < len(prompt) // BLOCK_TOKENS:
                if time.perf_counter() - started > WAIT_SECONDS:
                    raise TimeoutError(f"worker {worker} holds {self._depth(worker, prompt)}")
                time.sleep(PAUSE_SECONDS)
        return time.perf_counter() - started

    def cpu_seconds(self) -> float:
        """Return what the indexer and this process have used."""
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def are_all_visible(self) -> bool:
        """Say whether prompts from here and there are held as published."""
        sample = random.sample(self.prompts, min(NUM_CHECKED, len(self.prompts)))
        return all(self._depth(w, prompt) == len(prompt) // BLOCK_TOKENS for w, prompt in sample)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.context.destroy(0)

    def _add(self, worker: int) -> None:
        socket = self.context.socket(zmq.PUB)
        socket.sndhwm = 0
        at = socket.bind_to_random_port("tcp://127.0.0.1")
        self._post(
            "/register",
            instance_id=worker,
            endpoint=f"tcp://127.0.0.1:{at}",
            model_name=MODEL,
            block_size=BLOCK_TOKENS,
        )
        self.sockets.append(socket)
        self.sequences.append(0)

    def _is_healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _all_hear(self, events: dict[int, dict[str, Any]], tokens: Prompt) -> bool:
        """A subscription has no signal: say something until it is known of everybody."""
        for worker, event in events.items():
            self.sockets[worker].send_multipart(self._frames(worker, event))
        return all(self._depth(worker, tokens) == 1 for worker in events)

    def _until(self, is_so: Any) -> None:
        for _ in range(400):
            if is_so():
                return
            time.sleep(0.05)
        raise TimeoutError("the indexer is not ready")

    def _tokens(self, blocks: int) -> Prompt:
        tokens: Prompt = np.random.randint(0, VOCABULARY, blocks * BLOCK_TOKENS).tolist()
        return tokens

    def _stored(self, tokens: Prompt, blocks: int, parent: int | None) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [random.getrandbits(63) for _ in range(blocks)],
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": BLOCK_TOKENS,
        }

    def _frames(self, worker: int, event: dict[str, Any]) -> list[bytes]:
        sequence = struct.pack(">Q", self.sequences[worker])
        self.sequences[worker] += 1
        return [TOPIC, sequence, msgpack.packb([time.time(), [event], None])]

    def _depth(self, worker: int, tokens: Prompt) -> int:
        scores = self._post("/query", model_name=MODEL, token_ids=tokens)["scores"]
        return int(scores.get(str(worker), {}).get("0", 0)) // BLOCK_TOKENS

    def _post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")


if __name__ == "__main__":
    engines = Engines()
    try:
        serve(
            {
                "start": engines.start,
                "prepare": engines.prepare,
                "publish": engines.publish,
                "cpu_seconds": engines.cpu_seconds,
                "are_all_visible": engines.are_all_visible,
            }
        )
    finally:
        engines.close()
