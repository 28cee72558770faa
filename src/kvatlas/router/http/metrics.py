"""Metrics: a decorator around the router that counts, and a collector that reads state.

The router itself contains no metric call. Names start with kv_.
"""

import time
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas import __version__
from kvatlas.common.line_writing import num_dropped_lines
from kvatlas.indexer.reader import InstanceView
from kvatlas.router.answers import RouteAnswer, ScoreAnswer
from kvatlas.router.decision.loads import InstanceLoad
from kvatlas.router.decision.requests import Report, ScoreRequest
from kvatlas.router.http.condition_metric import condition_gauge
from kvatlas.router.replicas.replicas import RouterReplicas
from kvatlas.router.service import ReportResult, Router, RouterService
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.errors import IndexUnavailable, KvatlasError
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.printable import printable
from kvatlas.schemas.routing import Decision, Plan

T = TypeVar("T")

SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1)
#: of convergence_ms, as Prometheus names them
QUANTILES = {"p50": "0.5", "p99": "0.99", "max": "1"}
RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 8, 16)


# when a counter began is in no rule and on no page, and doubles what is scraped
disable_created_metrics()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=16_384)
def _label(name: str) -> str:
    """Return a name as a label: printable, and two names never alike."""
    return printable(name.replace("\\", r"\\"))


CONFIRMED = "Predictions that came true"
#: of a worker that has series
LIVE_STATES = tuple(state for state in Trust if state is not Trust.gone)
#: counters that have a worker as their label: name and text
ROUTED = "kv_routed_requests", "Requests sent to a worker"
EXPECTED = "kv_expected_reuse_tokens", "Tokens that reported requests were expected to reuse"
ACTUAL = "kv_actual_reuse_tokens", "Tokens that they did reuse"
FAILED = "kv_failed_requests", "Requests reported as failed"
#: workers that are counted apart; the first one counted is forgotten for one more
MAX_COUNTED_WORKERS = 16_384
#: workers in one part of a family, see exposition.py
WORKERS_A_PART = 8


class WorkerCounts:
    """Counters of each worker; a worker's end when it is gone, as its other series do."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], dict[str, float]] = {
            family: {} for family in (ROUTED, EXPECTED, ACTUAL, FAILED)
        }

    def add(self, family: tuple[str, str], worker: str, amount: float = 1.0) -> None:
        """Count for a worker."""
        counts = self._counts[family]
        counts[worker] = counts.get(worker, 0.0) + amount
        if len(counts) > MAX_COUNTED_WORKERS:
            del counts[next(iter(counts))]

    def families(self, live: Set[str]) -> Iterable[Metric]:
        """Yield the counters of workers that live, in parts, and forget all others."""
        for (name, text), counts in self._counts.items():
            for worker in [each for each in counts if each not in live]:
                del counts[worker]
            yield CounterMetricFamily(name, text, labels=["worker"])
            for part in batched(sorted(counts), WORKERS_A_PART):
                family = CounterMetricFamily(name, text, labels=["worker"])
                for worker in part:
                    family.add_metric([_label(worker)], counts.get(worker, 0.0))
                yield family


def batched(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """Yield the items in order, so many at a time."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


class RouterMetrics:
    """The counters of one router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.http_requests = Counter(
            "kv_http_requests", "HTTP answers", ["route", "status"], registry=registry
        )
        #: those of its labels seen so far: to look one up there costs as much as a match
        self._answers: dict[tuple[str, int], Counter] = {}
        self.decision_seconds = Histogram(
            "kv_decision_seconds",
            "Time from a parsed request to its answer",
            ["operation"],
            registry=registry,
            buckets=SECONDS,
        )
        self.errors = Counter(
            "kv_request_errors", "Requests refused", ["operation", "error"], registry=registry
        )
        self.by_worker = WorkerCounts()
        self.prompt_tokens = Counter(
            "kv_prompt_tokens", "Tokens of routed prompts", registry=registry
        )
        self.hit_tokens = Counter(
            "kv_hit_tokens", "Tokens matched at the chosen worker", ["tier"], registry=registry
        )
        self.predicted_tokens = Counter(
            "kv_predicted_tokens", "Tokens predicted beyond the match", registry=registry
        )
        self.planned_pull_tokens = Counter(
            "kv_planned_pull_tokens", "Tokens planned to be pulled from peers", registry=registry
        )
        self.ttft_ratio = Histogram(
            "kv_ttft_actual_over_expected",
            "Reported over expected time to first token",
            registry=registry,
            buckets=RATIOS,
        )

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer; `route` is a template, so that labels stay few."""
        counter = self._answers.get((route, status))
        if counter is None:
            counter = self._answers[route, status] = self.http_requests.labels(route, str(status))
        counter.inc()


