"""What readers have to know before equal digests make us exact: a doubt, muted namespaces.

engine without a sign of life ---------.
whoever listens has missed something --+
blocks cut otherwise (block_size_mismatch.py) -----+
fields of events that nobody reads ----+--> doubt          --> Doubted
held and not reused, before wire 102 --+
muted, for readers before wire 101 ----'
muted                                                      --> NamespacesMuted (ADR-0012)
"""

from collections.abc import Iterable

from kvatlas.schemas.kv_events import KvEvent, NamespacesOverBudget, SourceDegraded
from kvatlas.worker_hooks.reporting.engine_state.block_size_mismatch import BlockSizeMismatches
from kvatlas.worker_hooks.reporting.engine_state.publication import Publication

#: names of unread fields that a doubt lists
MAX_FIELDS = 8


class DegradationNotices:
    """Why one instance is not exact. Call `publish_reason` after its mismatches have changed."""

    def __init__(
        self,
        publication: Publication,
        mismatches: BlockSizeMismatches,
        *,
        tells_mutes: bool,
        standing_doubt: str = "",
    ) -> None:
        """Without `tells_mutes`, readers that know no NamespacesMuted are told by a doubt."""
        self._publication, self._mismatches, self._tells_mutes = (
            publication,
            mismatches,
            tells_mutes,
        )
        self._standing_doubt = standing_doubt
        #: fields of the engine's events that may change what a block is, and that nobody reads;
        #: ends with the engine
        self._unread_fields: dict[str, None] = {}
        self._has_more_fields = False
        #: why whoever listens doubts; and what the fleet has been told, with our own reason
        self._said_doubt = self.doubt = ""
        #: why the engine is taken for stalled; empty while it lives
        self._stall = ""
        #: why namespaces are muted, as long as some are
        self._mute_reason = ""

    def restart(self) -> None:
        """Doubt nothing of what was said before; the new epoch is told without it."""
        self._said_doubt = ""
        self._unread_fields.clear()
        self._has_more_fields = False
        self._put_doubt()

    def set_reason(self, reason: str) -> None:
        """Tell what whoever listens says; without a reason it is taken back."""
        self._said_doubt = reason
        self.publish_reason()

    def doubt_fields(self, names: Iterable[str]) -> None:
        """Note fields that nobody reads, and tell it if one of them is new."""
        news = [name for name in names if name not in self._unread_fields]
        if not news or self._has_more_fields:
            return
        for name in news:
            if len(self._unread_fields) < MAX_FIELDS:
                self._unread_fields[name] = None
            else:
                self._has_more_fields = True
        self.publish_reason()

    def stall(self, reason: str) -> None:
        """Note that the engine gives no sign of life; without a reason it does again."""
        self._stall = reason
        self.publish_reason()

    def publish_reason(self) -> None:
        """Tell why the instance is doubtful: what was said, and what the edge has seen itself."""
        self._put_doubt()
        self._publication.other(SourceDegraded(self.doubt))

    def mark_over_budget(self, roots: Iterable[bytes], reason: str) -> None:
        """Mute namespaces for this reason, which holds for all that are muted."""
        for root in roots:
            self._publication.mark_over_budget(root)
        self._mute_reason = reason

    def events(self, *, even_none: bool) -> list[KvEvent]:
        """Return what is to be said of it next to digests.

        With `even_none` it is also said that there are none, for what readers know of some may be
        out of date, or somebody else's word.
        """
        self._put_doubt()
        events: list[KvEvent] = []
        if self.doubt or even_none:
            events.append(SourceDegraded(self.doubt))
        muted = self._publication.muted if self._tells_mutes else ()
        if muted or (even_none and self._tells_mutes):
            reason = self._mute_reason if muted else ""
            events.append(NamespacesOverBudget(b"".join(sorted(muted)), reason))
        return events

    def _put_doubt(self) -> None:
        muted = "" if self._tells_mutes else self._over_budget_reason()
        # the stall first: routers look for it at the beginning
        parts = (
            *(self._stall, self._said_doubt, self._mismatches.reason, self._unread_in_words()),
            *(self._standing_doubt, muted),
        )
        self.doubt = "; ".join(filter(None, parts))

    def _unread_in_words(self) -> str:
        if not self._unread_fields:
            return ""
        names = ", ".join(self._unread_fields) + (" and more" if self._has_more_fields else "")
        return (
            f"the engine's events have fields that this version does not read and that may "
            f"change what a block is: {names}; upgrade what runs beside the engine"
        )

    def _over_budget_reason(self) -> str:
        """Return which namespaces are muted, for readers that know no NamespacesMuted."""
        muted = sorted(self._publication.muted)
        if not muted:
            return ""
        more = f" and {len(muted) - 1} more" if len(muted) > 1 else ""
        return f"namespace {muted[0].hex()}{more} over its budget: {self._mute_reason}"
