"""Scores and routes requests: gathers candidates, asks the policy, remembers what it gave to whom.

    request --CandidateFinder--> CandidateTable --pick--> Pick --plan_for--> Decision
               index, LoadTracker, PredictedBlocks     `--> loads, predictions, DecisionLog

Synchronous, on one thread, without I/O: an answer stands on one state of the index.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.index import kernel
from kvatlas.indexer.reader import IndexReader, InstanceView, Lag
from kvatlas.router.answers import RouteAnswer, ScoreAnswer
from kvatlas.router.decision.candidates import CandidateFinder, FoundCandidates, recorded_groups
from kvatlas.router.decision.failures import Failures
from kvatlas.router.decision.loads import InstanceLoad, LoadTracker
from kvatlas.router.decision.overdue import OverdueRequests
from kvatlas.router.decision.plans import LendableBlocks, plan_for
from kvatlas.router.decision.policies import Choice, Pick, Policy, picker, policy_named
from kvatlas.router.decision.predictions import Life, PredictedBlocks
from kvatlas.router.decision.requests import Report, ScoreRequest
from kvatlas.router.decision.scores import scores_of
from kvatlas.router.recorder import DecisionLog, MemoryDecisionLog
from kvatlas.router.replicas.signals import (
    MAX_CHAIN_BYTES,
    TIME_DIGITS,
    Done,
    Prefilled,
    Routed,
    Signal,
    new_router_id,
)
from kvatlas.router.transfer_params import transfer_params
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import NoCandidate, PromptTooLarge, UnknownDecision, UnknownModel
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import DECISION_VERSION, Decision, Plan, Question
from kvatlas.schemas.settings import RouterSettings

#: candidates whose part of the question a decision keeps; beyond it only the cheapest
MAX_RECORDED_CANDIDATES = 256
#: workers left out that a decision names; beyond it the others are in /v1/workers only
MAX_NAMED_LEFT_OUT = 4
#: expired predictions that may wait for a scrape to be judged; beyond it each route judges some
MAX_LAPSED, SETTLED_A_ROUTE = 8_192, 4
#: the settings that a policy's choice depends on
POLICY_SETTINGS = (
    "load_window_ms",
    "balance_weight",
    "pull_weight",
    "min_pull_tokens",
    "degraded_match_share",
    "predicted_match_share",
    "pull_fixed_ms",
    "dram_ms_per_1k_tokens",
    "ssd_ms_per_1k_tokens",
    "remote_ms_per_1k_tokens",
)


class IndexFeed(Protocol):
    """How the index is kept up to date; IndexService is one."""

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the index has caught up with what the stream held when it started."""
        ...

    @property
    def lag(self) -> Lag:
        """How far the index is behind, in messages of the log and in time."""
        ...

    @property
    def why_not_ready(self) -> str:
        """What it waits for; means nothing once it is ready."""
        ...

    def still(self) -> AbstractAsyncContextManager[None]:
        """Fold nothing in while this is entered: what is read is of one stream sequence."""
        ...

    def convergence_ms(self) -> dict[str, float]:
        """Time from the broker's store to the index: p50, p99, max; empty before any message."""
        ...

    def broker_ns(self) -> int:
        """Return what time it is at the broker, whose times messages have."""
        ...


class ReportResult(NamedTuple):
    """A report taken in: `applied` is False when the request no longer counted."""

    #: without the candidates of its question
    decision: Decision | None
    applied: bool


class Router(Protocol):
    """What the HTTP routes ask; RouterService and what wraps it."""

    def score(self, request: ScoreRequest) -> ScoreAnswer:
        """Return the candidates and who would be chosen; changes nothing."""
        ...

    def route(self, request: ScoreRequest) -> RouteAnswer:
        """Choose a worker and count the request as its load."""
        ...

    def prefilled(self, decision_id: str, report: Report) -> ReportResult:
        """Take in that a request's prefill has ended. Raises UnknownDecision."""
        ...

    def done(self, decision_id: str, report: Report) -> ReportResult:
        """Take in that a request has ended. Again is no error. Raises UnknownDecision."""
        ...

    def decision(self, decision_id: str) -> Decision:
        """Return a recent decision. Raises UnknownDecision."""
        ...


