"""What a decision costs by the size of the fleet: a body in, an encoded answer out.

    .venv/bin/python tests/bench/decisions.py [--quick] [--save] [--peer none]

Each worker holds another part of one prompt of 8,192 tokens, blocks of 16, so that every match has
its own length: the most that a walk along a chain has to tell apart. `score` only asks; `route`
decides, remembers and hands the decision to a log in memory; its report of the end is not timed.
`json` is a body of token ids, `by_hash` one of block hashes. Before each `score_after_change` one
worker loses a batch, or says that it lost nothing, so that its trust is another one. No socket
(tests/bench/http.py) and no broker; all on one CPU. There is no peer; every bench takes `--peer`.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

from collections.abc import Callable
from itertools import cycle
from random import Random
from time import perf_counter

import msgspec

from kvatlas.indexer import FlatRadixIndex
from kvatlas.router.decision.requests import Report
from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.router.service import RouterService
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.fleet import NamespaceDescriptor, Trust
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import Digest
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import MODEL, Fleet, StillFeed
from testkit.measuring import Bench, pin_to_one_cpu
from testkit.measuring.bench import OURS

FLEETS = (8, 64, 256, 1_000)
QUICK_FLEETS = (8, 256)
NUM_TOKENS, BLOCK_TOKENS = 8_192, 16
#: calls of a sample, whose mean it is
CALLS = 50


def main() -> None:
    """Check an answer of each fleet, then measure it."""
    bench = Bench("decisions", __doc__)
    pin_to_one_cpu()
    repetitions = 3 if bench.is_quick else 15
    for candidates in QUICK_FLEETS if bench.is_quick else FLEETS:
        asked = Asked(candidates)
        found = asked.longest_match()
        what = f"{candidates} candidates: the longest match is {found} tokens"
        bench.gate(what, found == asked.longest_tokens)
        for form in asked.bodies:
            for way in (asked.score_us, asked.score_after_change_us, asked.route_us):
                samples = [way(form) for _ in range(repetitions)]
                name = way.__name__.removesuffix("_us")
                bench.row(name, "us", {OURS: samples}, form=form, candidates=candidates)
                bench.absolute(f"{name}_{form}_us_{candidates}", min(samples))
    bench.finish()


class Asked:
    """A router, and what it is asked."""

    def __init__(self, candidates: int) -> None:
        random, fleet = Random(1), Fleet(FlatRadixIndex())
        self._fleet, self._next = fleet, cycle(range(candidates))
        tokens = [random.randrange(100_000) for _ in range(NUM_TOKENS)]
        depths = [random.randrange(1, NUM_TOKENS // BLOCK_TOKENS) for _ in range(candidates)]
        for worker, num_blocks in enumerate(depths):
            fleet.up(f"w{worker}")
            fleet.holds(f"w{worker}", tokens, num_blocks=num_blocks)
        self.longest_tokens = max(depths) * BLOCK_TOKENS
        self._settings = RouterSettings()
        self._router = RouterService(fleet.state, StillFeed(), self._settings)
        chain = BlockHasher(NamespaceDescriptor(BLOCK_TOKENS).namespace(MODEL, None, None)).chain
        hashed = chain(tokens)
        hashes = [hashed[at : at + 16].hex() for at in range(0, len(hashed), 16)]
        encode = msgspec.json.encode
        self.bodies = {
            "json": encode({"model": MODEL, "token_ids": tokens}),
            "by_hash": encode({"model": MODEL, "block_hashes": hashes, "num_tokens": NUM_TOKENS}),
        }

    def longest_match(self) -> int:
        """Return the tokens of the longest match that the router knows of."""
        request = decode_score_request(self.bodies["json"], "application/json", self._settings)
        request = msgspec.structs.replace(request, max_candidates=1_024)
        return max(each.match_tokens for each in self._router.score(request).candidates)

    def score_us(self, form: str) -> float:
        """Return the mean time of a score."""
        return self._mean_us(form, self._router.score)

    def score_after_change_us(self, form: str) -> float:
        """Return the mean time of a score after somebody's trust has changed."""
        return self._mean_us(form, self._router.score, self._change_trust)

    def _change_trust(self) -> None:
        """Let a worker lose a batch, or say that it has lost nothing."""
        worker, state = f"w{next(self._next)}", self._fleet.state
        before = state.instance(InstanceId(worker, 0))
        assert before
        if before.trust is Trust.exact:
            self._fleet.tell(worker, skip=1)
        else:
            held = [before.digests.get(tier, TierDigest()) for tier in Tier]
            self._fleet.tell(worker, *(Digest(tier, *held[tier]) for tier in Tier))
        after = state.instance(InstanceId(worker, 0))
        assert after
        assert after.trust is not before.trust

    def route_us(self, form: str) -> float:
        """Return the mean time of a route."""
        return self._mean_us(form, self._router.route)

    def _mean_us(
        self,
        form: str,
        ask: Callable[..., msgspec.Struct],
        happens_before: Callable[[], None] = lambda: None,
    ) -> float:
        body, encode, spent = self.bodies[form], msgspec.json.encode, 0.0
        for _ in range(CALLS):
            happens_before()
            started = perf_counter()
            answer = ask(decode_score_request(body, "application/json", self._settings))
            encode(answer)
            spent += perf_counter() - started
            if decision_id := getattr(answer, "decision_id", ""):
                self._router.done(decision_id, Report())
        return spent / CALLS * 1e6


if __name__ == "__main__":
    main()
