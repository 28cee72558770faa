"""A peer that owns blocks: its own process with a pool, a NIXL source and a lease server.

Run as `python peer_main.py SOCKET SETTINGS`; serves on the unix socket until standard input ends.
A frame is length (u32), number (u32), kind (0 lease request, 1 control), body.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from kvatlas.worker_hooks.transfer import BouncePlaces
from kvatlas.worker_hooks.transfer.lease_server import LeaseServer
from kvatlas.worker_hooks.transfer.lease_table import LeaseLimits
from kvatlas.worker_hooks.transfer.nixl.messages import NixlSettings
from kvatlas.worker_hooks.transfer.nixl.transport import NixlTransport
from kvatlas.worker_hooks.transfer.pool import ServePool
from testkit.blocks import a_block, a_hash


class PeerSettings(msgspec.Struct, frozen=True):
    """What a peer is; it holds blocks 0 to `num_blocks` in the slots of the same number."""

    worker: str
    folder: str
    block_bytes: int
    num_slots: int
    num_blocks: int
    fingerprint: bytes
    epoch: int
    ucx_tls: str
    progress_thread: bool
    max_ttl_ms: int


class Peer:
    """Answers frames."""

    def __init__(self, settings: PeerSettings) -> None:
        self.pool = ServePool.create(
            settings.worker,
            settings.num_slots,
            settings.block_bytes,
            folder=Path(settings.folder),
        )
        for number in range(settings.num_blocks):
            block = a_block(number, settings.block_bytes)
            self.pool.commit(number, a_hash(number), block)
        agent = f"{settings.worker}/0:{settings.epoch}"
        nixl = NixlSettings(settings.ucx_tls, settings.progress_thread)
        self.source = NixlTransport(agent, self.pool, BouncePlaces([]), nixl)
        self.server = LeaseServer(
            self.pool,
            [self.source],
            settings.fingerprint,
            settings.epoch,
            LeaseLimits(max_ttl_ms=settings.max_ttl_ms),
        )

    def control(self, body: bytes) -> bytes:
        match msgspec.msgpack.decode(body):
            case ["corrupt", slot]:
                self.pool.block(slot)[7] ^= 0xFF
            case ["replace", slot, number]:
                evicted = self.pool.try_evict([slot])
                if evicted:
                    block = a_block(number, self.pool.block_bytes)
                    self.pool.commit(slot, a_hash(number), block)
                return msgspec.msgpack.encode(bool(evicted))
            case ["source_pid"]:
                return msgspec.msgpack.encode(self.source.pid)
            case ["leases"]:
                return msgspec.msgpack.encode(len(self.server.table))
        return b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readexactly(9)
            except asyncio.IncompleteReadError:
                writer.close()
                return
            body = await reader.readexactly(int.from_bytes(head[:4], "little"))
            answer = self.control(body) if head[8] else await self.server.handle(body)
            writer.write(len(answer).to_bytes(4, "little") + head[4:8] + answer)


async def main(path: str, settings: PeerSettings) -> None:
    peer = Peer(settings)
    with peer.pool:
        async with peer.source:
            server = await asyncio.start_unix_server(peer.serve, path)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.buffer.read)
            server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=PeerSettings)))
    os._exit(0)  # NIXL's destructors have run; skip those of the interpreter
