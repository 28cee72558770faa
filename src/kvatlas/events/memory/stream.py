"""A log within one process, and what can go wrong with it on demand; used by `memory_bus`."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvatlas.events.bus import Message, StreamSpec
from kvatlas.events.streams import subject_matches
from kvatlas.schemas.errors import StreamRefused


class Faults(Struct):
    """What goes wrong with the next messages that are published, first come first hit."""

    #: lost after they were acknowledged: readers meet a hole in the stream
    drop_next: int = 0
    #: stored twice, as after an acknowledgement that was lost
    duplicate_next: int = 0
    #: stored and acknowledged after the next message that is not delayed, or at `release`
    delay_next: int = 0


class Follower(Protocol):
    """Who reads a stream."""

    def wake(self) -> None: ...


class MemoryStream:
    """A log: messages by sequence, holes where faults took one."""

    def __init__(self, spec: StreamSpec, faults: Faults, now_ns: Callable[[], int]) -> None:
        self.spec, self._faults, self._now_ns = spec, faults, now_ns
        #: sequence -> message, in the order of sequences
        self._messages: dict[int, Message] = {}
        self._num_bytes = 0
        #: subject -> its kept sequences, oldest first; only where the spec limits them
        self._kept_of: dict[str, deque[int]] = {}
        self.last = 0
        #: (message, what to call once it is stored)
        self._delayed: list[tuple[str, bytes, Callable[[], None]]] = []
        #: who is told of each message
        self.followers: set[Follower] = set()

    @property
    def first(self) -> int:
        return next(iter(self._messages), self.last + 1)

    def at_or_after(self, sequence: int) -> Message | None:
        """Return the first kept message from a sequence on."""
        return next(
            (self._messages[s] for s in range(sequence, self.last + 1) if s in self._messages),
            None,
        )

    def publish(self, subject: str, payload: bytes, on_stored: Callable[[], None]) -> None:
        """Store a message as the faults want it; raises StreamRefused."""
        if not any(subject_matches(pattern, subject) for pattern in self.spec.subjects):
            raise StreamRefused(f"{self.spec.name} does not store {subject}")
        faults = self._faults
        if faults.delay_next:
            faults.delay_next -= 1
            self._delayed.append((subject, payload, on_stored))
            return
        self._store(subject, payload)
        on_stored()
        self.release()

    def release(self) -> None:
        """Store what was delayed."""
        delayed, self._delayed = self._delayed, []
        for subject, payload, on_stored in delayed:
            self._store(subject, payload)
            on_stored()

    def _store(self, subject: str, payload: bytes) -> None:
        faults = self._faults
        copies = 1
        if faults.drop_next:
            faults.drop_next -= 1
            self.last += 1
            return
        if faults.duplicate_next:
            faults.duplicate_next -= 1
            copies = 2
        for _ in range(copies):
            self.last += 1
            self._messages[self.last] = Message(self.last, subject, payload, self._now_ns())
            self._num_bytes += len(payload)
            self._limit_subject(subject)
        self.trim()
        for follower in self.followers:
            follower.wake()

    def trim(self) -> None:
        """Delete what is over the limits, oldest first."""
        max_age_ns = int(self.spec.max_age_seconds * 1e9)
        oldest_ns = self._now_ns() - max_age_ns if max_age_ns else 0
        while self._messages and (
            self._num_bytes > self.spec.max_bytes
            or self._messages[self.first].broker_ns < oldest_ns
        ):
            self._delete(self.first)

    def purge(self, before_sequence: int) -> None:
        """Delete what is below a sequence."""
        while self._messages and self.first < before_sequence:
            self._delete(self.first)

    def _limit_subject(self, subject: str) -> None:
        limit = self.spec.max_messages_per_subject
        if not limit:
            return
        kept = self._kept_of.setdefault(subject, deque())
        kept.append(self.last)
        if len(kept) > limit:
            self._delete(kept[0])

    def _delete(self, sequence: int) -> None:
        message = self._messages.pop(sequence)
        self._num_bytes -= len(message.payload)
        kept = self._kept_of.get(message.subject)
        if kept is not None:
            kept.remove(sequence)
            if not kept:
                del self._kept_of[message.subject]
