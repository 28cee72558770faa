"""Pulls on behalf of waiting requests, on a thread of its own: the engine never waits for one.

    start -> slots offered -> sidecar pulls, verifies -> copied into the engine's blocks -> finished

Whatever goes wrong leaves blocks that have failed, which the engine computes.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvatlas.schemas.errors import KvatlasError, SidecarUnavailable
from kvatlas.worker_hooks.connector.orders import BlockLoad, BlockRun
from kvatlas.worker_hooks.connector.slots import PoolSlots
from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.sidecar.channel import PullEnded, SidecarChannel

#: engine's block, slot -> copies the bytes
Fill = Callable[[int, int], None]
#: how often a load that waits looks for room in the pool; one of them looks at a time
ROOM_SECONDS = 0.01
CAME = ("held", "own")

_log = printable_log("vllm.kvatlas")


@dataclass
class LoadOutcomes:
    """What became of loads since the last time somebody asked."""

    num_loads: int = 0
    seconds: float = 0.0
    #: blocks by what became of them: those of CAME did, from peers and from this worker's pool;
    #: anything else is why they did not, and "behind" that one before them did not
    blocks: Counter[str] = field(default_factory=Counter)

    def add(self, other: "LoadOutcomes") -> None:
        """Count others' as well."""
        self.num_loads += other.num_loads
        self.seconds += other.seconds
        self.blocks += other.blocks


class BlockLoader:
    """Runs loads; `finished`, `failed` and `outcomes` are asked in every step."""

    def __init__(
        self, socket_path: str, slots: PoolSlots, fill: Fill, deadline_seconds: float
    ) -> None:
        self._socket_path, self._slots, self._fill = socket_path, slots, fill
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._outcomes = LoadOutcomes()
        self._loop = asyncio.new_event_loop()
        self._channel: SidecarChannel | None = None
        #: held by the load that is next to get room
        self._turn = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvatlas-loads")
        self._thread.start()

    def start(self, load: BlockLoad) -> None:
        """Begin a load."""
        asyncio.run_coroutine_threadsafe(self._load(load), self._loop)

    def finished(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, well or not."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def failed(self) -> set[int]:
        """Return the engine's blocks that got nothing, since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def outcomes(self) -> LoadOutcomes:
        """Return what became of the loads that have ended since the last call."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, LoadOutcomes()
        return outcomes

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _load(self, load: BlockLoad) -> None:
        began = time.monotonic()
        held: set[int] = set()
        told: Counter[str] = Counter()
        try:
            held = await self._bring(load, told, began + self._deadline_seconds)
        except (KvatlasError, OSError, RuntimeError, ValueError) as error:
            told["error"] += len(load.hashes) - told.total()
            _log.warning("kvatlas: a load ended early: %s", error)
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                self._failed |= {b for i, b in enumerate(load.block_ids) if i not in held}
                self._finished.add(load.request_id)
                self._outcomes.add(LoadOutcomes(1, seconds, told))
            _log.info(
                "kvatlas: %s of %s blocks for %s in %.1f ms: %s",
                len(held), len(load.hashes), load.request_id, 1000 * seconds, dict(+told),
            )  # fmt: skip

    async def _bring(self, load: BlockLoad, told: Counter[str], until: float) -> set[int]:
        """Return the positions whose blocks have their bytes."""
        held = self._copy_own(load)
        told["own"] += len(held)
        answers = await asyncio.gather(
            *(self._pull(load, run, held, told, until) for run in load.runs),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            held |= answer
        return held

    def _copy_own(self, load: BlockLoad) -> set[int]:
        """Fill what the pool has already."""
        held = set()
        for position, block_hash in enumerate(load.hashes):
            with self._slots.reading(block_hash) as slot:
                if slot is not None and self._slots.pool.hash_of(slot) == block_hash:
                    self._fill(load.block_ids[position], slot)
                    held.add(position)
        return held

    async def _pull(
        self, load: BlockLoad, run: BlockRun, held: set[int], told: Counter[str], until: float
    ) -> set[int]:
        """Return the positions of a run that came: as many at a time as the pool has room for."""
        wanted = [p for p in range(run.first, run.first + run.num_blocks) if p not in held]
        brought: set[int] = set()
        while wanted:
            slots = await self._room(len(wanted), until)
            if not slots:
                told["no_room"] += len(wanted)
                break
            now, wanted = wanted[: len(slots)], wanted[len(slots) :]
            came = await self._pull_into(slots, load, run, now, told, until)
            brought |= came
            if len(came) < len(now):
                told["behind"] += len(wanted)
                break
        return brought

    async def _room(self, num_slots: int, until: float) -> list[int]:
        """Return empty slots, up to so many; none if there was no room for any until then.

        Loads get room in their order. What frees it is the end of a lease or of another pull.
        """
        try:
            async with asyncio.timeout(until - time.monotonic()), self._turn:
                while not (slots := self._slots.acquire(num_slots)):  # noqa: ASYNC110 - peers decide
                    await asyncio.sleep(ROOM_SECONDS)
                return slots
        except TimeoutError:
            return []

    async def _pull_into(
        self,
        slots: list[int],
        load: BlockLoad,
        run: BlockRun,
        positions: list[int],
        told: Counter[str],
        until: float,
    ) -> set[int]:
        hashes = [load.hashes[position] for position in positions]
        filled: list[int] = []
        try:
            if not self._slots.pool.offer(slots, b"".join(hashes)):
                told["no_room"] += len(slots)
                return set()
            answer = await self._ask(b"".join(hashes), slots, run, until)
            for i in answer.held:
                # before anybody else may know the slot, and so evict it
                self._fill(load.block_ids[positions[i]], slots[i])
                filled.append(i)
            told.update(reason for _, reason in answer.missing)
        except SidecarUnavailable:
            told["no_sidecar"] += len(slots)
        finally:
            kept = set(filled)
            self._slots.filled([slots[i] for i in filled], [hashes[i] for i in filled])
            self._slots.release([slot for i, slot in enumerate(slots) if i not in kept])
        told["held"] += len(filled)
        return {positions[i] for i in filled}

    async def _ask(self, hashes: bytes, slots: list[int], run: BlockRun, until: float) -> PullEnded:
        if self._channel is None:
            self._channel = SidecarChannel(Path(self._socket_path))
        left = max(until - time.monotonic(), 0.001)
        return await self._channel.pull(hashes, slots, run.owners, left)
