"""What an engine's KV groups are for: a hybrid model caches each kind of attention apart.

    full      a prefix of n blocks needs all n of them
    windowed  it needs only the last few: those that the next token still attends to
    other     nobody has said what it is for; it decides nothing

A holder bit is (group, tier): bit `position of the group * NUM_TIERS + tier`.
"""

from enum import Enum

from kvatlas.schemas.ids import NUM_TIERS, Tier
from kvatlas.worker_hooks.raw_events import RawGroupSeen

#: kinds whose hits end anywhere that the window before is held. A state-space group needs its
#: last state only.
_WINDOWED_KINDS = frozenset(["sliding_window", "sliding_window_mla", "chunked_local_attention"])
_LAST_BLOCK_KINDS = frozenset(["mamba"])
#: more are taken as one that decides nothing; no engine has nearly as many
MAX_GROUPS = 64


class GroupUse(Enum):
    """What a group means for reuse."""

    full = "full"
    windowed = "windowed"
    other = "other"


class KvGroups:
    """The groups of one instance, as declared and as seen."""

    def __init__(self, full_groups: tuple[int, ...], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._position: dict[int, int] = {}
        self._use: dict[int, GroupUse] = {}
        #: windowed group -> leading blocks of its window, at least 1
        self.window_blocks: dict[int, int] = {}
        for group in full_groups:
            self._use[group] = GroupUse.full
            self._place(group)
        self._sum_up()

    @property
    def full_bits(self) -> int:
        """Shifted by a tier: the bits of all groups of which every block is needed there."""
        return self._full_bits

    def use_of(self, group: int) -> GroupUse:
        """Return what a group is for."""
        return self._use.get(group, GroupUse.other)

    def bit(self, group: int, tier: Tier) -> int:
        """Return the holder bit of a group in a tier; 0 for a group too many."""
        position = self._position.get(group)
        if position is None:
            position = self._place(group)
        return 0 if position < 0 else 1 << position * NUM_TIERS + tier

    def mask(self, tier: Tier) -> int:
        """Return the holder bits of all groups in a tier."""
        return sum(1 << position * NUM_TIERS + tier for position in self._position.values())

    def see(self, seen: RawGroupSeen) -> bool:
        """Learn what a group is for; return whether that changes anything."""
        before = (self.use_of(seen.group), self.window_blocks.get(seen.group))
        if self._place(seen.group) < 0:
            return False
        window = self._window_blocks(seen)
        self._use[seen.group] = GroupUse.windowed if window else GroupUse.full
        self.window_blocks.pop(seen.group, None)
        if window:
            self.window_blocks[seen.group] = window
        self._sum_up()
        return before != (self._use[seen.group], self.window_blocks.get(seen.group))

    def groups_of(self, holders: int, tier: Tier) -> list[int]:
        """Return the groups that hold a block in a tier."""
        return [
            group
            for group, position in self._position.items()
            if position >= 0 and holders >> position * NUM_TIERS + tier & 1
        ]

    def _window_blocks(self, seen: RawGroupSeen) -> int:
        """Return how many blocks a hit needs at its end; 0 where it needs all.

        The rule of vLLM's SlidingWindowManager: ceil((window - 1) / block). A group that cuts
        blocks of another size is asked for all, which promises less than it holds.
        """
        if seen.kind in _LAST_BLOCK_KINDS:
            return 1
        same_size = seen.block_tokens in (0, self._block_tokens)
        if seen.kind in _WINDOWED_KINDS and seen.window_tokens > 0 and same_size:
            return max(-(-(seen.window_tokens - 1) // self._block_tokens), 1)
        return 0

    def _place(self, group: int) -> int:
        known = self._position.get(group)
        if known is None:
            taken = len(self._position)
            if taken >= MAX_GROUPS:
                return -1
            known = self._position[group] = taken
        return known

    def _sum_up(self) -> None:
        self._full_bits = sum(
            1 << self._position[group] * NUM_TIERS
            for group, use in self._use.items()
            if use is GroupUse.full and group in self._position
        )
