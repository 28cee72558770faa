"""Liveness: each instance renews a key with a time to live, and watchers are told of its end.

    key     lease.<worker>.<rank>         value   msgpack [epoch, details]

A lease says "this epoch of this instance is alive". It is written by compare-and-set, so an old
incarnation that wakes up meets the newer epoch and learns that it is fenced.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self

import msgspec
from msgspec import Struct

from kvatlas.common.few_lines import FewLines
from kvatlas.events.bus import Entry, KeyChange, KeyValue, Subscription
from kvatlas.events.epochs import is_plausible
from kvatlas.events.subjects import escape_token, rank_of, unescape_token
from kvatlas.schemas.conditions import Conditions, Problems, log_changes
from kvatlas.schemas.errors import (
    BusUnavailable,
    Fenced,
    InvalidSubject,
    KeyExists,
    RevisionConflict,
    StreamRefused,
)
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import Epoch

#: shorter notices a death sooner and forgives shorter pauses of the instance and the broker;
#: a cluster that loses its leader answers nobody for about 6 s
TTL_SECONDS = 15.0
RENEWALS_PER_TTL = 3
RELEASE_SECONDS = 2.0
#: pause after a renewal that the broker did not confirm
RETRY_SECONDS = 0.5
#: characters of a key that is no lease's, in a log line
MAX_SHOWN_KEY = 100

_logger = logging.getLogger(__name__)


class LeaseValue(Struct, frozen=True, array_like=True):
    """What stands at a lease's key; later fields may be added at the end."""

    epoch: Epoch
    #: what the holder wants watchers to know, uninterpreted
    details: bytes = b""


_leases = msgspec.msgpack.Decoder(LeaseValue)


class LeaseChange(Struct, frozen=True):
    """An instance's lease was taken or renewed, given back, or ran out.

    `epoch` is None when a lease ended that this watcher never saw alive.
    """

    instance: InstanceId
    epoch: int | None
    kind: Literal["alive", "released", "expired"]
    details: bytes = b""


def lease_key(instance: InstanceId) -> str:
    """Return the key of an instance's lease."""
    return f"lease.{escape_token(instance.worker)}.{instance.rank}"


def parse_lease_key(key: str) -> InstanceId:
    """Return whose lease a key is; raises InvalidSubject."""
    match key.split("."):
        case ["lease", worker, token] if (rank := rank_of(token)) is not None:
            return InstanceId(unescape_token(worker), rank)
        case _:
            raise InvalidSubject(key)


