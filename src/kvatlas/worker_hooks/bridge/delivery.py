"""What goes on of an engine's stream: batches in order, restarts, and doubts."""

from collections.abc import Callable

from kvatlas.worker_hooks.bridge.belief import SourceTrust
from kvatlas.worker_hooks.bridge.follow_options import FollowCounters
from kvatlas.worker_hooks.bridge.observed import FirstBlocks, Observed
from kvatlas.worker_hooks.bridge.payload_marks import PayloadMarks
from kvatlas.worker_hooks.bridge.stimuli import Deliver, Effect, Restarted


class Delivery:
    """Gathers effects, and remembers what was delivered of the incarnation that speaks."""

    def __init__(
        self,
        read: Callable[[bytes], Observed],
        num_blocks: int | None,
        counters: FollowCounters,
    ) -> None:
        self._read, self._counters = read, counters
        self._effects: list[Effect] = []
        #: sequence that comes next; None while joining
        self.next: int | None = None
        #: of the batches delivered in this incarnation, and in the one before it
        self._marks, self._earlier = PayloadMarks(), PayloadMarks()
        self._first_blocks = FirstBlocks()
        self.belief = SourceTrust(num_blocks)

    def drain_effects(self) -> list[Effect]:
        """Return what there is to do since the last time."""
        effects, self._effects = self._effects, []
        return effects

    def add_effect(self, effect: Effect) -> None:
        """Have something done after all so far."""
        self._effects.append(effect)

    def mark_at(self, sequence: int) -> int | None:
        """Return the mark of a batch delivered in this incarnation, None if not remembered."""
        return self._marks.get(sequence)

    def is_of_earlier(self, sequence: int, mark: int) -> bool:
        """Whether a batch was delivered in the incarnation before this one."""
        return self._earlier.get(sequence) == mark

    def observe(self, payload: bytes) -> tuple[Observed, bool]:
        """Return what is in a batch, and whether its prompts begin otherwise than before."""
        observed = self._read(payload)
        return observed, self._first_blocks.contradict(observed)

    def deliver(
        self, sequence: int, payload: bytes, mark: int, observed: Observed | None = None
    ) -> None:
        """Hand on a batch. The first one of an incarnation takes a doubt back."""
        if sequence == 0:
            self.trust(forgets=True)
        observed = observed or self._read(payload)
        self._marks.put(sequence, mark)
        self.next = sequence + 1
        self._counters.delivered += 1
        self.add_effect(Deliver(sequence, payload))
        self._first_blocks.observe(observed)
        self._effects += self.belief.observe(observed)

    def lose(self, first: int, end: int, why: str) -> None:
        """Doubt, since the batches from one to before another will not come."""
        self._counters.lost += end - first
        self.degrade(f"batches {first} to {end - 1}: {why}")

    def degrade(self, reason: str, *, is_for_absence: bool = False) -> None:
        """Say that what was told so far is doubtful."""
        self._effects += self.belief.degrade(reason, is_for_absence=is_for_absence)

    def trust(self, *, forgets: bool) -> None:
        """Take a doubt back, if there is one."""
        self._effects += self.belief.trust(forgets=forgets)

    def restart(self, reason: str) -> None:
        """Begin anew with another incarnation, of which nothing is known."""
        self._counters.restarts += 1
        self.add_effect(Restarted(reason))
        self._earlier, self._marks = self._marks, PayloadMarks()
        self.next = None
        self._first_blocks.clear()
        self.belief.begin_anew()
