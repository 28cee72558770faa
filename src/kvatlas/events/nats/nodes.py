"""Which node of a cluster a connection is on: when it is given up, and which are tried next.

A node that is cut off from the others, or full, keeps its clients, and does not answer what needs
a majority. A client cannot tell that from an election, which is over in 10 s. Pure, but for
the order of equal addresses, which is drawn.
"""

import random
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

#: longer than an election takes, which is 4 to 9 s
FIRST_PATIENCE_SECONDS = 10.0
#: where no node has a majority, moving helps nobody and costs every reader a new start
LAST_PATIENCE_SECONDS = 160.0
#: who asks less often than this is not waiting in between; longer than what else it may ask takes
PAUSE_SECONDS = 20.0
DEFAULT_PORT = 4222
SCHEMES = frozenset({"nats", "tls", "ws", "wss"})

#: without a scheme: [user@]host[:port]; a bare word may be the name of a service
_HOST_PORT = re.compile(r"(?:[^@/\s]+@)?(?:\[[^\s\]]+\]|[^\s/:@\[\]]+)(?::\d+)?")


class Silences:
    """For how long questions have been asked, and asked again, without an answer.

    Each counts for itself: a node may answer one for ever and another one never.
    """

    def __init__(self) -> None:
        #: question -> since when, and when it was given up last
        self._open: dict[str, tuple[float, float]] = {}

    def unanswered(self, question: str, asked_at: float, now: float) -> float:
        """Note that nobody answered; return for how long that has been so, in s."""
        since, until = self._open.get(question, (asked_at, asked_at))
        if asked_at - until > PAUSE_SECONDS:
            since = asked_at
        recent = {key: at for key, at in self._open.items() if now - at[1] <= PAUSE_SECONDS}
        self._open = recent | {question: (since, now)}
        return now - since

    def answered(self, question: str) -> None:
        """Note an answer, or that nobody waits for one."""
        self._open.pop(question, None)

    def forget(self) -> None:
        """Begin anew on another node."""
        self._open.clear()


class Patience:
    """For how long silence is borne: doubled for each node that is given up soon after another."""

    def __init__(self) -> None:
        self._seconds = FIRST_PATIENCE_SECONDS
        self._gave_up_at: float | None = None

    def is_over(self, silent_seconds: float, now: float) -> bool:
        """Say whether the node is to be given up, and if so bear more of the next."""
        gave_up_at = self._gave_up_at
        if gave_up_at is not None and now - gave_up_at > 2 * LAST_PATIENCE_SECONDS:
            self._seconds = FIRST_PATIENCE_SECONDS
        if silent_seconds < self._seconds:
            return False
        self._seconds, self._gave_up_at = min(2 * self._seconds, LAST_PATIENCE_SECONDS), now
        return True


class Servers:
    """The addresses that are known, given or announced by the cluster, as URLs.

    Several may lead to one node: those that led to the one that was given up come last.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        #: the node that was given up last, by the id that it says
        self._given_up = ""
        #: addresses known to lead there
        self._shunned: set[tuple[str, int]] = set()

    def add(self, urls: Iterable[str]) -> None:
        """Learn addresses."""
        known = {_address(url) for url in self.urls}
        for url in urls:
            if (address := _address(url)) not in known:
                known.add(address)
                self.urls.append(url)

    def in_order(self) -> list[str]:
        """Return all in the order in which they are to be tried."""
        urls = random.sample(self.urls, len(self.urls))
        return sorted(urls, key=lambda url: _address(url) in self._shunned)

    def has_another(self, url: str) -> bool:
        """Say whether there is an address besides one."""
        return any(_address(other) != _address(url) for other in self.urls)

    def give_up(self, url: str, node: str) -> None:
        """Try others than this node before it."""
        self._given_up, self._shunned = node, {_address(url)}

    def is_taken(self, url: str, node: str) -> bool:
        """Say whether the node that was reached is to be stayed on.

        The one that was given up is, once everything else was tried.
        """
        if not node or node != self._given_up or _address(url) in self._shunned:
            return True
        self._shunned.add(_address(url))
        return all(_address(other) in self._shunned for other in self.urls)


def is_address(text: str) -> bool:
    """Say whether a text has the form of a broker's address: scheme://host[:port] or host[:port].

    Whether host and port are any is for whoever connects to find out.
    """
    scheme, slashes, rest = text.strip().partition("://")
    if slashes:
        return scheme.lower() in SCHEMES and bool(rest)
    return _HOST_PORT.fullmatch(text.strip()) is not None


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts.hostname or "", parts.port or DEFAULT_PORT
