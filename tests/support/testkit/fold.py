"""The dumbest reader of the log: one set of hashes an instance and tier, no bounds, no trust."""

from kvatlas.events.codec import decode
from kvatlas.schemas.digest import digest_of, split_hashes
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    EventBatch,
    Inventory,
    KvEvent,
    NamespaceSeen,
    NamespacesOverBudget,
    Resync,
    SourceDegraded,
    WorkerDown,
    WorkerUp,
)


class Fold:
    """What one instance holds, by its own account; asserts what an account has to be."""

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.epoch = self.seq = 0
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        #: while False, events were lost since the last inventory of every tier
        self.is_whole = False
        self.gaps: list[tuple[int, int]] = []
        self.events: list[KvEvent] = []
        self.num_digests = 0
        self.down = ""
        #: roots of which it holds more than it says
        self.muted: set[bytes] = set()
        self.doubt = ""
        self._inventoried: set[Tier] = set()
        self._parts: list[Inventory] = []
        self._roots: set[bytes] = set()

    @property
    def holds_more(self) -> bool:
        """Whether it says that it holds more than it says."""
        return bool(self.muted) or "over its budget" in self.doubt

    def take_payload(self, payload: bytes) -> None:
        decoded = decode(payload)
        assert decoded.rejected == ()
        self.take(decoded.batch)

    def take(self, batch: EventBatch) -> None:
        assert batch.instance == self.instance
        if (batch.epoch, batch.seq) <= (self.epoch, self.seq):
            return  # the publisher may repeat itself
        if batch.epoch > self.epoch:
            assert (batch.seq, type(batch.events[0])) == (1, WorkerUp)
            self.__init__(self.instance)  # type: ignore[misc]
            self.is_whole = True
        elif batch.seq != self.seq + 1:
            self.gaps.append((self.seq + 1, batch.seq - 1))
            self._doubt()
        self.epoch, self.seq = batch.epoch, batch.seq
        for event in batch.events:
            self.events.append(event)
            self._apply(event)

    def _apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self._interrupt(event.tier)
                assert event.root in self._roots or not self.is_whole
                self.held[event.tier] |= set(split_hashes(event.hashes))
            case BlockRemoved():
                self._interrupt(event.tier)
                self.held[event.tier] -= set(split_hashes(event.hashes))
            case AllBlocksCleared():
                for tier in Tier if event.tier is None else (event.tier,):
                    self._interrupt(tier)
                    self.held[tier].clear()
                    self._inventoried.add(tier)
                self._settle()
            case Resync():
                self._doubt()
            case Inventory():
                self._take_part(event)
            case Digest():
                self.num_digests += 1
                if self.is_whole:
                    assert digest_of(self.held[event.tier]) == (event.count, event.xor)
            case NamespaceSeen():
                self._roots.add(event.root)
            case WorkerDown():
                self.down = event.reason
            case NamespacesOverBudget():
                self.muted = set(split_hashes(event.roots))
            case SourceDegraded():
                self.doubt = event.reason
            case WorkerUp():
                pass

    def _take_part(self, part: Inventory) -> None:
        if part.part == 1:
            self._parts = []
        self._parts.append(part)
        assert [p.part for p in self._parts] == list(range(1, part.part + 1))
        if part.part == part.parts:
            hashes = [h for p in self._parts for h in split_hashes(p.hashes)]
            assert len(set(hashes)) == len(hashes)
            if self.is_whole and not self.holds_more:
                assert set(hashes) == self.held[part.tier]
            assert not self.is_whole or set(hashes) >= self.held[part.tier]
            self.held[part.tier] = set(hashes)
            self._inventoried.add(part.tier)
            self._parts = []
            self._settle()

    def _interrupt(self, tier: Tier) -> None:
        assert not self._parts or self._parts[0].tier is not tier

    def _doubt(self) -> None:
        self.is_whole = False
        self._inventoried.clear()

    def _settle(self) -> None:
        self.is_whole |= self._inventoried == set(Tier)
