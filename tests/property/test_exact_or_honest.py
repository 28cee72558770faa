"""The promise: at any moment an instance's answer is the truth, or its trust is not `exact`.

    workers (the truth) --batches--> bus that loses, repeats, delays --log--> two replicas

Workers restart, give inventories when they like, say too much, are muted, lose their lease; a
replica restarts from a snapshot of the other one, or from a log that has lost its beginning. When
everything is calm again all instances are exact, and both replicas and the truth have equal
digests.

    pytest tests/property/test_exact_or_honest.py                    what `make test` runs
    pytest tests/property/test_exact_or_honest.py --soak 900         examples for so many seconds
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvatlas.events.bus import Message
from kvatlas.events.codec import encode
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import (
    Effect,
    HoleSeen,
    LeaseExpired,
    Proposed,
    PublishControl,
    RequestInventory,
    stimulus_of,
)
from kvatlas.schemas.digest import digest_of, split_hashes
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    EventBatch,
    KvEvent,
    NamespacesOverBudget,
    WorkerDown,
)
from testkit.builders import (
    ROOT,
    a_batch,
    digest,
    hashes,
    inventory,
    removed,
    stored,
    subject_of,
    up,
)
from testkit.indexes import tiny_index

NAMES = (InstanceId("w1", 0), InstanceId("w1", 1), InstanceId("w2", 0), InstanceId("w3", 0))
TIERS = (Tier.hbm, Tier.dram)
MAX_BLOCK = 9
CHAINS = [hashes(*range(first, MAX_BLOCK + 1)) for first in range(1, 5)]
SECOND = 1_000_000_000

Held = dict[Tier, frozenset[int]]
NOTHING: Held = dict.fromkeys(Tier, frozenset())

workers = st.sampled_from(range(len(NAMES)))
blocks = st.lists(st.integers(1, MAX_BLOCK), min_size=1, max_size=5)
tiers = st.sampled_from(TIERS)


class Worker:
    """The truth about one instance, and its batches on their way to the log."""

    def __init__(self, name: InstanceId) -> None:
        self.name = name
        self.epoch = 0
        self.is_up = False
        self.queue: deque[EventBatch] = deque()
        #: (epoch, sequence) -> what was held right after that batch, and what had been told of it
        self.truth: dict[tuple[int, int], tuple[Held, Held]] = {}
        self.start()

    def start(self) -> None:
        """Begin an epoch with nothing."""
        self.epoch += 1
        self.seq = 0
        self.held, self.told = dict(NOTHING), dict(NOTHING)
        self.is_muted = self.has_been_muted = False
        self.is_up = True
        self.say(up())

    def say(self, *events: KvEvent) -> None:
        """Put a batch into the queue; it stands for what is held now."""
        self.seq += 1
        name = self.name
        batch = a_batch(*events, worker=name.worker, rank=name.rank, epoch=self.epoch, seq=self.seq)
        self.queue.append(batch)
        self.truth[self.epoch, self.seq] = dict(self.held), dict(self.told)

    def store(self, tier: Tier, numbers: list[int]) -> None:
        self.held[tier] |= frozenset(numbers)
        if not self.is_muted:
            self.told[tier] |= frozenset(numbers)
            self.say(stored(*numbers, tier=tier))

    def remove(self, tier: Tier, numbers: list[int]) -> None:
        self.held[tier] -= frozenset(numbers)
        self.told[tier] -= frozenset(numbers)
        self.say(removed(*numbers, tier=tier))

    def mute(self) -> None:
        """Tell of the namespace no more than what leaves it."""
        self.is_muted = self.has_been_muted = True
        self.say(*self.notices())

    def unmute(self) -> None:
        """Tell all that was withheld."""
        self.is_muted, self.told = False, dict(self.held)
        self.give_inventory()

    def notices(self) -> list[KvEvent]:
        if not self.has_been_muted:
            return []
        return [NamespacesOverBudget(ROOT, "why") if self.is_muted else NamespacesOverBudget(b"")]

    def clear(self, tier: Tier | None) -> None:
        for each in Tier if tier is None else (tier,):
            self.held[each] = self.told[each] = frozenset()
        self.say(AllBlocksCleared(tier))

    def tell_digests(self, at_once: int = len(Tier)) -> None:
        *digests, last = [digest(*self.told[tier], tier=tier) for tier in Tier]
        self.say_in_parts(digests, at_once)
        self.say(*self.notices(), last)  # whoever has all digests has the degradation notices too

    def give_inventory(self, at_once: int = len(Tier), part_blocks: int = MAX_BLOCK) -> None:
        as_of, told = self.seq, list[KvEvent]()
        for tier in Tier:
            numbers = sorted(self.told[tier])
            cuts = range(0, len(numbers) or 1, part_blocks)
            for part, at in enumerate(cuts, 1):
                some = numbers[at : at + part_blocks]
                told.append(inventory(*some, as_of=as_of, tier=tier, part=part, parts=len(cuts)))
        first, rest = told[:at_once], told[at_once:]
        self.say(up(), *first)
        self.say_in_parts(rest, at_once)
        self.tell_digests(at_once)

    def say_in_parts(self, events: Sequence[KvEvent], at_once: int) -> None:
        for first in range(0, len(events), at_once):
            self.say(*events[first : first + at_once])

    def leave(self) -> None:
        self.say(WorkerDown("end"))
        self.is_up = False


class Replica:
    """One fold of the log."""

    def __init__(self, state: IndexState) -> None:
        self.state = state

    def take(self, message: Message) -> list[Effect]:
        if message.stream_sequence <= self.state.stream_sequence:
            return []
        effects: list[Effect] = []
        expected = self.state.stream_sequence + 1
        if message.stream_sequence > expected:
            effects += self.state.handle(HoleSeen(expected, message.stream_sequence))
        return effects + self.state.handle(stimulus_of(message))


class Fleet(RuleBasedStateMachine):
    """What happens, and what has to hold after each step."""

    #: histories walked, and times that an exact answer was compared with the truth
    num_histories = num_exact = 0

    @initialize()
    def begin(self) -> None:
        Fleet.num_histories += 1
        self.workers = [Worker(name) for name in NAMES]
        self.log: list[Message] = []
        self.first_kept = 1
        self.one, self.two = (
            Replica(IndexState(tiny_index())),
            Replica(IndexState(ReferenceIndex())),
        )
        #: how far the second replica has read
        self.read = 0
        self.snapshot: dict[str, bytes] | None = None
        self.asked: set[InstanceId] = set()
        self.stored: list[EventBatch] = []
        self.lost: list[EventBatch] = []

    # --- workers --------------------------------------------------------------------------------

    @rule(who=workers, tier=tiers, numbers=blocks)
    def store(self, who: int, tier: Tier, numbers: list[int]) -> None:
        if self.workers[who].is_up:
            self.workers[who].store(tier, numbers)

    @rule(who=workers, tier=tiers, numbers=blocks)
    def remove(self, who: int, tier: Tier, numbers: list[int]) -> None:
        if self.workers[who].is_up:
            self.workers[who].remove(tier, numbers)

    @rule(who=workers, tier=st.sampled_from([None, *TIERS]))
    def clear(self, who: int, tier: Tier | None) -> None:
        if self.workers[who].is_up:
            self.workers[who].clear(tier)

    @rule(who=workers, at_once=st.integers(1, len(Tier)))
    def tell_digests(self, who: int, at_once: int) -> None:
        if self.workers[who].is_up:
            self.workers[who].tell_digests(at_once)

    @rule(who=workers, at_once=st.integers(1, len(Tier)), part_blocks=st.integers(1, 4))
    def give_inventory(self, who: int, at_once: int, part_blocks: int) -> None:
        if self.workers[who].is_up:
            self.workers[who].give_inventory(at_once, part_blocks)

    @rule(who=workers, numbers=blocks)
    def mute_or_unmute(self, who: int, numbers: list[int]) -> None:
        worker = self.workers[who]
        if worker.is_up:
            if worker.is_muted:
                worker.unmute()
            else:
                worker.mute()
                worker.store(Tier.hbm, numbers)
                worker.tell_digests()

    @rule(who=workers, loses_queue=st.booleans(), is_clean=st.booleans())
    def restart(self, who: int, loses_queue: bool, is_clean: bool) -> None:
        worker = self.workers[who]
        if is_clean and worker.is_up:
            worker.leave()
        if loses_queue:
            worker.queue.clear()
        worker.start()

    # --- the bus --------------------------------------------------------------------------------

    @rule(who=workers, count=st.integers(1, 4))
    def deliver(self, who: int, count: int) -> None:
        queue = self.workers[who].queue
        for _ in range(min(count, len(queue))):
            batch = queue.popleft()
            self.stored.append(batch)
            self.append(subject_of(batch), encode(batch))

    @rule(who=workers)
    def lose(self, who: int) -> None:
        if self.workers[who].queue:
            self.lost.append(self.workers[who].queue.popleft())

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        if self.stored:
            batch = data.draw(st.sampled_from(self.stored))
            self.append(subject_of(batch), encode(batch))

    @rule()
    def land_late(self) -> None:
        if self.lost:
            batch = self.lost.pop(0)
            self.append(subject_of(batch), encode(batch))

    @rule(keep=st.integers(0, 5))
    def lose_the_beginning(self, keep: int) -> None:
        self.first_kept = max(self.first_kept, len(self.log) + 1 - keep)

    def append(self, subject: str, payload: bytes) -> None:
        at = len(self.log) + 1
        message = Message(at, subject, payload, at * SECOND)
        self.log.append(message)
        for effect in self.one.take(message):
            if isinstance(effect, RequestInventory):
                self.asked.add(effect.instance)

    # --- replicas -------------------------------------------------------------------------------

    @rule(count=st.integers(1, 9))
    def read_on(self, count: int) -> None:
        """Let the second replica read; what is no longer kept is a hole for it."""
        self.read = max(self.read, self.first_kept - 1)
        for message in self.log[self.read : self.read + count]:
            self.two.take(message)
        self.read = min(self.read + count, len(self.log))

    @rule()
    def take_a_snapshot(self) -> None:
        parts = self.one.state.export()()
        self.snapshot = {name: bytes(part) for name, part in parts.items()}

    @rule(has_snapshot=st.booleans())
    def restart_a_replica(self, has_snapshot: bool) -> None:
        state = IndexState(tiny_index())
        if has_snapshot and self.snapshot is not None:
            state.restore({name: memoryview(part) for name, part in self.snapshot.items()})
        self.two, self.read = Replica(state), state.stream_sequence

    @rule(who=workers, kind=st.sampled_from(["forgotten", "throttled", "released", "expired"]))
    def propose(self, who: int, kind: str) -> None:
        """Let the first replica find that something has to be done, right or wrong."""
        name = NAMES[who]
        known = self.one.state.instance(name)
        if known is None or not known.epoch:
            return
        if kind == "expired":
            stimulus: LeaseExpired | Proposed = LeaseExpired(name, known.epoch, 0)
            # a worker that is declared dead hears of it, and starts anew
            if self.workers[who].epoch == known.epoch:
                self.workers[who].is_up = False
        else:
            stimulus = Proposed(name, known.epoch, kind, 0)
        self.publish(self.one.state.handle(stimulus))

    def publish(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, PublishControl):
                self.append(subject_of(effect.record), encode(effect.record))

    # --- the promise ----------------------------------------------------------------------------

    @invariant()
    def exact_answers_are_true(self) -> None:
        if not hasattr(self, "workers"):
            return
        for replica in (self.one, self.two):
            for worker in self.workers:
                self.check(replica.state, worker)

    def check(self, state: IndexState, worker: Worker) -> None:
        view = state.instance(worker.name)
        if view is None or view.trust is not Trust.exact or not view.epoch:
            return
        Fleet.num_exact += 1
        held, told = worker.truth[view.epoch, view.seq]
        for tier in Tier:
            assert view.digests.get(tier, (0, 0)) == truth_digest(told[tier]), worker.name
        # of a muted namespace it says itself that it holds more
        everything = frozenset[int]().union(*(told if view.muted else held).values())
        for chain in CHAINS:
            found = {m.instance: m.num_blocks for m in state.match(chain)}
            assert found.get(worker.name, 0) == leading(chain, everything)

    # --- calm -----------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        self.calm_down()
        for replica in (self.one, self.two):
            state = replica.state
            views = {view.instance: view for view in state.instances()}
            for worker in self.workers:
                assert views[worker.name].trust is Trust.exact, views[worker.name].trust_reasons
                assert views[worker.name].muted == {}
                assert (views[worker.name].epoch, views[worker.name].seq) == (
                    worker.epoch,
                    worker.seq,
                )
                self.check(state, worker)
        assert self.one.state.state_digest() == self.two.state.state_digest()

    def calm_down(self) -> None:
        """Stop all faults, and let what is meant to heal the fleet do so."""
        for worker in self.workers:
            if not worker.is_up:
                worker.start()
            if worker.is_muted:
                worker.unmute()
        for _ in range(3):
            # each releases whom it holds throttled: the other's record may have been lost to it
            for state in (self.one.state, self.two.state):
                for instance, epoch, *_ in state.fleet.throttled():
                    self.publish(state.handle(Proposed(instance, epoch, "released", 0)))
            for who, worker in enumerate(self.workers):
                worker.tell_digests()
                self.deliver(who, len(worker.queue))
            self.read_on(len(self.log))
            for who in self.in_doubt():
                self.workers[who].give_inventory()
                self.deliver(who, len(self.workers[who].queue))
            self.read_on(len(self.log))

    def in_doubt(self) -> Iterator[int]:
        for who, name in enumerate(NAMES):
            states = self.one.state, self.two.state
            # who is not known is asked as well, as long as it has a lease
            if any(s.fleet.wants_inventory(name) or s.instance(name) is None for s in states):
                yield who


def truth_digest(numbers: frozenset[int]) -> tuple[int, int]:
    return tuple(digest_of(split_hashes(hashes(*numbers))))  # type: ignore[return-value]


def leading(chain: bytes, held: frozenset[int]) -> int:
    count = 0
    for block in split_hashes(chain):
        if int.from_bytes(block, "big") not in held:
            break
        count += 1
    return count


@pytest.mark.timeout(0)  # it ends by itself, and a soak when it was told to
def test_whatever_happens_an_exact_answer_is_true(request: pytest.FixtureRequest) -> None:
    seconds = float(request.config.getoption("--soak") or 0)
    until = time.monotonic() + seconds
    chosen = settings(max_examples=2_000, stateful_step_count=50, deadline=None)
    if seconds:
        chosen = settings(chosen, max_examples=2_000, database=None)
    while True:
        run_state_machine_as_test(Fleet, settings=chosen)
        if time.monotonic() >= until:
            break
    if seconds:
        print(f"{Fleet.num_histories} histories, {Fleet.num_exact} exact answers, all true")
