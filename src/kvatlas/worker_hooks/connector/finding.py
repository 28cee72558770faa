"""Asks a router who holds a prompt, for requests that came without a plan.

The scheduler's thread only starts a question and looks for its answer; a router that is slow, away
or wrong costs at most `find_seconds` and means that nothing is pulled.
"""

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan, PullStep
from kvatlas.worker_hooks.log_lines import printable_log

MAX_CANDIDATES = 8
#: questions under way; more wait in line, and give up by their own time
_THREADS = 4
#: an answer of more than this is none
_MAX_ANSWER_BYTES = 1024 * 1024

_log = printable_log("vllm.kvatlas")


class Pending(Enum):
    """The answer is not there yet."""

    pending = "pending"


class _Candidate(Struct, frozen=True):
    worker: str
    rank: int
    match_tokens: int


class _Score(Struct, frozen=True):
    candidates: tuple[_Candidate, ...] = ()


class HolderFinder:
    """One question a request; `close` ends the threads."""

    def __init__(
        self,
        router_url: str,
        model: str,
        own: InstanceId,
        block_tokens: int,
        find_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._model, self._own = urlsplit(router_url), model, own
        self._block_tokens, self._find_seconds, self._clock = block_tokens, find_seconds, clock
        self._threads = ThreadPoolExecutor(_THREADS, "kvatlas-find")
        #: request -> the question, and until when its answer counts
        self._asked: dict[str, tuple[Future[Plan | None], float]] = {}

    def find(
        self, request_id: str, tokens: Sequence[int], salt: str | None
    ) -> Plan | Pending | None:
        """Return a plan to pull, None for none; ask again while it is pending. Never waits."""
        asked = self._asked.get(request_id)
        if asked is None:
            question = self._threads.submit(self._ask, list(tokens), salt)
            self._asked[request_id] = (question, self._clock() + self._find_seconds)
            return Pending.pending
        question, until = asked
        if not question.done() and self._clock() < until:
            return Pending.pending
        del self._asked[request_id]
        return question.result() if question.done() else None

    def forget(self, request_id: str) -> None:
        """Drop the question of a request that ended."""
        self._asked.pop(request_id, None)

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, tokens: list[int], salt: str | None) -> Plan | None:
        try:
            return plan_of(self._score(tokens, salt), self._own, self._block_tokens, len(tokens))
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError) as error:
            _log.info("kvatlas: the router says nothing about a prompt: %s", error)
            return None

    def _score(self, tokens: list[int], salt: str | None) -> _Score:
        body: dict[str, object] = {"model": self._model, "token_ids": tokens}
        body |= {"max_candidates": MAX_CANDIDATES} | ({"cache_salt": salt} if salt else {})
        host, port = self._url.hostname or "", self._url.port
        connection = http.client.HTTPConnection(host, port, timeout=self._find_seconds)
        try:
            headers = {"content-type": "application/json"}
            path = self._url.path.rstrip("/") + "/v1/score"
            connection.request("POST", path, msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            content = answer.read(_MAX_ANSWER_BYTES)
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            return msgspec.json.decode(content, type=_Score)
        finally:
            connection.close()


def plan_of(score: _Score, own: InstanceId, block_tokens: int, num_tokens: int) -> Plan | None:
    """Return the plan to pull from the one that holds most, with the next ones as fallbacks.

    Whether the KV fits is the owner's to say, when it is asked for a lease.
    """
    held = {
        InstanceId(candidate.worker, candidate.rank): candidate.match_tokens // block_tokens
        for candidate in score.candidates
    }
    held.pop(own, None)
    owners = sorted((owner for owner, blocks in held.items() if blocks), key=lambda o: -held[o])
    if not owners:
        return None
    first, *others = owners
    step = PullStep(first.worker, first.rank, 0, held[first], tuple(others[:2]))
    computed = max(num_tokens - held[first] * block_tokens, 1)
    return Plan(block_tokens, 0, (step,), computed)
