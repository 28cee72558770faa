"""The default policy on a small fleet of caches: hits near one big cache, and nobody overworked."""

from collections import OrderedDict
from collections.abc import Iterator
from random import Random

from kvatlas.router.decision.loads import LoadTracker
from kvatlas.router.decision.plans import plan_for
from kvatlas.router.decision.policies import policy_named
from kvatlas.router.decision.requests import Report
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import a_candidate

NUM_WORKERS, BLOCK_TOKENS, CAPACITY = 8, 512, 200
Blocks = tuple[int, ...]


class Cache:
    """Blocks in the order of their last use; the tail of a prompt leaves before its head."""

    def __init__(self, capacity: int) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def match(self, blocks: Blocks) -> int:
        return next((n for n, b in enumerate(blocks) if b not in self._held), len(blocks))

    def use(self, blocks: Blocks) -> None:
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


def conversations(num_requests: int) -> Iterator[tuple[float, Blocks]]:
    """Yield (second, blocks): sessions below a few shared heads that grow with each turn."""
    random, numbers = Random(11), iter(range(10**9))
    heads = [tuple(next(numbers) for _ in range(3)) for _ in range(4)]
    sessions: list[Blocks] = []
    for n in range(num_requests):
        if len(sessions) < 40 or random.random() < 0.1:
            sessions.append(random.choice(heads))
        at = min(int(random.expovariate(1 / 15)), len(sessions) - 1)
        grown = sessions.pop(-1 - at)
        grown += tuple(next(numbers) for _ in range(random.randint(1, 8)))
        if len(grown) < 30:
            sessions.append(grown)
        yield n * 0.3, grown


def play(policy_name: str, num_requests: int) -> tuple[float, float, float]:
    """Return the hit ratio, that of one cache of the fleet's size, and max over mean work."""
    settings = RouterSettings(seed=1)
    policy, loads = policy_named(policy_name, settings), LoadTracker(settings)
    caches, big = [Cache(CAPACITY) for _ in range(NUM_WORKERS)], Cache(CAPACITY * NUM_WORKERS)
    work, asked, hits, big_hits = [0] * NUM_WORKERS, 0, 0, 0
    for turn, (now, blocks) in enumerate(conversations(num_requests)):
        candidates = []
        for n, cache in enumerate(caches):
            load = loads.of(InstanceId(f"w{n}", 0), 1, "m", now)
            candidates.append(
                a_candidate(
                    f"w{n}",
                    block_tokens=BLOCK_TOKENS,
                    kv_class=0,
                    held=(cache.match(blocks), 0, 0, 0, 0),
                    queued_ms=load.queued_ms,
                    work_ms=load.work_ms,
                )
            )
        question = Question(len(blocks) * BLOCK_TOKENS, turn, turn * 31, tuple(candidates))
        choice = policy.choose(question)
        plan = plan_for(question, choice.chosen, choice.prices[choice.chosen], settings)
        loads.routed(str(turn), InstanceId(f"w{choice.chosen}", 0), plan, 0.0, now)
        loads.done(str(turn), Report(computed_tokens=plan.compute_tokens), now)
        asked += len(blocks)
        hits += plan.reuse_blocks
        big_hits += big.match(blocks)
        work[choice.chosen] += len(blocks) - plan.reuse_blocks
        caches[choice.chosen].use(blocks)
        big.use(blocks)
    return hits / asked, big_hits / asked, max(work) * NUM_WORKERS / sum(work)


def test_hits_are_those_of_one_big_cache_and_work_is_even() -> None:
    hits, big_hits, max_over_mean = play("predicted_ttft", 6_000)
    assert big_hits > 0.5
    assert hits >= 0.97 * big_hits
    assert max_over_mean <= 1.03


def test_policies_that_ignore_the_cache_lose_most_of_it() -> None:
    hits, big_hits, _ = play("least_loaded", 1_000)
    assert hits < 0.6 * big_hits
