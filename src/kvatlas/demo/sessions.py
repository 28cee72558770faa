"""The built-in workload: agent-like sessions, seeded, so that a demo needs no trace.

Each session starts from one of a few shared system prompts, grows by a turn at a time (the user's
text, then the answer of the turn before), pauses to think between turns, and now and then fans out:
several sub-agents start together below all that their parent has said so far, more than the worker
that holds it can serve at once. Sessions start by a Poisson process. The shape follows public agent
traces: long shared heads, growing tails, returns.
"""

import heapq
from itertools import count
from random import Random

from kvatlas.demo.prompts import TRACE_BLOCK_TOKENS, PlayedRequest

NUM_SYSTEM_PROMPTS = 24
SESSION_GAP_MS = 2_000.0
THINK_MS = 20_000.0
FAN_OUT_SHARE = 0.06
#: sub-agents that start together
FAN_OUT = (4, 8)


class _Session:
    """One growing prompt: the block ids so far and the tokens in the last, unfinished one."""

    def __init__(
        self,
        rng: Random,
        ids: "count[int]",
        head: tuple[int, ...],
        turns: int,
        fans_out: bool = True,
    ) -> None:
        self._rng, self._ids = rng, ids
        self.turns_left, self.fans_out = turns, fans_out
        self._blocks, self._tokens = list(head), len(head) * TRACE_BLOCK_TOKENS

    def turn(self, now_ms: float) -> PlayedRequest:
        """Return the next request; its answer becomes part of the prompt after it."""
        self._grow(self._rng.randint(150, 3_000))
        answer = self._rng.randint(40, 600)
        request = PlayedRequest(now_ms, tuple(self._blocks), self._tokens, answer)
        self._grow(answer)
        self.turns_left -= 1
        return request

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The blocks of all that was said so far, less an unfinished last one."""
        return tuple(self._blocks[: self._tokens // TRACE_BLOCK_TOKENS])

    def _grow(self, tokens: int) -> None:
        if self._tokens % TRACE_BLOCK_TOKENS:
            self._blocks[-1] = next(self._ids)
        self._tokens += tokens
        while len(self._blocks) * TRACE_BLOCK_TOKENS < self._tokens:
            self._blocks.append(next(self._ids))


def generate_requests(number: int, seed: int) -> list[PlayedRequest]:
    """Return `number` requests of agent-like sessions in order of arrival."""
    rng, ids = Random(seed), count(1)
    heads = [tuple(next(ids) for _ in range(rng.randint(4, 24))) for _ in range(NUM_SYSTEM_PROMPTS)]
    requests: list[PlayedRequest] = []
    due: list[tuple[float, int, _Session]] = []
    order, next_start_ms = count(), 0.0
    while len(requests) < number:
        if not due or next_start_ms < due[0][0]:
            session = _Session(rng, ids, rng.choice(heads), rng.randint(3, 14))
            heapq.heappush(due, (next_start_ms, next(order), session))
            next_start_ms += rng.expovariate(1 / SESSION_GAP_MS)
            continue
        now_ms, _, session = heapq.heappop(due)
        requests.append(session.turn(now_ms))
        if session.fans_out and rng.random() < FAN_OUT_SHARE:
            start_ms = now_ms + rng.uniform(4_000, 8_000)
            for _ in range(rng.randint(*FAN_OUT)):
                sub_agent = _Session(rng, ids, session.full_blocks, rng.randint(1, 2), False)
                heapq.heappush(due, (start_ms + rng.uniform(0, 100), next(order), sub_agent))
        if session.turns_left > 0:
            think_ms = 2_000 + rng.expovariate(1 / THINK_MS)
            heapq.heappush(due, (now_ms + think_ms, next(order), session))
    return requests
