"""Neighbouring events of one chain become one: an engine reports blocks in small steps."""

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored, KvEvent

#: bounds of one event, far below what a broker accepts by default (1 MiB)
MAX_EVENT_BLOCKS = 4096
MAX_EVENT_TOKEN_BYTES = 256 * 1024


class EventCoalescer:
    """Collects events in order, joins those that say one thing and cuts those that are too large.

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
        #: more that fits into the event
        self._room_blocks = self._room_token_bytes = 0

    def stored(
        self, root: bytes, parent: bytes, hashes: bytes, tier: Tier, tokens: bytes | None
    ) -> None:
        """Add blocks that are held now; the first one's parent is `parent`."""
        num_blocks = len(hashes) // BLOCK_HASH_BYTES
        block_bytes = 0 if tokens is None else len(tokens) // num_blocks
        first = 0
        while first < num_blocks:
            if not (
                self._kind == "stored"
                and self._last_hash == parent
                and self._root == root
                and self._tier is tier
                and bool(self._tokens) == (tokens is not None)
                and self._room_blocks > 0
                and self._room_token_bytes >= block_bytes
            ):
                self._begin("stored", root, tier)
                self._parent = parent
            fitting = self._room_token_bytes // block_bytes if block_bytes else num_blocks
            end = min(first + self._room_blocks, first + max(fitting, 1), num_blocks)
            part = hashes[BLOCK_HASH_BYTES * first : BLOCK_HASH_BYTES * end]
            self._hashes.append(part)
            self._room_blocks -= end - first
            parent = self._last_hash = part[-BLOCK_HASH_BYTES:]
            if tokens is not None:
                self._tokens.append(tokens[block_bytes * first : block_bytes * end])
                self._room_token_bytes -= block_bytes * (end - first)
            first = end

    def removed(self, root: bytes, block_hash: bytes, tier: Tier) -> None:
        """Add a block that is no longer held."""
        if not (
            self._kind == "removed"
            and self._root == root
            and self._tier is tier
            and self._room_blocks > 0
        ):
            self._begin("removed", root, tier)
        self._hashes.append(block_hash)
        self._room_blocks -= 1

    def other(self, event: KvEvent) -> None:
        """Add an event that joins no other."""
        self._finish()
        self._done.append(event)

    def drain(self) -> list[KvEvent]:
        """Return all events added since the last call."""
        self._finish()
        done, self._done = self._done, []
        return done

    def _begin(self, kind: str, root: bytes, tier: Tier) -> None:
        self._finish()
        self._kind, self._root, self._tier = kind, root, tier
        self._room_blocks, self._room_token_bytes = MAX_EVENT_BLOCKS, MAX_EVENT_TOKEN_BYTES

    def _finish(self) -> None:
        hashes = b"".join(self._hashes)
        if self._kind == "stored":
            parent = None if self._parent == self._root else self._parent
            tokens = b"".join(self._tokens) if self._tokens else None
            self._done.append(BlockStored(self._root, hashes, parent, self._tier, tokens))
        elif self._kind == "removed":
            self._done.append(BlockRemoved(self._root, hashes, self._tier))
        self._kind, self._hashes, self._tokens = "", [], []
