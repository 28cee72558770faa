"""The candidates of one request as columns, and what each costs; objects only of those asked for.

    held, loads, predicted --lines--> price (compiled, or the plain twin) --> the cheapest, the rest

A policy that wants objects gets the same as a Question, and what it says they cost is put back.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel import IS_COMPILED
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.pricing import Price, price_all, price_settings
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Candidate, Question
from kvatlas.schemas.settings import RouterSettings

if TYPE_CHECKING:
    from kvatlas.router.decision.candidate_set import CandidateRow, CandidateSet

#: longer pulls than any prompt, and still a number of 64 bits
MAX_LEAST_PULL = 2**40


class DeferredQuestion(Protocol):
    """A question that is made when it is called."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes until then."""
        ...

    def __call__(self) -> Question:
        """Make it. O(candidates)."""
        ...


class ColumnQuestion(NamedTuple):
    """A late question of columns, without an object for each candidate."""

    prompt_tokens: int
    turn: int
    seed: int
    rows: "tuple[CandidateRow, ...]"
    #: the first NUM_ASKED columns of its candidates
    inputs: k.F64

    @property
    def num_bytes(self) -> int:
        # without the rows themselves, which the candidate set has
        return self.inputs.nbytes + 8 * len(self.rows)

    def __call__(self) -> Question:
        candidates = []
        for candidate_row, numbers in zip(self.rows, self.inputs.tolist(), strict=True):
            hbm, dram, ssd, remote, other, predicted, in_flight, queued, *rest = numbers
            work, compute, pull = rest
            held = int(hbm), int(dram), int(ssd), int(remote), int(other)
            loads = int(in_flight), queued, work, compute, pull
            candidates.append(Candidate(*candidate_row, held, int(predicted), *loads))
        return Question(self.prompt_tokens, self.turn, self.seed, tuple(candidates))