class MeteredRouter:
    """A router that counts what passes through."""

    def __init__(self, router: Router, metrics: RouterMetrics) -> None:
        self._router, self._metrics = router, metrics
        self._score_seconds = metrics.decision_seconds.labels("score")
        self._route_seconds = metrics.decision_seconds.labels("route")

    def score(self, request: ScoreRequest) -> ScoreAnswer:
        started = time.perf_counter()
        try:
            answer = self._router.score(request)
        except KvatlasError as error:
            self._metrics.errors.labels("score", type(error).__name__).inc()
            raise
        self._score_seconds.observe(time.perf_counter() - started)
        return answer

    def route(self, request: ScoreRequest) -> RouteAnswer:
        started = time.perf_counter()
        try:
            answer = self._router.route(request)
        except KvatlasError as error:
            self._metrics.errors.labels("route", type(error).__name__).inc()
            raise
        self._route_seconds.observe(time.perf_counter() - started)
        self._count(answer)
        return answer

    def prefilled(self, decision_id: str, report: Report) -> ReportResult:
        return self._router.prefilled(decision_id, report)

    def done(self, decision_id: str, report: Report) -> ReportResult:
        outcome = self._router.done(decision_id, report)
        if outcome.applied and outcome.decision is not None:
            self._compare(outcome.decision, report)
        return outcome

    def decision(self, decision_id: str) -> Decision:
        return self._router.decision(decision_id)

    def _count(self, answer: RouteAnswer) -> None:
        metrics = self._metrics
        metrics.by_worker.add(ROUTED, answer.worker)
        metrics.prompt_tokens.inc(answer.prompt_tokens)
        for tier, tokens in answer.match_tokens_by_tier.items():
            metrics.hit_tokens.labels(tier).inc(tokens)
        metrics.predicted_tokens.inc(answer.predicted_tokens)
        pulled_blocks = sum(step.num_blocks for step in answer.plan.pulls)
        metrics.planned_pull_tokens.inc(pulled_blocks * answer.plan.block_tokens)

    def _compare(self, decision: Decision, report: Report) -> None:
        """Set what was predicted against what came of it."""
        metrics, worker = self._metrics, decision.chosen.worker
        if report.failed:
            metrics.by_worker.add(FAILED, worker)
            return
        reused_tokens = _reused_tokens(decision.plan, report)
        if reused_tokens is not None:
            plan = decision.plan
            metrics.by_worker.add(EXPECTED, worker, plan.reuse_blocks * plan.block_tokens)
            metrics.by_worker.add(ACTUAL, worker, reused_tokens)
        if report.ttft_ms is not None and decision.chosen.expected_ttft_ms > 0:
            metrics.ttft_ratio.observe(report.ttft_ms / decision.chosen.expected_ttft_ms)


def _reused_tokens(plan: Plan, report: Report) -> int | None:
    """Return how many tokens of its own cache the worker reused, None if nothing says so.

    What an engine reports as cached includes what was pulled for the request.
    """
    if report.local_blocks is not None:
        return report.local_blocks * plan.block_tokens
    if report.cached_tokens is None:
        return None
    pulled_blocks = report.pulled_blocks
    if pulled_blocks is None:
        pulled_blocks = sum(step.num_blocks for step in plan.pulls)
    cached_tokens = min(report.cached_tokens, plan.num_tokens)
    return max(cached_tokens - pulled_blocks * plan.block_tokens, 0)


