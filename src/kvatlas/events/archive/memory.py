"""An archive in memory, for tests and demos."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Self

from kvatlas.events.archive.port import (
    BatchKey,
    Cut,
    DamagedRows,
    DecisionRecord,
    EventRecord,
    Hole,
)
from kvatlas.events.bus import Message
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.schemas.errors import UnknownDecision


class MemoryArchive:
    """Sorted lists and dicts."""

    def __init__(self) -> None:
        self._cursors: dict[str, int] = {}
        self._holes: dict[str, list[Hole]] = {}
        self._events: dict[int, Message] = {}
        #: keys of _events, ascending
        self._sequences: list[int] = []
        self._keys: set[BatchKey] = set()
        self._decisions: dict[str, Message] = {}
        #: nothing else writes here
        self.damaged = DamagedRows()

    def __str__(self) -> str:
        return "an archive in memory"

    def append_events(
        self, records: Sequence[EventRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        for record in records:
            sequence = record.message.stream_sequence
            if sequence in self._events or record.key in self._keys:
                continue
            if record.key is not None:
                self._keys.add(record.key)
            self._events[sequence] = record.message
            insort(self._sequences, sequence)
        self._advance(KV_EVENTS, holes, cursor)

    def append_decisions(
        self, records: Sequence[DecisionRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        for record in records:
            self._decisions.setdefault(record.decision_id, record.message)
        self._advance(KV_DECISIONS, holes, cursor)

    def _advance(self, stream_name: str, holes: Sequence[Hole], cursor: int) -> None:
        self._cursors[stream_name] = max(cursor, self.cursor(stream_name))
        known = self._holes.setdefault(stream_name, [])
        known.extend(hole for hole in holes if hole not in known)
        known.sort()

    def cursor(self, stream_name: str) -> int:
        return self._cursors.get(stream_name, 0)

    def cut(self) -> Cut:
        decisions = [message.stream_sequence for message in self._decisions.values()]
        last = self._sequences[-1] if self._sequences else 0
        return Cut(self.cursor(KV_EVENTS), last, max(decisions, default=0))

    def read_events(self, first: int, last: int) -> Iterator[Message]:
        at = bisect_left(self._sequences, first)
        while at < len(self._sequences) and self._sequences[at] <= last:
            yield self._events[self._sequences[at]]
            at += 1

    def holes(self, stream_name: str) -> list[Hole]:
        return list(self._holes.get(stream_name, ()))

    def sequence_at(self, broker_ns: int) -> int:
        at = bisect_right(self._sequences, broker_ns, key=lambda s: self._events[s].broker_ns)
        return self._sequences[at - 1] if at else 0

    def decision(self, decision_id: str) -> Message:
        if decision_id not in self._decisions:
            raise UnknownDecision(decision_id)
        return self._decisions[decision_id]

    def decisions(self, before: int, limit: int) -> list[Message]:
        found = [m for m in self._decisions.values() if m.stream_sequence < before]
        return sorted(found, key=lambda message: -message.stream_sequence)[:limit]

    def look_for_damage(self) -> int:
        return len(self._events) + len(self._decisions)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