class CandidateTable:
    """A line per candidate, in the order of the candidate set, and an owner for plans to ask.

    Whoever makes it fills in loads and what is predicted; prices mean something after `price` or
    `take`. `turn` and `seed` are those of the question.
    """

    turn = seed = 0
    #: the first line with the longest match in tokens; known with the prices
    longest = 0

    def __init__(
        self, candidate_set: "CandidateSet", held: NDArray[np.uint32], prompt_tokens: int
    ) -> None:
        self.candidate_set, self.held, self.prompt_tokens = candidate_set, held, prompt_tokens
        #: the columns of price_kernel
        self.columns: k.F64 = np.empty((len(candidate_set), k.NUM_COLUMNS))

    def __len__(self) -> int:
        return len(self.columns)

    # --- prices ----------------------------------------------------------------------------------

    def price(self, settings: RouterSettings, numbers: k.F64) -> tuple[int, int]:
        """Price all; return the first line with the lowest cost, and how many have that.

        Equal to pricing.price_all to the last bit. `numbers` are `numbers_of` the settings.
        """
        if not IS_COMPILED:
            self.store_prices(price_all(self.question, settings))
            costs = self.columns[:, k.COST]
            cheapest = int(costs.argmin())
            return cheapest, int(np.count_nonzero(costs == costs[cheapest]))
        candidate_set, least = self.candidate_set, min(settings.min_pull_tokens, MAX_LEAST_PULL)
        cheapest, num_cheapest, self.longest = k.price(
            self.columns,
            self.held,
            candidate_set.traits,
            candidate_set.num_classes,
            self.prompt_tokens,
            least,
            numbers,
        )
        return cheapest, num_cheapest

    def store_prices(self, prices: Sequence[Price]) -> None:
        """Take the prices that somebody has found for `question`."""
        self.columns[:, : k.PREDICTED] = self.held
        self.columns[:, k.COST : k.MATCH] = [
            (p.cost_ms, *p.terms, p.reuse_blocks, p.pull_end, p.pull_ms) for p in prices
        ]
        self.columns[:, k.MATCH] = self.held.sum(axis=1)
        tokens = self.columns[:, k.MATCH] * self.candidate_set.traits[:, k.BLOCK_TOKENS]
        self.longest = int(tokens.argmax())

    def cost_ms(self, line: int) -> float:
        """Return what a candidate costs."""
        return float(self.columns[line, k.COST])

    def price_of(self, line: int) -> Price:
        """Return all about the cost of a candidate."""
        cost_ms, *numbers = self.columns[line, k.COST : k.MATCH].tolist()
        *terms, reuse_blocks, pull_end, pull_ms = numbers
        wait, tier_load, predicted, trust, pull, compute, balance = terms
        terms = wait, tier_load, predicted, trust, pull, compute, balance
        return Price(cost_ms, terms, int(reuse_blocks), int(pull_end), pull_ms)

    def cheapest(self, count: int) -> list[int]:
        """Return the lines with the lowest costs, the cheapest first, equal ones in order."""
        return k.cheapest_lines(self.columns, count)

    def match_tokens(self, line: int) -> int:
        """Return the tokens of a candidate's match."""
        return int(self.held[line].sum()) * self.candidate_set.rows[line].block_tokens

    # --- the question ----------------------------------------------------------------------------

    @cached_property
    def question(self) -> Question:
        """All candidates as objects."""
        self.columns[:, : k.PREDICTED] = self.held
        return self._deferred_question(self.candidate_set.rows, self.columns[:, : k.NUM_ASKED])()

    def recorded(self, chosen: int, limit: int) -> tuple[DeferredQuestion, bool]:
        """Return the question of the cheapest and the chosen, and whether they are all.

        Nothing but what it needs is kept for it. Means something once there are prices.
        """
        if len(self) <= limit:
            return self._deferred_question(
                self.candidate_set.rows, self.columns[:, : k.NUM_ASKED].copy()
            ), True
        lines = sorted({*self.cheapest(limit - 1), chosen})
        candidate_rows = tuple(self.candidate_set.rows[line] for line in lines)
        return self._deferred_question(candidate_rows, self.columns[lines, : k.NUM_ASKED]), False

    def _deferred_question(
        self, candidate_rows: "tuple[CandidateRow, ...]", asked: k.F64
    ) -> DeferredQuestion:
        return ColumnQuestion(self.prompt_tokens, self.turn, self.seed, candidate_rows, asked)

    # --- what plans ask, see plans.Peers ---------------------------------------------------------

    def block_tokens(self, line: int) -> int:
        return self.candidate_set.rows[line].block_tokens

    def instance(self, line: int) -> InstanceId:
        return self.candidate_set.views[line].instance

    def owners(self, chosen: int, first: int) -> dict[int, int]:
        traits, blocks = self.candidate_set.traits, self.columns[:, k.MATCH]
        may_lend = traits[:, k.KV_CLASS] == traits[chosen, k.KV_CLASS]
        may_lend &= (traits[:, k.TRUST] != k.DOUBTFUL) & (blocks > first)
        may_lend[chosen] = False
        lines = np.flatnonzero(may_lend)
        return dict(zip(lines.tolist(), blocks[lines].astype(np.int64).tolist(), strict=True))

    def least_loaded_of_cheapest(self, cheapest: int, num_alike: int) -> int:
        """Return the line with the least load of those that cost as much as a line.

        `num_alike` is how many those are.
        """
        if not IS_COMPILED:
            costs = self.columns[:, k.COST]
            return self.lightest(np.flatnonzero(costs == costs[cheapest]))
        lines = np.empty(num_alike, np.int64)
        return self._lowest_draw(lines[: k.lightest_alike(self.columns, cheapest, lines)])

    def lightest(self, lines: Iterable[int]) -> int:
        found = np.fromiter(lines, np.intp)
        for column in (k.QUEUED, k.IN_FLIGHT):
            if len(found) > 1:
                numbers = self.columns[found, column]
                found = found[numbers == numbers.min()]
        return self._lowest_draw(found)

    def next_best(self, owners: Mapping[int, int], count: int) -> list[int]:
        lines, owned = (np.fromiter(each, np.intp) for each in (owners, owners.values()))
        best: list[int] = []
        while len(lines) and len(best) < count:
            among = lines[owned == owned.max()]
            queued = self.columns[among, k.QUEUED]
            best.append(self._lowest_draw(among[queued == queued.min()]))
            is_left = lines != best[-1]
            lines, owned = lines[is_left], owned[is_left]
        return best

    def _lowest_draw(self, lines: NDArray[np.intp]) -> int:
        """Return the line with the lowest draw; see policies.draw."""
        found: list[int] = lines.tolist()
        if len(found) == 1:
            return found[0]
        lots, seed, draw = self.candidate_set.tie_break_keys, self.seed, xxhash.xxh3_64_intdigest
        draws = [draw(lots[line], seed) for line in found]
        return found[draws.index(min(draws))]


def price_inputs_of(settings: RouterSettings) -> k.F64:
    """Return the settings that prices depend on, as `CandidateTable.price` takes them."""
    numbers = np.array(price_settings(settings))
    numbers.flags.writeable = False
    return numbers