class LeaseKeeper:
    """Holds an instance's lease for as long as it is entered.

    Entering takes the lease, or goes on trying when the broker is away; it raises Fenced when a
    newer epoch has it. Later `on_fenced` is called once with the newer epoch, and renewing stops:
    the instance must stop publishing. Leaving gives the lease back, unless it is another's.
    """

    def __init__(
        self,
        keys: KeyValue,
        instance: InstanceId,
        epoch: int,
        on_fenced: Callable[[Fenced], None],
        details: bytes = b"",
        ttl_seconds: float = TTL_SECONDS,
    ) -> None:
        self._keys, self._instance, self._epoch = keys, instance, epoch
        self._on_fenced = on_fenced
        self._key = lease_key(instance)
        self._value = msgspec.msgpack.encode(LeaseValue(epoch, details))
        self._ttl_seconds = ttl_seconds
        #: of our own last write; None when we do not know that the key is ours
        self._revision: int | None = None
        self._task: asyncio.Task[None] | None = None
        conditions = Conditions()
        log_changes(conditions, _logger)
        #: why it is not renewed, each reason said once
        self._trouble = Problems(conditions, "lease_not_renewed")
        #: renewals that the broker did not confirm
        self.num_failed_renewals = 0

    @property
    def is_held(self) -> bool:
        """Whether the last renewal was confirmed."""
        return self._revision is not None

    async def __aenter__(self) -> Self:
        await self._renew()
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        # Whoever cannot tell the broker is expired by it.
        with suppress(TimeoutError, BusUnavailable, RevisionConflict, StreamRefused):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._release()

    async def _release(self) -> None:
        entry = await self._keys.get(self._key)
        found = None if entry is None else decode_lease(entry)
        if entry is not None and found is not None and found.epoch == self._epoch:
            await self._keys.delete(self._key, entry.revision)

    async def _keep(self) -> None:
        while True:
            pause = self._ttl_seconds / RENEWALS_PER_TTL
            await asyncio.sleep(pause if self.is_held else min(pause, RETRY_SECONDS))
            try:
                await self._renew()
            except Fenced as fenced:
                self._on_fenced(fenced)
                return

    async def _renew(self) -> None:
        """Write our value, whatever state the key is in; raises Fenced."""
        try:
            while True:
                try:
                    self._revision = await self._write()
                    self._trouble.end()
                    return
                except (KeyExists, RevisionConflict):
                    # It ran out during an outage, or another epoch has it: look again.
                    self._revision = None
        except (BusUnavailable, StreamRefused) as error:
            # The write may have happened: the next renewal looks at the key.
            self._revision = None
            self.num_failed_renewals += 1
            self._trouble.add(f"the lease of {self._instance} is not renewed: {error}")

    async def _write(self) -> int:
        if self._revision is not None:
            return await self._keys.update(
                self._key, self._value, self._revision, self._ttl_seconds
            )
        entry = await self._keys.get(self._key)
        if entry is None:
            return await self._keys.create(self._key, self._value, self._ttl_seconds)
        holder = _holder(entry, self._epoch)
        if holder is not None and holder > self._epoch:
            raise Fenced(str(self._instance), self._epoch, holder)
        return await self._keys.update(self._key, self._value, entry.revision, self._ttl_seconds)


async def watch_leases(keys: KeyValue, on_lease: Callable[[LeaseChange], None]) -> Subscription:
    """Report each lease that is held, then each change; returns when the present is reported.

    A renewal is reported as alive again. Every end of a lease is reported, also one that
    happened while the connection was away. What is no lease is left out; the 1st, the 10th, the
    100th and so on are logged.
    """
    #: instance -> epoch of each lease that was reported alive and not its end
    epochs: dict[InstanceId, int] = {}
    others = FewLines(_logger)

    def on_change(change: KeyChange) -> None:
        try:
            instance = parse_lease_key(change.key)
        except InvalidSubject:
            others.warn(
                "no lease at %s: expected lease.<worker>.<rank>", change.key[:MAX_SHOWN_KEY]
            )
            return
        if change.value is None:
            kind: Literal["released", "expired"] = (
                "expired" if change.reason == "expired" else "released"
            )
            on_lease(LeaseChange(instance, epochs.pop(instance, None), kind))
            return
        try:
            value = _leases.decode(change.value)
        except (msgspec.DecodeError, RecursionError) as error:
            others.warn("no lease at %s: %s", change.key[:MAX_SHOWN_KEY], error)
            return
        epochs[instance] = value.epoch
        on_lease(LeaseChange(instance, value.epoch, "alive", value.details))

    return await keys.watch(on_change)


async def lease_holder(keys: KeyValue, instance: InstanceId, epoch: int) -> int | None:
    """Return the epoch that has an instance's lease, None for none; `epoch` is one that had it.

    Raises BusUnavailable.
    """
    entry = await keys.get(lease_key(instance))
    return None if entry is None else _holder(entry, epoch)


def _holder(entry: Entry, previous: int) -> int | None:
    """Return the epoch in a lease, or None (and log) where it is none that can be followed."""
    found = decode_lease(entry)
    if found is None:
        return None
    clock_ms = max(time.time_ns() // 1_000_000, entry.written_ms)
    if not is_plausible(found.epoch, previous, clock_ms):
        _logger.warning("no lease at %s: epoch %d is far ahead", entry.key, found.epoch)
        return None
    return found.epoch


def decode_lease(entry: Entry) -> LeaseValue | None:
    """Return the value at a lease's key, or None (and log) when it is none of ours."""
    try:
        return _leases.decode(entry.value)
    except (msgspec.DecodeError, RecursionError) as error:
        _logger.warning("no lease at %s: %s", entry.key, error)
        return None
