"""What a sidecar says about its engine: from records of the ring to batches in the outbox.

Pure; the sidecar reads the ring, tells the time and publishes.
"""

from collections.abc import Iterable

import msgspec

from kvatlas.schemas.errors import MalformedEvent
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.edge import Edge
from kvatlas.worker_hooks.outbox import Outbox
from kvatlas.worker_hooks.raw_events import RawEvent, RawListed, RawLost, decode_raw
from kvatlas.worker_hooks.ring import Lost

#: an engine that changes under its own listing is asked again so often
MAX_LISTING_RETRIES = 3


class Reporter:
    """Puts what changed into the outbox, and what is held whenever that is in doubt."""

    def __init__(self, edge: Edge, outbox: Outbox) -> None:
        self._edge, self._outbox = edge, outbox
        #: first sequence of the last inventory
        self._inventory_seq = 0
        self._num_malformed = 0
        #: listings in a row that the engine could not finish
        self._num_failed_listings = 0

    def report(self, records: Iterable[bytes | Lost], writer_lists: bool) -> bool:
        """Report what the ring gave; return whether the engine has to list what it holds.

        A record that is no event is counted and costs nothing else. After a loss, an engine that
        cannot list leaves us with what we know: that becomes the inventory.
        """
        events = [event for record in records if (event := self._read(record, writer_lists))]
        self._outbox.add(self._edge.handle(events))
        wants_listing = False
        for event in events:
            match event:
                case RawLost():
                    wants_listing = writer_lists
                    if not writer_lists:
                        self.put_inventory()
                case RawListed(complete):
                    self.put_digests()
                    self._num_failed_listings = 0 if complete else self._num_failed_listings + 1
                    if writer_lists and 0 < self._num_failed_listings <= MAX_LISTING_RETRIES:
                        wants_listing = True
                case _:
                    pass
        return wants_listing

    def put_inventory(self) -> None:
        """Put the inventory, and digests to check it by, behind all that has happened.

        Who speaks is said again with it: a reader may begin after WorkerUp has left the stream.
        """
        as_of_seq = self._outbox.seal()
        self._outbox.add_inventory([self._outbox.up, *self._edge.inventory(as_of_seq)])
        self.put_digests()
        self._inventory_seq = as_of_seq + 1

    def promise_inventory(self) -> int:
        """Put the inventory unless one still waits; return the sequence that it begins with."""
        if self._outbox.last_taken_seq >= self._inventory_seq:
            self.put_inventory()
        return self._inventory_seq

    def put_digests(self) -> None:
        """Put the digest of every tier."""
        self._outbox.add(self._edge.digests())

    def disown(self, hashes: bytes) -> None:
        """Report that blocks are not held which somebody believed in."""
        self._outbox.add(self._edge.disown(hashes))

    def begin_epoch(self, epoch: int) -> None:
        """Speak in this epoch from now on; what an earlier one said counts no more."""
        if self._outbox.epoch is not None:
            self._edge.begin_epoch()
            self._inventory_seq = 0
        self._outbox.begin_epoch(epoch)

    @property
    def num_blocks(self) -> int:
        """Blocks held in the engine's own memory."""
        return self._edge.residency.digest(Tier.hbm).count

    def counters(self) -> dict[str, int]:
        """Return what was counted here and below."""
        counters: dict[str, int] = msgspec.structs.asdict(self._edge.counters)
        counters["malformed_events"] = self._num_malformed
        counters["outbox_overflows"] = self._outbox.num_overflows
        return counters

    def _read(self, record: bytes | Lost, writer_lists: bool) -> RawEvent | None:
        if isinstance(record, Lost):
            return RawLost(record.num_records, writer_lists)
        try:
            return decode_raw(record)
        except MalformedEvent:
            self._num_malformed += 1
            return None
