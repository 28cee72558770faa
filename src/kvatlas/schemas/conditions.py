"""What is wrong with a process while it goes on: named conditions, each present or over.

    conditions.begin("log_not_stored", "KV_EVENTS: no answer for 6 s")     as often as it is found
    conditions.end("log_not_stored")                                       again is no error

A part that finds something wrong that lasts begins a condition, and ends it when it is over. The
process shows all of them in one way: a log line at the beginning, at another kind of reason and at
the end (`log_changes`), `/readyz`, the metric `kv_condition` and the live page.
"""

import logging
import time
from collections.abc import Callable

from msgspec import Struct

#: the process was asked to end, and serves on for a time
DRAINING = "draining"
#: a router process has ended, or answers no more, and is started again; `_` and its number follow
ROUTER_DOWN = "router_down"
#: what is published to the log is not stored; answers go on and grow old
LOG_NOT_STORED = "log_not_stored"
#: decisions are not stored
DECISIONS_NOT_STORED = "decisions_not_stored"
#: what the log has is not written into the archive
ARCHIVE_NOT_WRITTEN = "archive_not_written"
#: the embedded broker says that it stores nothing
BROKER_UNHEALTHY = "broker_unhealthy"
#: the broker has not made a stream that the process needs
STREAM_NOT_DECLARED = "stream_not_declared"
#: the broker cannot be reached, or does not let us in
BROKER_AWAY = "broker_away"
#: the broker denies a permission that the process needs
PERMISSION_DENIED = "permission_denied"
#: a stream or bucket exists with other limits than the settings say
LIMITS_DIFFER = "limits_differ"


class Condition(Struct, frozen=True):
    """Something that is wrong since `since`, in seconds of the clock of its `Conditions`."""

    name: str
    reason: str
    since: float
    #: the process cannot do what it is there for: it is not ready
    is_blocking: bool = False


class ConditionChange(Struct, frozen=True):
    """A condition begins, has another reason, or is over."""

    condition: Condition
    is_over: bool
    #: for how long it has lasted
    seconds: float


OnChange = Callable[[ConditionChange], None]


class Conditions:
    """The conditions of one process, by name. Names are few: they are labels of a metric."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._present: dict[str, Condition] = {}
        #: name -> source -> reason, is_blocking
        self._findings: dict[str, dict[str, tuple[str, bool]]] = {}
        #: all names that ever began, in that order
        self._known: dict[str, None] = {}
        self._listeners: list[OnChange] = []

    def on_change(self, listener: OnChange) -> None:
        """Call back when a condition begins, has another reason, or is over."""
        self._listeners.append(listener)

    def begin(self, name: str, reason: str, *, source: str = "", is_blocking: bool = False) -> bool:
        """Note that a condition is present; return whether that, or its reason, is news.

        Parts that may find the same thing each name themselves as its `source`, and it is over
        when it is over for each of them.
        """
        self._findings.setdefault(name, {})[source] = (reason, is_blocking)
        return self._settle(name)

    def end(self, name: str, *, source: str = "") -> bool:
        """Note that a condition is over, for this source; return whether that is news."""
        findings = self._findings.get(name)
        if findings is None or findings.pop(source, None) is None:
            return False
        return self._settle(name)

    def _settle(self, name: str) -> bool:
        was, findings = self._present.get(name), self._findings[name]
        if not findings:
            del self._findings[name]
            if was is not None:
                del self._present[name]
                self._publish(was, is_over=True)
            return was is not None
        reason = "; ".join(dict.fromkeys(reason for reason, _ in findings.values()))
        is_blocking = any(is_blocking for _, is_blocking in findings.values())
        if was is not None and (was.reason, was.is_blocking) == (reason, is_blocking):
            return False
        since = self._clock() if was is None else was.since
        self._present[name] = found = Condition(name, reason, since, is_blocking)
        self._known[name] = None
        self._publish(found, is_over=False)
        return True

    def get(self, name: str) -> Condition | None:
        """Return a condition that is present."""
        return self._present.get(name)

    @property
    def present(self) -> tuple[Condition, ...]:
        """Those that are present, the oldest first."""
        return tuple(sorted(self._present.values(), key=lambda each: each.since))

    @property
    def reasons(self) -> dict[str, str]:
        """Name -> reason of those that are present, the oldest first."""
        return {each.name: each.reason for each in self.present}

    @property
    def why_not_ready(self) -> str:
        """The reasons of those that are blocking; empty where none is."""
        return "; ".join(each.reason for each in self.present if each.is_blocking)

    @property
    def states(self) -> dict[str, bool]:
        """Name -> whether it is present, of all that were present since the start."""
        return {name: name in self._present for name in self._known}

    def _publish(self, condition: Condition, *, is_over: bool) -> None:
        seconds = self._clock() - condition.since
        for listener in tuple(self._listeners):
            listener(ConditionChange(condition, is_over, seconds))


class Problems:
    """What goes wrong in one way: the reason of a condition, in which each text stands once."""

    def __init__(self, conditions: Conditions, name: str, limit: int = 4) -> None:
        """At most `limit` texts are kept, so that what changes without end is not repeated so."""
        self._conditions, self._name, self._limit = conditions, name, limit
        self._texts: dict[str, None] = {}

    def __str__(self) -> str:
        return "; ".join(self._texts)

    def add(self, text: str) -> None:
        """Note what has gone wrong, maybe again."""
        if len(self._texts) < self._limit:
            self._texts[text] = None
        self._conditions.begin(self._name, str(self))

    def end(self) -> None:
        """Note that all of it is over."""
        self._texts.clear()
        self._conditions.end(self._name)


def log_changes(conditions: Conditions, logger: logging.Logger) -> None:
    """Write a line when a condition begins, when its reason becomes another one, and at its end."""

    def write(change: ConditionChange) -> None:
        condition = change.condition
        if change.is_over:
            logger.warning("%s is over after %.1f s", condition.name, change.seconds)
        else:
            logger.warning("%s: %s", condition.name, condition.reason)

    conditions.on_change(write)
