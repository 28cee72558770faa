"""What came into a serve pool and what left it, as the sidecar sees it from outside."""

from collections import Counter

from kvatlas.worker_hooks.transfer.pool import ServePool

#: slots looked at in one go for blocks that left without another one taking their place
_LOOK_SLOTS = 4096


class PoolWatch:
    """Follows the blocks of a pool. A block in two slots is there until both are another's."""

    def __init__(self, pool: ServePool) -> None:
        self._pool = pool
        self._position = (0, 0)
        self._seen: list[bytes | None] = [None] * pool.num_slots
        self._copies: Counter[bytes] = Counter()
        self._next_look = 0

    def poll(self) -> tuple[list[bytes], list[bytes]]:
        """Return the blocks that came and those that left since the last look.

        O(what became held), and a part of the slots in turn for what was only evicted.
        """
        changed, self._position = self._pool.held_since(self._position)
        every = range(self._pool.num_slots)
        first, self._next_look = self._next_look, self._next_look + _LOOK_SLOTS
        if self._next_look >= len(every):
            self._next_look = 0
        came: list[bytes] = []
        left: list[bytes] = []
        for slot in [*(every if changed is None else changed), *every[first : first + _LOOK_SLOTS]]:
            before, now = self._seen[slot], self._pool.hash_of(slot)
            if before == now:
                continue
            self._seen[slot] = now
            if now is not None:
                self._copies[now] += 1
                if self._copies[now] == 1:
                    came.append(now)
            if before is not None:
                self._copies[before] -= 1
                if not self._copies[before]:
                    del self._copies[before]
                    left.append(before)
        both = set(came) & set(left)
        return [b for b in came if b not in both], [b for b in left if b not in both]
