"""Buckets of keys within one process; the twin of `nats_keys`."""

import asyncio
import time
from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from kvatlas.events.bus import Entry, KeyChange
from kvatlas.schemas.errors import InvalidSubject, KeyExists, RevisionConflict

OnChange = Callable[[KeyChange], None]


class KeyConnection(Protocol):
    """What keys need of the bus that they were taken from."""

    @property
    def connected(self) -> bool: ...

    def check_connected(self) -> None: ...

    def own(self, part: "MemoryWatch") -> None: ...

    def forget(self, part: "MemoryWatch") -> None: ...


class _Cell(Struct):
    revision: int
    value: bytes | None
    reason: Literal["put", "deleted", "expired"]
    expires_at: float | None = None
    written_ms: int = 0


class MemoryBucket:
    """What all connections see of one bucket."""

    def __init__(
        self,
        clock: Callable[[], float],
        has_timers: bool,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`clock` is that of times to live, `now_ns` the broker's own."""
        self._clock, self._has_timers, self._now_ns = clock, has_timers, now_ns
        self._revision = 0
        #: key -> its newest change, an end included; in the order of revisions
        self.cells: dict[str, _Cell] = {}
        self.watches: set[MemoryWatch] = set()

    def write(self, key: str, value: bytes | None, ttl_seconds: float | None) -> int:
        """Change a key and tell the watches."""
        ttl = None if ttl_seconds is None else max(1.0, ttl_seconds)
        reason: Literal["put", "deleted"] = "deleted" if value is None else "put"
        expires_at = None if ttl is None else self._clock() + ttl
        self._change(key, value, reason, expires_at)
        if ttl is not None and self._has_timers:
            asyncio.get_running_loop().call_later(ttl, self.expire)
        return self._revision

    def expire(self) -> None:
        """End the keys whose time is over."""
        now = self._clock()
        for key, cell in tuple(self.cells.items()):
            if cell.expires_at is not None and cell.expires_at <= now:
                self._change(key, None, "expired", None)

    def _change(
        self,
        key: str,
        value: bytes | None,
        reason: Literal["put", "deleted", "expired"],
        expires_at: float | None,
    ) -> None:
        self._revision += 1
        self.cells.pop(key, None)
        written_ms = self._now_ns() // 1_000_000
        self.cells[key] = _Cell(self._revision, value, reason, expires_at, written_ms)
        for watch in self.watches:
            watch.wake()

    def next_change(self, after_revision: int) -> KeyChange | None:
        """Return the oldest present state that is newer than a revision."""
        found: KeyChange | None = None
        for key, cell in reversed(self.cells.items()):
            if cell.revision <= after_revision:
                break
            found = KeyChange(key, cell.value, cell.reason, cell.revision)
        return found


class MemoryKeyValue:
    """The `KeyValue` within one process."""

    def __init__(self, bus: KeyConnection, bucket: MemoryBucket) -> None:
        self._bus, self._bucket = bus, bucket

    async def get(self, key: str) -> Entry | None:
        cell = self._cell(key)
        if cell is None or cell.value is None:
            return None
        return Entry(key, cell.value, cell.revision, cell.written_ms)

    async def put(self, key: str, value: bytes, ttl_seconds: float | None = None) -> int:
        self._cell(key)
        return self._bucket.write(key, value, ttl_seconds)

    async def create(self, key: str, value: bytes, ttl_seconds: float | None = None) -> int:
        cell = self._cell(key)
        if cell is not None and cell.value is not None:
            raise KeyExists(key)
        return self._bucket.write(key, value, ttl_seconds)

    async def update(
        self, key: str, value: bytes, revision: int, ttl_seconds: float | None = None
    ) -> int:
        self._check_revision(key, revision)
        return self._bucket.write(key, value, ttl_seconds)

    async def delete(self, key: str, revision: int | None = None) -> None:
        if revision is not None:
            self._check_revision(key, revision)
        self._cell(key)
        self._bucket.write(key, None, None)

    async def watch(self, on_change: OnChange) -> "MemoryWatch":
        self._bus.check_connected()
        self._bucket.expire()
        watch = MemoryWatch(self._bus, self._bucket, on_change)
        await watch.caught_up()
        return watch

    def _cell(self, key: str) -> _Cell | None:
        self._bus.check_connected()
        if not all(key.split(".")) or any(c in " \t\r\n*>" for c in key):
            raise InvalidSubject(key)
        self._bucket.expire()
        return self._bucket.cells.get(key)

    def _check_revision(self, key: str, revision: int) -> None:
        cell = self._cell(key)
        if (0 if cell is None else cell.revision) != revision:
            raise RevisionConflict(key, revision)


class MemoryWatch:
    """The `Subscription` of `watch` within one process."""

    def __init__(self, bus: KeyConnection, bucket: MemoryBucket, on_change: OnChange) -> None:
        self._bus, self._bucket, self._on_change = bus, bucket, on_change
        self._last_revision = 0
        self._round: asyncio.Handle | None = None
        self._has_caught_up = asyncio.Event()
        self.num_healed = 0
        bucket.watches.add(self)
        bus.own(self)

    async def caught_up(self) -> None:
        """Return when what was there has been reported."""
        self.wake()
        await self._has_caught_up.wait()

    def wake(self) -> None:
        """Report in the event loop's next round."""
        if self._round is None and self._bus.connected:
            self._round = asyncio.get_running_loop().call_soon(self._report)

    async def close(self) -> None:
        self._bucket.watches.discard(self)
        self._bus.forget(self)
        if self._round is not None:
            self._round.cancel()

    def _report(self) -> None:
        """Report one change and come back for the next, so that what raises stops nothing."""
        self._round = None
        change = self._bucket.next_change(self._last_revision) if self._bus.connected else None
        if change is None:
            self._has_caught_up.set()
            return
        self._last_revision = change.revision
        self.wake()
        self._on_change(change)