class StateCollector(Collector):
    """Reads gauges and totals from the router's parts when somebody asks for them."""

    def __init__(
        self,
        service: RouterService,
        replicas: RouterReplicas | None,
        conditions: Conditions,
        by_worker: WorkerCounts,
    ) -> None:
        self._service, self._replicas, self._by_worker = service, replicas, by_worker
        self._conditions = conditions

    def collect(self) -> Iterable[Metric]:
        """Yield the state of this moment, what there is of each worker in parts.

        Others may run between two parts: each of them stands for its own moment.
        """
        with suppress(IndexUnavailable):  # no index to read yet; the router's own figures go on
            yield from self._index()
        yield from self._workers()
        yield from self._router()

    def _index(self) -> Iterable[Metric]:
        stats, feed = self._service.index.stats(), self._service.feed
        lag = feed.lag
        yield GaugeMetricFamily("kv_index_blocks", "Distinct blocks", value=stats.num_blocks)
        yield GaugeMetricFamily("kv_index_bytes", "Memory of the index", value=stats.memory_bytes)
        yield GaugeMetricFamily(
            "kv_index_stream_sequence", "Last message folded in", value=stats.stream_sequence
        )
        yield GaugeMetricFamily(
            "kv_index_lag_sequences", "Known messages not folded in", value=lag.stream_sequences
        )
        yield GaugeMetricFamily(
            "kv_index_age_seconds", "Since the broker was heard", value=lag.seconds_since_contact
        )
        yield GaugeMetricFamily("kv_connected", "Broker is there", value=float(feed.connected))
        yield GaugeMetricFamily("kv_ready", "Index has caught up", value=float(feed.is_ready))
        lags = GaugeMetricFamily(
            "kv_replication_lag_seconds",
            "From the broker's store to the index, of the latest messages",
            labels=["quantile"],
        )
        for name, lag_ms in self._service.feed.convergence_ms().items():
            lags.add_metric([QUANTILES[name]], lag_ms / 1000)
        yield lags
        if not feed.is_ready:
            # what the log's past counts is no news: a start would look like all its faults at once
            return
        for name, text, value in (
            ("kv_batches", "Batches folded in", stats.batches),
            ("kv_events", "Events folded in", stats.events),
            ("kv_gaps", "Gaps in an instance's sequence", stats.gaps),
            ("kv_missing_batches", "Batches that the gaps stand for", stats.missing_batches),
            ("kv_duplicate_batches", "Batches that came again", stats.duplicates),
            (
                "kv_late_batches",
                "Batches of an epoch that is over",
                stats.old_epochs + stats.ended_epochs,
            ),
            ("kv_takeovers", "Names taken from a process that had not gone", stats.takeovers),
            ("kv_outbox_dropped", "Times an instance lost events before the log", stats.resyncs),
            ("kv_digest_mismatch", "Digests unlike the index", stats.digest_mismatches),
            ("kv_digest_match", "Digests equal to the index", stats.digest_matches),
            ("kv_repairs", "Tiers that an inventory has told to the end", stats.inventories),
            ("kv_repairs_dropped", "Inventories out of date or cut", stats.dropped_inventories),
            ("kv_forgotten", "Instances forgotten for want of an inventory", stats.forgotten),
            ("kv_throttles", "Times an instance exceeded its budget", stats.throttles),
            ("kv_throttled_batches", "Batches without effect since", stats.throttled_batches),
            ("kv_namespace_mutes", "Times a namespace exceeded its budget", stats.namespace_mutes),
            ("kv_audit_failures", "Tiers that broken memory had changed", stats.audit_failures),
            ("kv_index_full", "Times that the index had no room", stats.index_full),
            ("kv_unknown_batches", "Batches of no known instance", stats.unknown_batches),
            ("kv_unknown_records", "Records about no known instance", stats.unknown_controls),
            (
                "kv_refused_instances",
                "Batches of one instance too many",
                stats.refused_instances,
            ),
            ("kv_refused_epochs", "Batches of epochs far ahead", stats.refused_epochs),
            ("kv_stream_holes", "Holes in the stream", stats.stream_holes),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def _workers(self) -> Iterable[Metric]:
        """Yield the series of workers; those of one that is gone have ended."""
        states = dict.fromkeys(Trust, 0)
        live: set[str] = set()
        names = self._service.index.names()
        yield from _WorkerPart().families()  # each is there, also without workers
        for part in batched(names, WORKERS_A_PART):
            families = _WorkerPart()
            for name in part:
                view = self._service.index.instance(name)
                if view is None:
                    continue
                states[view.trust] += 1
                if view.trust is not Trust.gone:
                    live.add(name.worker)
                    is_silent = bool(view.stall or self._service.overdue_at(name))
                    families.add(view, self._service.load_shown(view), is_silent)
            yield from families.families()
        workers = GaugeMetricFamily("kv_workers", "Ranks believed so far", labels=["trust"])
        for state, count in states.items():
            workers.add_metric([state], count)
        yield workers
        yield from self._by_worker.families(live)
        yield from self._rejected({name.worker for name in names} - live)

    def _rejected(self, gone: Set[str]) -> Iterable[Metric]:
        try:
            rejected = self._service.index.stats().rejected
        except IndexUnavailable:
            return
        if not self._service.feed.is_ready:
            return
        name, text = "kv_rejected_events", "Events and payloads skipped"
        yield CounterMetricFamily(name, text, labels=["worker", "kind"])
        for part in batched(rejected, WORKERS_A_PART):
            family = CounterMetricFamily(name, text, labels=["worker", "kind"])
            for each in part:
                if each.worker not in gone:
                    family.add_metric([_label(each.worker), each.kind], each.count)
            yield family

    def _router(self) -> Iterable[Metric]:
        service = self._service
        while service.settle_predictions(WORKERS_A_PART):  # what no route has judged yet
            yield CounterMetricFamily("kv_overlay_confirmed", CONFIRMED)
        info = GaugeMetricFamily("kv_build_info", "1", labels=["version", "policy"])
        info.add_metric([__version__, service.policy.name], 1)
        yield info
        yield condition_gauge(self._conditions)
        if self._replicas is not None:
            yield GaugeMetricFamily(
                "kv_router_siblings", "Other routers heard", value=self._replicas.num_replicas
            )
            yield CounterMetricFamily(
                "kv_router_signals_dropped",
                "Announcements to other routers lost here",
                value=self._replicas.num_dropped,
            )
        for name, text, value in (
            ("kv_requests_in_flight", "Requests routed and not done", len(service.loads)),
            ("kv_overlay_entries", "Decisions whose blocks are predicted", len(service.overlay)),
            ("kv_overlay_bytes", "Memory of predicted chains", service.overlay.num_bytes),
            ("kv_decisions_waiting", "Decisions not yet in the log", service.log.num_waiting),
            ("kv_decisions_kept_bytes", "Memory of kept decisions", service.log.kept_bytes),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        dropped = num_dropped_lines()
        for name, text, value in (
            ("kv_requests_expired", "Requests never reported done", service.loads.num_expired),
            (
                "kv_overdue_requests",
                "Requests of which nothing was heard in time",
                service.overdue.num_overdue,
            ),
            (
                "kv_implausible_reports",
                "Reported times that cannot be true, from which no rate was learnt",
                service.loads.num_implausible,
            ),
            ("kv_overlay_confirmed", CONFIRMED, service.overlay.num_confirmed),
            ("kv_overlay_expired", "Predictions that ran out", service.overlay.num_expired),
            ("kv_decisions_dropped", "Decisions lost to the log", service.log.num_dropped),
            ("kv_log_lines_dropped", "Lines of this process's log that nothing read", dropped),
            (
                "kv_decisions_cut",
                "Decisions in the log with parts left out: their messages were too large",
                service.log.num_cut,
            ),
            (
                "kv_decisions_reduced",
                "Kept decisions cut to an outline for want of bytes",
                service.log.num_reduced,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)


class _WorkerPart:
    """The families of workers, with the samples of some of them."""

    def __init__(self) -> None:
        labels = ["worker", "rank"]
        self._trust = GaugeMetricFamily(
            "kv_worker_trust", "1 at how far it is believed", labels=[*labels, "trust"]
        )
        self._blocks = GaugeMetricFamily(
            "kv_worker_blocks", "Blocks held, once in each tier that holds them", labels=labels
        )
        self._divergent = GaugeMetricFamily(
            "kv_worker_divergent_blocks",
            "Blocks of a tier whose last digest was not the index's, as each side counts them",
            labels=[*labels, "tier", "side"],
        )
        self._muted = GaugeMetricFamily(
            "kv_namespaces_muted", "Namespaces of which it holds more than it says", labels=labels
        )
        self._unresponsive = GaugeMetricFamily(
            "kv_worker_unresponsive",
            "1 while its engine gives no sign of life, or reports about its requests are overdue",
            labels=labels,
        )
        self._in_flight = GaugeMetricFamily("kv_worker_in_flight", "Requests routed", labels=labels)
        self._queued = GaugeMetricFamily(
            "kv_worker_queued_seconds", "Predicted prefill queued", labels=labels
        )
        self._work = GaugeMetricFamily(
            "kv_worker_work_seconds", "Decayed work given", labels=labels
        )
        self._speed = GaugeMetricFamily(
            "kv_worker_prefill_tokens_per_second", "Learnt prefill rate", labels=labels
        )

    def add(self, view: InstanceView, load: InstanceLoad | None, is_silent: bool) -> None:
        where = [_label(view.instance.worker), str(view.instance.rank)]
        for state in LIVE_STATES:
            self._trust.add_metric([*where, state], float(view.trust is state))
        self._blocks.add_metric(where, view.num_blocks)
        self._muted.add_metric(where, len(view.muted))
        self._unresponsive.add_metric(where, float(is_silent))
        for tier, counts in view.divergent.items():
            for side, count in zip(("worker", "index"), counts, strict=True):
                self._divergent.add_metric([*where, tier.name, side], count)
        if load is not None:
            self._in_flight.add_metric(where, load.in_flight)
            self._queued.add_metric(where, load.queued_ms / 1000)
            self._work.add_metric(where, load.work_ms / 1000)
            self._speed.add_metric(where, 1000 / load.compute_ms_per_token)

    def families(self) -> Iterable[Metric]:
        yield from (self._trust, self._blocks, self._divergent, self._muted)
        yield from (self._unresponsive, self._in_flight, self._queued, self._work, self._speed)
