"""Neighbouring events of one chain become one: an engine reports blocks in small steps."""

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored, KvEvent

#: blocks of one merged event: 64 KiB of hashes
MAX_EVENT_BLOCKS = 4096


class EventMerger:
    """Collects events in order and joins those that say one thing.

    A store joins the one before it if it continues its chain, a removal if it is of the same root
    and tier. Nothing changes places.
    """

    def __init__(self) -> None:
        self._done: list[KvEvent] = []
        #: the event that may still grow: "stored", "removed" or nothing
        self._kind = ""
        self._root = b""
        self._parent = b""
        self._tier = Tier.hbm
        self._hashes: list[bytes] = []
        self._tokens: list[bytes] = []
        self._last_hash = b""
        self._num_bytes = 0

    def stored(
        self, root: bytes, parent: bytes, hashes: bytes, tier: Tier, tokens: bytes | None
    ) -> None:
        """Add blocks that are held now; the first one's parent is `parent`."""
        if not (
            self._kind == "stored"
            and self._last_hash == parent
            and self._root == root
            and self._tier is tier
            and bool(self._tokens) == (tokens is not None)
            and self._num_bytes + len(hashes) <= MAX_EVENT_BLOCKS * BLOCK_HASH_BYTES
        ):
            self._begin("stored", root, tier)
            self._parent = parent
        self._hashes.append(hashes)
        self._num_bytes += len(hashes)
        self._last_hash = hashes[-BLOCK_HASH_BYTES:]
        if tokens is not None:
            self._tokens.append(tokens)

    def removed(self, root: bytes, block_hash: bytes, tier: Tier) -> None:
        """Add a block that is no longer held."""
        if not (
            self._kind == "removed"
            and self._root == root
            and self._tier is tier
            and len(self._hashes) < MAX_EVENT_BLOCKS
        ):
            self._begin("removed", root, tier)
        self._hashes.append(block_hash)

    def other(self, event: KvEvent) -> None:
        """Add an event that joins no other."""
        self._finish()
        self._done.append(event)

    def take(self) -> list[KvEvent]:
        """Return all events added since the last call."""
        self._finish()
        done, self._done = self._done, []
        return done

    def _begin(self, kind: str, root: bytes, tier: Tier) -> None:
        self._finish()
        self._kind, self._root, self._tier = kind, root, tier

    def _finish(self) -> None:
        hashes = b"".join(self._hashes)
        if self._kind == "stored":
            parent = None if self._parent == self._root else self._parent
            tokens = b"".join(self._tokens) if self._tokens else None
            self._done.append(BlockStored(self._root, hashes, parent, self._tier, tokens))
        elif self._kind == "removed":
            self._done.append(BlockRemoved(self._root, hashes, self._tier))
        self._kind, self._hashes, self._tokens, self._num_bytes = "", [], [], 0