class RouterService:
    """The router over an index that somebody else keeps up to date; compiles its kernels at first.

    `score` and `route` raise UnknownModel, InvalidRequest and NoCandidate; a model that is unknown
    while the index is catching up is a NoCandidate, since it may be there, and so is one whose
    workers are gone, since they may come back.
    """

    def __init__(
        self,
        index: IndexReader,
        feed: IndexFeed,
        settings: RouterSettings | None = None,
        *,
        log: DecisionLog | None = None,
        policy: Policy | None = None,
        fleet_key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        new_id: Callable[[], str] | None = None,
        router_id: str = "",
    ) -> None:
        prompt_kernel.warm()
        kernel.warm()
        self.settings = settings or RouterSettings()
        self.index, self.feed = index, feed
        self.policy = policy or policy_named(self.settings.policy, self.settings)
        self._pick = picker(self.policy)
        self.loads = LoadTracker(self.settings)
        self.overlay = PredictedBlocks(self.settings.predicted_seconds)
        self.failures = Failures(
            self.settings.failure_pause_seconds, self.settings.max_failure_pause_seconds
        )
        self.overdue = OverdueRequests(self.settings.overdue_seconds, self.settings.overdue_factor)
        self.log: DecisionLog = MemoryDecisionLog(self.settings) if log is None else log
        self._candidates = CandidateFinder(index, self.loads, self.overlay, fleet_key)
        self._clock, self._wall_ns = clock, wall_ns
        self.router_id = router_id or new_router_id()
        #: told what other routers have to know; see replicas.py
        self.publish: Callable[[Signal], None] = lambda signal: None
        self._new_id = new_id or self._timed_id
        self._random = Random(self.settings.seed or None)
        #: decisions so far, by the name that requests use
        self._turns: dict[str, int] = {}
        self._recorded_settings = recorded_settings(self.settings)

    def score(self, request: ScoreRequest) -> ScoreAnswer:
        candidate_table = self._find_candidates(request, self._clock()).table
        chosen = self._pick(candidate_table).chosen
        count = request.max_candidates or self.settings.max_candidates
        return ScoreAnswer(
            model=request.model,
            prompt_tokens=candidate_table.prompt_tokens,
            policy=self.policy.name,
            chosen=candidate_table.instance(chosen),
            candidates=scores_of(candidate_table, candidate_table.cheapest(count)),
            num_candidates=len(candidate_table),
            stream_sequence=self.index.stream_sequence,
            index_age_ms=1000 * self.feed.lag.seconds_since_contact,
            connected=self.feed.connected,
        )

    def route(self, request: ScoreRequest) -> RouteAnswer:
        now = self._clock()
        gathered = self._find_candidates(request, now)
        candidate_set, candidate_table = gathered.candidates, gathered.table
        taken = self._pick(candidate_table)
        price = candidate_table.price_of(taken.chosen)
        chain = gathered.chains[candidate_set.group_of[taken.chosen]]
        plan = plan_for(
            candidate_table,
            taken.chosen,
            price,
            self.settings,
            LendableBlocks(self.index, candidate_set, chain),
        )
        question, is_complete = candidate_table.recorded(taken.chosen, MAX_RECORDED_CANDIDATES)
        decision = self._decision(request, gathered, taken, plan, is_complete)
        self._turns[request.model] = candidate_table.turn + 1
        instance, epoch = (
            candidate_table.instance(taken.chosen),
            candidate_set.views[taken.chosen].epoch,
        )
        transfer_ms = price.terms[1] + price.pull_ms
        self.loads.routed(decision.id, instance, plan, transfer_ms, now)
        expected_ms = decision.chosen.expected_ttft_ms
        is_new = plan.reuse_blocks * BLOCK_HASH_BYTES < len(chain)
        new_block = chain[-BLOCK_HASH_BYTES:] if is_new else b""
        # not by the name in the request: loads belong to the worker's own model
        model = candidate_set.infos[taken.chosen].model
        self.overdue.routed(decision.id, instance, epoch, expected_ms, now, new_block, model)
        self.overlay.expect(decision.id, (instance, epoch), chain, now)
        if self.overlay.num_lapsed > MAX_LAPSED:
            self.settle_predictions(SETTLED_A_ROUTE)
        known = chain[:MAX_CHAIN_BYTES]
        self.publish(Routed(decision.id, model, *instance, epoch, plan, transfer_ms, known))
        self.log.record(decision, question)
        count = request.max_candidates or self.settings.max_candidates
        chosen = decision.chosen
        return RouteAnswer(
            decision_id=decision.id,
            worker=chosen.worker,
            rank=chosen.rank,
            base_url=chosen.base_url,
            trust=chosen.trust,
            match_tokens=chosen.match_tokens,
            match_tokens_by_tier=chosen.match_tokens_by_tier,
            predicted_tokens=chosen.predicted_tokens,
            prompt_tokens=decision.prompt_tokens,
            expected_ttft_ms=chosen.expected_ttft_ms,
            plan=plan,
            kv_transfer_params=transfer_params(decision.id, plan, candidate_set, taken.chosen),
            candidates=decision.candidates[:count],
            num_candidates=decision.num_candidates,
            reasons=decision.reasons,
            policy=decision.policy,
            stream_sequence=decision.stream_sequence,
            index_age_ms=decision.index_age_ms,
            connected=self.feed.connected,
        )

    def prefilled(self, decision_id: str, report: Report) -> ReportResult:
        report = self._counted(decision_id, report)
        instance = self.loads.instance_of(decision_id)
        is_first = instance is not None and not self.loads.is_prefilled(decision_id)
        applied = self.loads.prefilled(decision_id, report, self._clock())
        if applied:
            self._hear(decision_id, report)
            self.publish(Prefilled(decision_id, report))
        return self._outcome(decision_id, report, applied, instance if is_first else None)

    def done(self, decision_id: str, report: Report) -> ReportResult:
        report = self._counted(decision_id, report)
        instance = self.loads.instance_of(decision_id)
        applied = self.loads.done(decision_id, report, self._clock())
        if applied:
            self._hear(decision_id, report)
            self.publish(Done(decision_id, report))
        return self._outcome(decision_id, report, applied, instance)

    def decision(self, decision_id: str) -> Decision:
        found = self.log.find(decision_id)
        if found is None:
            raise UnknownDecision(decision_id)
        return found

    def load_of(self, instance: InstanceId, epoch: int = 0) -> InstanceLoad | None:
        """Return the load of an instance as of now, None if it was no candidate lately."""
        return self.loads.known(instance, self._clock(), epoch)

    def overdue_at(self, instance: InstanceId) -> str:
        """Say why an instance is suspected to answer no more; empty where it is not."""
        return self.overdue.reason(instance, self._clock())

    def settle_predictions(self, count: int) -> bool:
        """Find out of up to `count` expired predictions whether they came true.

        Return whether there are more.
        """
        return self.overlay.settle(self._has_come_true, count)

    def _has_come_true(self, life: Life, last_hash: bytes) -> bool:
        instance, epoch = life
        view = self.index.instance(instance)
        return view is not None and view.epoch == epoch and self._holds(instance, last_hash)

    def load_shown(self, view: InstanceView) -> InstanceLoad | None:
        """Return the load of an instance for those who look: it ends when the instance is gone."""
        return None if view.trust is Trust.gone else self.load_of(view.instance, view.epoch)

    def _counted(self, decision_id: str, report: Report) -> Report:
        """Return the report with what an engine's count of cached tokens says, in our own fields.

        So it also travels to routers of an older release.
        """
        prompt = self.loads.prompt_of(decision_id)
        if prompt is None or (report.cached_tokens is None and report.prompt_tokens is None):
            return report
        num_tokens, _ = prompt
        computed_tokens = report.computed_tokens
        if computed_tokens is None and report.cached_tokens is not None:
            total = num_tokens if report.prompt_tokens is None else report.prompt_tokens
            computed_tokens = max(total - report.cached_tokens, 0)
        return msgspec.structs.replace(
            report, computed_tokens=computed_tokens, cached_tokens=None, prompt_tokens=None
        )

    def _outcome(
        self, decision_id: str, report: Report, applied: bool, instance: InstanceId | None
    ) -> ReportResult:
        """Return what became of a report; `instance` is where it is news that it went there.

        A report of a request that no longer counts says nothing about a worker: sent again and
        again it would keep one out.
        """
        decision = self.log.outline(decision_id)
        if decision is None and not applied:
            raise UnknownDecision(decision_id)
        if report.failed:
            self.overlay.withdraw(decision_id)
        if instance is not None:
            if report.failed:
                self.failures.failed(instance, self._clock())
            else:
                self.failures.succeeded(instance)
        return ReportResult(decision, applied)

    def _find_candidates(self, request: ScoreRequest, now: float) -> FoundCandidates:
        try:
            gathered = self._candidates.gather(request, now, self._avoided(now))
        except UnknownModel:
            if self.feed.is_ready:
                raise
            raise NoCandidate(request.model, "the index is catching up") from None
        candidate_table, limit = gathered.table, self.settings.max_prompt_tokens
        if candidate_table.prompt_tokens > limit:  # known only now, of hashes
            problem = f"{candidate_table.prompt_tokens} tokens, the limit is {limit}"
            raise PromptTooLarge("block_hashes", problem)
        candidate_table.turn = self._turns.get(request.model, 0)
        candidate_table.seed = self._random.getrandbits(63)
        return gathered

    def _hear(self, decision_id: str, report: Report) -> None:
        if not report.failed:  # of a failed one nothing may have come back
            self.overdue.reported(decision_id, self._clock())

    def _avoided(self, now: float) -> frozenset[InstanceId]:
        self.overdue.look(now, self._holds)
        suspects = self.overdue.left_out(now)
        failing = self.failures.avoided(now)
        return failing.union(suspects) if suspects else failing

    def _holds(self, instance: InstanceId, block_hash: bytes) -> bool:
        return any(holder == instance for holder, _ in self.index.holders(block_hash))

    def _decision(
        self,
        request: ScoreRequest,
        gathered: FoundCandidates,
        taken: Pick,
        plan: Plan,
        is_complete: bool,
    ) -> Decision:
        """Return the decision, without the candidates of its question."""
        salted, candidate_table = request.cache_salt is not None, gathered.table
        cheapest = candidate_table.cheapest(
            max(request.max_candidates or 0, self.settings.max_candidates)
        )
        chosen, *scores = scores_of(candidate_table, [taken.chosen, *cheapest])
        age_ms = 1000 * self.feed.lag.seconds_since_contact
        return Decision(
            v=DECISION_VERSION,
            id=self._new_id(),
            ts_ns=self._wall_ns(),
            stream_sequence=self.index.stream_sequence,
            policy=self.policy.name,
            model=request.model,
            prompt_tokens=candidate_table.prompt_tokens,
            chosen=chosen,
            candidates=tuple(scores),
            num_candidates=len(candidate_table),
            plan=plan,
            reasons=self._reasons(gathered, taken, salted, age_ms),
            settings=self._recorded_settings,
            question=Question(
                candidate_table.prompt_tokens, candidate_table.turn, candidate_table.seed, ()
            ),
            is_question_complete=is_complete,
            groups=recorded_groups(gathered.candidates, gathered.chains, salted),
            chosen_group=gathered.candidates.group_of[taken.chosen],
            index_age_ms=age_ms,
        )

    def _reasons(
        self, gathered: FoundCandidates, taken: Pick, salted: bool, age_ms: float
    ) -> tuple[str, ...]:
        candidate_table = gathered.table
        reasons = [f"{self.policy.name}: {taken.reason}"]
        longest, longest_tokens = (
            candidate_table.longest,
            candidate_table.match_tokens(candidate_table.longest),
        )
        if longest_tokens > candidate_table.match_tokens(taken.chosen):
            more_ms = candidate_table.cost_ms(longest) - candidate_table.cost_ms(taken.chosen)
            reasons.append(
                f"the longest match, {longest_tokens} tokens at "
                f"{candidate_table.instance(longest)}, would cost {more_ms:.1f} ms more"
            )
        trust = candidate_table.candidate_set.rows[taken.chosen].trust
        if trust is not Trust.exact:
            why = candidate_table.candidate_set.over_budget.get(
                candidate_table.instance(taken.chosen)
            )
            because = f" ({why})" if why else ""
            reasons.append(f"the chosen worker's index is {trust}{because}")
        left_out = {**gathered.stalled, **self.overdue.left_out(self._clock())}
        for instance, why in list(left_out.items())[:MAX_NAMED_LEFT_OUT]:
            if instance not in candidate_table.candidate_set.row_of:
                reasons.append(f"{instance} is left out: {why}")
        if not self.feed.connected:
            reasons.append(f"no broker: the index is {age_ms:.0f} ms old")
        if salted:
            reasons.append("the prompt is salted: its hashes are not recorded")
        return tuple(reasons)

    def _timed_id(self) -> str:
        """Return an id that sorts by time, names its router and is given by no other."""
        return (
            f"{self._wall_ns() // 1_000_000:0{TIME_DIGITS}x}{self.router_id}{os.urandom(4).hex()}"
        )


def recorded_settings(settings: RouterSettings) -> dict[str, str | int | float]:
    """Return the settings that a decision has to keep for its policy to be run again."""
    return {name: getattr(settings, name) for name in POLICY_SETTINGS}


def choose_again(decision: Decision) -> Choice:
    """Run a recorded decision's policy on its recorded question.

    Chooses the same unless `is_question_complete` is False. Raises UnknownPolicy.
    """
    settings = msgspec.convert(decision.settings, RouterSettings)
    return policy_named(decision.policy, settings).choose(decision.question)
