"""An engine as a bridge sees it: vLLM's ZMQ sockets, its events, and the blocks behind them.

    PUB     [topic, sequence, payload]              on `endpoint`
    ROUTER  ["", (topic,) sequence, payload] ...    on `replay_endpoint`, from a bounded buffer

Sequences begin at 0 in each incarnation. A test says which batches never reach the bridge, as when
a publisher's high-water mark is hit, and when the engine begins anew.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

import msgspec
import xxhash
import zmq
import zmq.asyncio

from kvatlas.worker_hooks.bridge.zmq_source import END
from testkit.engine_words import BLOCK_TOKENS, chain_of, tokens_of
from testkit.ports import kept_ports

#: the blocks of a prompt from its beginning on, by name
Prefix = tuple[int, ...]
Event = dict[str, Any]


class Blocks:
    """What the engine holds, copy for copy, and the events that tell of it."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.copies: Counter[Prefix] = Counter()

    def hash_of(self, prefix: Prefix) -> int:
        return xxhash.xxh3_64_intdigest(repr(prefix).encode(), self.seed)

    def store(self, *prompt: int, first: int = 0) -> Event:
        """Hold the blocks of a prompt from number `first` on."""
        prefixes = [prompt[: end + 1] for end in range(first, len(prompt))]
        self.copies.update(prefixes)
        return self.told(*prompt, first=first)

    def told(self, *prompt: int, first: int = 0) -> Event:
        """The event alone, as when an engine tells of what it holds already."""
        tokens = tokens_of(*prompt[first:])
        return {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(prompt[: end + 1]) for end in range(first, len(prompt))],
            "parent_block_hash": self.hash_of(prompt[:first]) if first else None,
            "token_ids": list(memoryview(tokens).cast("I")),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def remove(self, *prompt: int) -> Event:
        """Give up one copy of a prompt's last block."""
        self.copies[prompt] -= 1
        self.copies += Counter()
        return {"type": "BlockRemoved", "block_hashes": [self.hash_of(prompt)], "medium": "GPU"}

    def clear(self) -> Event:
        """Hold nothing."""
        self.copies.clear()
        return {"type": "AllBlocksCleared"}

    def hashes(self) -> set[bytes]:
        """Return our names of what is held."""
        return {chain_of(*prefix)[-1] for prefix in self.copies}


class ZmqEngine:
    """Publishes batches, and replays them, inside `async with`."""

    def __init__(
        self,
        *,
        port: int = 0,
        buffer_steps: int = 10_000,
        has_topic: bool = True,
        rank: int = 0,
        binds: bool = True,
        max_unsent: int = 1000,
    ) -> None:
        self.port = port or kept_ports(2)
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.port + 1}"
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._has_topic, self._rank, self._binds = has_topic, rank, binds
        #: of a replay, before its socket drops what follows
        self._max_unsent = max_unsent
        self.blocks = Blocks()
        self.next_sequence = 0
        self.num_replays = 0
        #: cleared while nobody answers replays
        self.answers = asyncio.Event()
        self.answers.set()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    async def publish(self, *events: Event, comes_through: bool = True) -> int:
        """Send a batch, or only number it and keep it; return its sequence."""
        sequence = self.next_sequence
        self.next_sequence += 1
        payload = msgspec.msgpack.encode([time.time(), events, self._rank])
        if comes_through:
            await self._pub.send_multipart([b"kv", sequence.to_bytes(8, "big"), payload])
        self._buffer.append((sequence, payload))
        return sequence

    async def publish_all(self, batches: Iterable[Sequence[Event]]) -> None:
        """Send many batches, giving way now and then."""
        for number, events in enumerate(batches):
            await self.publish(*events)
            if number % 256 == 0:
                await asyncio.sleep(0)

    async def heard(self) -> None:
        """Return when somebody listens who did not before."""
        while not (await self._pub.recv()).startswith(b"\x01"):
            pass

    async def restart(self, seed: int = 0) -> None:
        """Die without a word and come back empty."""
        await self._close()
        self._buffer.clear()
        self.blocks = Blocks(seed)
        self.next_sequence = 0
        await self._open()

    async def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that tells who listens
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.SNDHWM, self._max_unsent)
        if self._binds:
            self._pub.bind(self.endpoint)
        else:
            self._pub.connect(self.endpoint)
        self._router.bind(self.replay_endpoint)
        self._replaying = asyncio.create_task(self._replay())

    async def _close(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _replay(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            await self.answers.wait()
            self.num_replays += 1
            topic = [b"kv"] if self._has_topic else []
            for sequence, payload in list(self._buffer):
                if sequence >= int.from_bytes(start, "big"):
                    number = sequence.to_bytes(8, "big")
                    await self._router.send_multipart([client, b"", *topic, number, payload])
            end = [b""] if self._has_topic else []
            await self._router.send_multipart([client, b"", *end, END, b""])
