"""The built-in workload: agent-like sessions, seeded, so that a demo needs no trace.

Each session starts from one of a few shared system prompts, grows by a turn at a time (the user's
text, then the answer of the turn before), pauses to think between turns, and now and then spawns a
sub-agent: a short session of its own below the same system prompt. Sessions start by a Poisson
process. The shape follows public agent traces: long shared heads, growing tails, returns.
"""

import heapq
from itertools import count
from random import Random

from kvatlas.demo.prompts import TRACE_BLOCK_TOKENS, PlayedRequest

NUM_SYSTEM_PROMPTS = 6
SESSION_GAP_MS = 2_000.0
THINK_MS = 20_000.0
SUB_AGENT_SHARE = 0.15


class _Session:
    """One growing prompt: the block ids so far and the tokens in the last, unfinished one."""

    def __init__(self, rng: Random, ids: "count[int]", head: tuple[int, ...], turns: int) -> None:
        self._rng, self._ids = rng, ids
        self.head, self.turns_left = head, turns
        self._blocks, self._tokens = list(head), len(head) * TRACE_BLOCK_TOKENS

    def turn(self, now_ms: float) -> PlayedRequest:
        """Return the next request; its answer becomes part of the prompt after it."""
        self._grow(self._rng.randint(150, 3_000))
        answer = self._rng.randint(40, 600)
        request = PlayedRequest(now_ms, tuple(self._blocks), self._tokens, answer)
        self._grow(answer)
        self.turns_left -= 1
        return request

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
        if rng.random() < SUB_AGENT_SHARE:
            sub_agent = _Session(rng, ids, session.head, rng.randint(1, 3))
            heapq.heappush(due, (now_ms + rng.uniform(200, 2_000), next(order), sub_agent))
        if session.turns_left > 0:
            think_ms = 2_000 + rng.expovariate(1 / THINK_MS)
            heapq.heappush(due, (now_ms + think_ms, next(order), session))
    return requests
