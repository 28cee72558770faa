"""Pulls on behalf of waiting requests, on a thread of its own: the engine never waits for one.

    start -> slots offered -> sidecar pulls, verifies -> copied into the engine's blocks -> finished

Whatever goes wrong leaves blocks that have failed, which the engine computes.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvatlas.schemas.errors import KvatlasError, SidecarUnavailable
from kvatlas.worker_hooks.channel import PullEnded, SidecarChannel
from kvatlas.worker_hooks.connector.orders import Load, Run
from kvatlas.worker_hooks.connector.slots import PoolSlots

#: engine's block, slot -> copies the bytes
Fill = Callable[[int, int], None]

_log = logging.getLogger("vllm.kvatlas")


class Loads:
    """Runs loads; `finished` and `failed` are asked in every step."""

    def __init__(
        self, socket_path: str, slots: PoolSlots, fill: Fill, deadline_seconds: float
    ) -> None:
        self._socket_path, self._slots, self._fill = socket_path, slots, fill
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        #: blocks by what became of them: "held", or why they are missing
        self.outcomes: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._channel: SidecarChannel | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvatlas-loads")
        self._thread.start()

    def start(self, load: Load) -> None:
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

    async def _load(self, load: Load) -> None:
        began = time.monotonic()
        held: set[int] = set()
        try:
            held = await self._bring(load)
        except (KvatlasError, OSError, RuntimeError, ValueError) as error:
            self.outcomes["error"] += len(load.hashes) - len(held)
            _log.warning("kvatlas: a load ended early: %s", error)
        finally:
            with self._lock:
                self._failed |= {b for i, b in enumerate(load.block_ids) if i not in held}
                self._finished.add(load.request_id)
            milliseconds = (time.monotonic() - began) * 1000
            _log.info(
                "kvatlas: %s of %s blocks for %s in %.1f ms",
                len(held), len(load.hashes), load.request_id, milliseconds,
            )  # fmt: skip

    async def _bring(self, load: Load) -> set[int]:
        """Return the positions whose blocks have their bytes."""
        held = self._copy_own(load)
        answers = await asyncio.gather(
            *(self._pull(load, run, held) for run in load.runs), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, SidecarUnavailable):
                    raise answer
                self.outcomes["no_sidecar"] += 1
            else:
                held |= answer
        return held

    def _copy_own(self, load: Load) -> set[int]:
        """Fill what the pool has already."""
        held = set()
        for position, block_hash in enumerate(load.hashes):
            with self._slots.reading(block_hash) as slot:
                if slot is not None and self._slots.pool.hash_of(slot) == block_hash:
                    self._fill(load.block_ids[position], slot)
                    held.add(position)
        self.outcomes["own"] += len(held)
        return held

    async def _pull(self, load: Load, run: Run, held: set[int]) -> set[int]:
        positions = [p for p in range(run.first, run.first + run.num_blocks) if p not in held]
        slots = self._slots.take(len(positions))
        positions = positions[: len(slots)]
        hashes = [load.hashes[position] for position in positions]
        filled: list[int] = []
        try:
            if not slots or not self._slots.pool.offer(slots, b"".join(hashes)):
                self.outcomes["no_room"] += run.num_blocks
                return set()
            answer = await self._ask(b"".join(hashes), slots, run)
            self.outcomes.update(reason for _, reason in answer.missing)
            for i in answer.held:
                # before anybody else may know the slot, and so evict it
                self._fill(load.block_ids[positions[i]], slots[i])
                filled.append(i)
        finally:
            kept = set(filled)
            self._slots.filled([slots[i] for i in filled], [hashes[i] for i in filled])
            self._slots.give_back([slot for i, slot in enumerate(slots) if i not in kept])
        self.outcomes["held"] += len(filled)
        return {positions[i] for i in filled}

    async def _ask(self, hashes: bytes, slots: list[int], run: Run) -> PullEnded:
        if self._channel is None:
            self._channel = SidecarChannel(Path(self._socket_path))
        return await self._channel.pull(hashes, slots, run.owners, self._deadline_seconds)
