"""A worker and a reader of the release that knew wire 100 only, for tests of rolling upgrades.

The worker is made of nothing but the frozen wire. The reader sees what the frozen codec makes of a
message, written again by it: behind that stands today's fold, for the fold of then is not kept.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from kvatlas.events.bus import Bus, Message, OnHole, OnMessage, Subscription
from kvatlas.events.codec import DecodedBatch, decode
from kvatlas.events.streams import KV_EVENTS
from kvatlas.events.subjects import events_subject, inventory_subject
from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import RejectedEvent
from wire_100 import codec as codec_100
from wire_100 import messages as m

#: hashes in a part of its inventory
PART_BLOCKS = 3


class OldWorker:
    """Publishes what it holds in the frozen wire, and gives its inventory when it is asked."""

    def __init__(self, bus: Bus, name: str, model: str, block_tokens: int, epoch: int = 1) -> None:
        self.instance = InstanceId(name, 0)
        self._bus, self._publisher = bus, bus.publisher(KV_EVENTS)
        self._subject = events_subject(model, self.instance)
        self._up = m.WorkerUp(
            m.WorkerInfo(f"http://{name}", (model,), m.NamespaceDescriptor(block_tokens))
        )
        self._epoch, self._seq = epoch, 0
        #: hash -> root, of the first tier; the others stay empty
        self.held: dict[bytes, bytes] = {}
        self._serving: Subscription | None = None

    async def start(self) -> None:
        self._serving = await self._bus.serve(inventory_subject(self.instance), self._answer)
        await self._say(self._up)

    async def stop(self) -> None:
        assert self._serving is not None
        await self._serving.close()
        await self._say(m.WorkerDown("upgrade"))

    async def store(self, root: bytes, chain: bytes) -> None:
        self.held |= dict.fromkeys(_split(chain), root)
        await self._say(m.BlockStored(root, chain))

    async def remove(self, root: bytes, block: bytes) -> None:
        del self.held[block]
        await self._say(m.BlockRemoved(root, block))

    async def tell_digests(self) -> None:
        await self._say(*self._digests())

    def lose(self) -> None:
        """Skip a sequence, as if a batch had not reached the log."""
        self._seq += 1

    async def _answer(self, _payload: bytes) -> bytes:
        first = self._seq + 1
        await self._say(self._up, *self._inventory(), *self._digests())
        return msgspec.msgpack.encode([first])

    def _inventory(self) -> Iterable[m.KvEvent]:
        by_root: dict[bytes, list[bytes]] = {}
        for block, root in self.held.items():
            by_root.setdefault(root, []).append(block)
        parts = [
            (root, b"".join(blocks[at : at + PART_BLOCKS]))
            for root, blocks in by_root.items()
            for at in range(0, len(blocks), PART_BLOCKS)
        ]
        for tier in m.Tier:
            of_tier = parts if parts and tier is m.Tier.hbm else [(bytes(16), b"")]
            for number, (root, hashes) in enumerate(of_tier, 1):
                yield m.Inventory(self._seq, number, len(of_tier), tier, root, hashes)

    def _digests(self) -> Iterable[m.KvEvent]:
        for tier in m.Tier:
            yield m.Digest(tier, *digest_of(self.held if tier is m.Tier.hbm else ()))

    async def _say(self, *events: m.KvEvent) -> None:
        self._seq += 1
        batch = m.EventBatch(
            m.WIRE_VERSION, *self.instance, self._epoch, self._seq, 0, tuple(events)
        )
        await self._publisher.publish(self._subject, codec_100.encode(batch))
        await self._publisher.flush()


def read_by_100(payload: bytes) -> DecodedBatch:
    """Return what the frozen codec makes of a batch; raises its MalformedBatch."""
    batch, rejected = codec_100.decode(payload)
    return DecodedBatch(
        decode(codec_100.encode(batch)).batch,
        tuple(RejectedEvent(each.position, each.kind, each.reason) for each in rejected),
    )


class BusOf100:
    """A bus whose followers get what a reader of minor 100 understands of each batch."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: events left out
        self.num_skipped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def follow(
        self,
        stream_name: str,
        from_sequence: int,
        on_message: OnMessage,
        on_hole: OnHole | None = None,
        subjects: str | None = None,
    ) -> Subscription:
        def translated(message: Message) -> None:
            on_message(self._translated(message))

        follow: Callable[..., Awaitable[Subscription]] = self._bus.follow
        return await follow(stream_name, from_sequence, translated, on_hole, subjects)

    def _translated(self, message: Message) -> Message:
        if not message.subject.startswith("kv.events."):
            return message
        batch, rejected = codec_100.decode(message.payload)
        self.num_skipped += len(rejected)
        return msgspec.structs.replace(message, payload=codec_100.encode(batch))


def _split(chain: bytes) -> list[bytes]:
    return [chain[at : at + 16] for at in range(0, len(chain), 16)]
