"""Blocks that an engine holds and cuts or names otherwise than configured: they get no name."""

from collections.abc import Iterable

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.worker_hooks.raw_events import EngineHash, RawStored

#: more are not told apart, and then only the end of all of them ends the doubt
MAX_MISMATCHES = 65_536
#: short blocks remembered until another one follows them
MAX_SHORT = 1024


class BlockSizeMismatches:
    """Notes stores of blocks of another window, and why that makes the instance doubtful.

    A window has a size and a lookahead. `reason` names both values and the flag; empty while
    nothing is wrong. It stays until a block of the right window comes while no mismatch is held.
    Copies of a block are not counted.

    A block that came alone and is shorter than told may be the last one of a prompt, which is no
    block-size mismatch; once another one follows it, it was a whole one.
    """

    def __init__(self, descriptor: NamespaceDescriptor) -> None:
        self._block_tokens = descriptor.block_tokens
        self._lookahead_tokens = descriptor.lookahead_tokens
        #: (engine hash, holder bit) of those held
        self._held: set[tuple[EngineHash, int]] = set()
        #: whether some held ones had no room
        self._has_more = False
        #: blocks that may be the last ones of their prompts; the oldest leave first
        self._short: dict[EngineHash, None] = {}
        self.reason = ""

    @property
    def hashes(self) -> set[EngineHash]:
        """The engine's hashes of those held."""
        return {engine_hash for engine_hash, _ in self._held}

    def note(self, event: RawStored, bit: int) -> None:
        """Note a store that does not fit, if whole blocks of another window explain it."""
        num_blocks = len(event.engine_hashes)
        found, rest = divmod(len(event.tokens), 4 * num_blocks or 1)
        if rest or not found or not num_blocks:
            return
        if found == self._block_tokens:
            self._take_lookahead(event, bit)
            return
        whole = event.engine_hashes
        if len(whole) == 1 and found < self._block_tokens:
            self._remember_short(whole[0])
            if event.parent not in self._short:
                return
            whole = (event.parent, whole[0])
        for engine_hash in whole:
            self._hold(engine_hash, bit)
        group = f" of KV group {event.group}" if event.group else ""
        self.reason = self.reason or (
            f"the engine's blocks{group} have {found} tokens, told were {self._block_tokens}: "
            f"start the bridge or sidecar with --block-tokens {found}"
        )

    def _take_lookahead(self, event: RawStored, bit: int) -> None:
        """Note a store whose blocks cover another number of tokens behind them."""
        found, rest = divmod(len(event.lookahead), 4 * len(event.engine_hashes))
        if rest:
            return
        for engine_hash in event.engine_hashes:
            self._hold(engine_hash, bit)
        self.reason = self.reason or (
            f"the engine's block hashes cover {found} tokens behind a block, configured are "
            f"{self._lookahead_tokens}: start the bridge or sidecar with --lookahead-tokens {found}"
        )

    def _remember_short(self, engine_hash: EngineHash) -> None:
        self._short[engine_hash] = None
        if len(self._short) > MAX_SHORT:
            del self._short[next(iter(self._short))]

    def _hold(self, engine_hash: EngineHash, bit: int) -> None:
        if len(self._held) < MAX_MISMATCHES:
            self._held.add((engine_hash, bit))
        elif (engine_hash, bit) not in self._held:
            self._has_more = True

    def fitting(self, event: RawStored, bit: int) -> None:
        """Note a store of the right size."""
        self._held.difference_update((engine_hash, bit) for engine_hash in event.engine_hashes)
        if not self._held and not self._has_more:
            self.reason = ""

    def remove(self, engine_hash: EngineHash, bit: int) -> bool:
        """Hold a block no longer; return whether it was held."""
        if (engine_hash, bit) not in self._held:
            return False
        self._held.remove((engine_hash, bit))
        return True

    def forget(self, engine_hashes: Iterable[EngineHash]) -> None:
        """Hold none of these."""
        gone = set(engine_hashes)
        self._held = {pair for pair in self._held if pair[0] not in gone}

    def empty(self, bits: int | None) -> None:
        """Hold nothing under these holder bits; nothing at all if None."""
        if bits is None:
            self._held.clear()
            self._short.clear()
            self._has_more = False
        else:
            self._held = {pair for pair in self._held if not pair[1] & bits}

    def restart(self) -> None:
        """Begin with another incarnation, of which nothing is known."""
        self.empty(None)
        self.reason = ""
