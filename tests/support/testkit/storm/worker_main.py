"""One worker of a storm: `worker_main.py '{"nats_url": ..., ...}'`.

The engine (engine.py), its ring, the real sidecar and its NATS publisher, in one process, with
witnesses in between that write down what each batch stands for and what was acknowledged. SIGUSR1
lets the engine rest, SIGTERM ends it with a goodbye.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

from msgspec import Struct

from kvatlas.events.bus import Publisher
from kvatlas.events.codec import decode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from kvatlas.schemas.kv_events import KvEvent
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.ring import Lost, RingReader, RingWriter
from kvatlas.worker_hooks.sidecar import service as sidecar_service
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.sidecar.service import Sidecar
from testkit.storm.chains import DESCRIPTOR, MODEL, Chains
from testkit.storm.engine import StormEngine
from testkit.storm.truth import TruthWriter

ACK_POLL_SECONDS = 0.05
#: part of the batches that are refused, as a broker would: gaps that have to be told and healed
REFUSED_PART = 0.0005


class WorkerOptions(Struct, frozen=True):
    """One process of one worker; `start` counts the processes under this name."""

    nats_url: str
    name: str
    start: int
    seed: int
    folder: str
    ops_per_second: float
    lease_ttl_seconds: float
    digest_seconds: float


class WitnessedRing(RingReader):
    """Counts the records that the sidecar has taken, lost ones included."""

    num_taken = 0

    def read(self, max_bytes: int = 1024 * 1024) -> list[bytes | Lost]:
        records = super().read(max_bytes)
        for record in records:
            self.num_taken += record.num_records if isinstance(record, Lost) else 1
        return records


class WitnessedOutbox(Outbox):
    """Notes how much of the ring stands behind each batch when it is closed."""

    ring: WitnessedRing
    _is_adding = False

    def _restart(self) -> None:
        #: sequence -> records of the ring that it and those before it tell; None: not known
        self.told_at: dict[int, int | None] = {}
        super()._restart()

    def add(self, events: Iterable[KvEvent]) -> None:
        self._is_adding = True
        super().add(events)
        self._is_adding = False

    def seal(self) -> int:
        seq = super().seal()
        # within `add` a batch may end between two events of one record
        self.told_at.setdefault(seq, None if self._is_adding else self.ring.num_taken)
        return seq


class WitnessedPublisher:
    """Writes down each batch before it leaves, and each acknowledgement after it has come."""

    def __init__(self, publisher: Publisher, truth: TruthWriter, witness: "Witness") -> None:
        self._publisher, self._truth, self._witness = publisher, truth, witness
        self._random = Random()
        #: (epoch, seq) accepted and not known to be stored
        self._accepted: list[tuple[int, int]] = []
        #: what our own `flush` was told in place of the sidecar
        self._refused: StreamRefused | None = None

    @property
    def num_unacked(self) -> int:
        return self._publisher.num_unacked

    @property
    def unacked_bytes(self) -> int:
        return self._publisher.unacked_bytes

    async def publish(self, subject: str, payload: bytes) -> None:
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        batch = decode(payload).batch
        self._truth.sent(batch.epoch, batch.seq, self._witness.op_of(batch.seq))
        if self._random.random() < REFUSED_PART:
            raise StreamRefused(f"batch {batch.seq} meets the storm")
        await self._publisher.publish(subject, payload)
        self._accepted.append((batch.epoch, batch.seq))

    async def flush(self) -> None:
        await self._publisher.flush()

    async def watch_acks(self) -> None:
        """Write down what is stored, until cancelled."""
        while True:
            accepted, self._accepted = self._accepted, []
            if accepted:
                try:
                    await self._publisher.flush()
                    self._truth.acked(accepted)
                except StreamRefused as refused:
                    self._refused = refused
                except BusUnavailable:
                    return
            await asyncio.sleep(ACK_POLL_SECONDS)


class Witness:
    """Knows which op of the engine a batch brings readers to."""

    engine: StormEngine
    outbox: WitnessedOutbox

    def op_of(self, seq: int) -> int | None:
        told = self.outbox.told_at.get(seq)
        return None if told is None else self.engine.op_at(told)


class WitnessedBus(NatsBus):
    """The bus, with a witness of all that is published on it."""

    truth: TruthWriter
    witness: Witness
    witnessed: WitnessedPublisher | None = None

    def publisher(self, stream_name: str) -> Publisher:  # type: ignore[override]
        self.witnessed = WitnessedPublisher(
            super().publisher(stream_name), self.truth, self.witness
        )
        return self.witnessed


async def run(options: WorkerOptions) -> None:
    """Work until SIGTERM, or until another process has taken the name."""
    folder = Path(options.folder)
    run_name = f"{options.name}-{options.start}"
    truth = TruthWriter(folder / f"{run_name}.truth")
    ring_path = folder / f"{run_name}.ring"
    hook = WorkerHook(RingWriter.create(ring_path, 1 << 20, lists=True))
    ring = WitnessedRing(ring_path)
    engine = StormEngine(Chains(options.seed), hook, truth, f"{options.seed} {run_name}")
    sidecar = _sidecar(options, folder, ring, engine, truth)
    loop, resting = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, sidecar.stop, "down")
    loop.add_signal_handler(signal.SIGUSR1, resting.set)
    playing = asyncio.create_task(_play(engine, hook, options.ops_per_second, resting))
    watching = asyncio.create_task(_watch_acks(sidecar))
    try:
        reason = await sidecar.run()
        print(f"ended: {reason}", file=sys.stderr, flush=True)
    finally:
        playing.cancel()
        watching.cancel()
        hook.close()
        ring.close()
        truth.close()


def _sidecar(
    options: WorkerOptions,
    folder: Path,
    ring: WitnessedRing,
    engine: StormEngine,
    truth: TruthWriter,
) -> Sidecar:
    bus = WitnessedBus(options.nats_url, name=f"storm {options.name}")
    bus.truth, bus.witness = truth, Witness()
    bus.witness.engine = engine
    WitnessedOutbox.ring = ring
    made: list[WitnessedOutbox] = []

    def outbox(*arguments: object) -> WitnessedOutbox:
        made.append(WitnessedOutbox(*arguments))  # type: ignore[arg-type]
        return made[-1]

    # the sidecar makes its own outbox; there is no other place to stand between the two
    sidecar_service.__dict__["Outbox"] = outbox
    sidecar_options = SidecarOptions(
        nats_url=options.nats_url,
        worker=options.name,
        model=MODEL,
        descriptor=DESCRIPTOR,
        base_url="http://127.0.0.1:9",
        num_blocks=1_000,
        ring_path=str(ring.path),
        socket_path=str(folder / f"{options.name}-{options.start}.sock"),
        transport="none",
        lease_ttl_seconds=options.lease_ttl_seconds,
        digest_seconds=options.digest_seconds,
        max_outbox_bytes=1 << 20,
    )
    sidecar = Sidecar(sidecar_options, ring, bus)
    bus.witness.outbox = made[0]
    return sidecar


async def _play(
    engine: StormEngine, hook: WorkerHook, ops_per_second: float, resting: asyncio.Event
) -> None:
    while not resting.is_set():
        engine.step()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 / ops_per_second):
                await resting.wait()
    while True:
        hook.pump()
        await asyncio.sleep(0.1)


async def _watch_acks(sidecar: Sidecar) -> None:
    bus = sidecar._bus
    assert isinstance(bus, WitnessedBus)
    while bus.witnessed is None:  # noqa: ASYNC110 - the sidecar asks for it once it is connected
        await asyncio.sleep(ACK_POLL_SECONDS)
    await bus.witnessed.watch_acks()


def main() -> None:
    """Run the worker whose options are the argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given = json.loads(sys.argv[1])
    asyncio.run(run(WorkerOptions(**given)))


if __name__ == "__main__":
    main()
