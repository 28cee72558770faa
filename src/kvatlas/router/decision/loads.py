"""What every worker has to do, as far as routers gave it, and how fast it turned out to be.

    given_ms     predicted prefill of all requests so far   |--------------------|
    drained_ms   how far the worker has got, by the clock   |---------->  queued = the rest
    end_ms       of a request: given_ms right after it      |-------|  there its prefill ends

A report that a prefill has ended says where `drained` was at that moment, so errors of the
prediction end there and never add up. Pure: callers pass the time in seconds of a monotonic clock.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kvatlas.indexer.index.kernel import IS_COMPILED
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.load_table import MAX_EPOCH, LoadRow, LoadTable
from kvatlas.router.decision.rates import ModelRate, is_plausible
from kvatlas.router.decision.requests import Report
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan
from kvatlas.schemas.settings import RouterSettings

#: reports of less tell the overhead of a step, not a rate
MIN_LEARNT_TOKENS = 32
MAX_REQUESTS = 1_000_000
#: a worker that reports no rate for so long, while others of its model do, is judged less by its
#: old reports, by one each interval: one that is priced too high gets no requests to correct it
FADE_AFTER_SECONDS, FADE_INTERVAL_SECONDS = 60.0, 10.0
#: how often rates are compared with those of their model, and by which factor such a rate may move
#: before they are compared at once; a report pays for a few workers, so that many wait for several
COMPARE_SECONDS, MOVED_RATIO, COMPARED_A_REPORT = 1.0, 1.25, 16


class InstanceLoad(Struct, frozen=True, gc=False):
    """What a policy sees of an instance's load."""

    in_flight: int
    queued_ms: float
    work_ms: float
    compute_ms_per_token: float
    pull_ms_per_token: float


class LoadKey(NamedTuple):
    """An instance whose load is asked for, and the model that it serves."""

    instance: InstanceId
    epoch: int
    model: str


class LoadSelection:
    """Instances whose loads are asked for together, and their rows, which are found once."""

    def __init__(self, asked: Iterable[LoadKey]) -> None:
        self.keys = tuple(asked)
        self.epochs = _fixed([min(each.epoch, MAX_EPOCH) for each in self.keys])
        #: who found the rows, and as of which version of it
        self.rows_found_by: object = None
        self.version = -1
        self.rows = _fixed([])


def _fixed(numbers: Sequence[int]) -> k.I64:
    """Return numbers as kernels want their input."""
    made = np.array(numbers, np.int64)
    made.flags.writeable = False
    return made


class _Model:
    """Priors of a model's workers: what all of them turned out to be."""

    def __init__(self, settings: RouterSettings) -> None:
        self.compute = ModelRate(1000 / settings.prefill_tokens_per_second)
        self.pull = ModelRate(1000 / settings.pull_tokens_per_second)
        #: when the newest report of a rate came; seconds
        self.learnt_at = -math.inf
        #: the rates that its workers were compared with
        self.compared = self.rates

    @property
    def rates(self) -> tuple[float, float]:
        """Milliseconds of a token, computed and pulled."""
        return self.compute.ms_per_token, self.pull.ms_per_token

    @property
    def has_moved(self) -> bool:
        """Whether its workers should be compared with it again."""
        pairs = zip(self.rates, self.compared, strict=True)
        return any(max(a, b) > MOVED_RATIO * min(a, b) for a, b in pairs)


class _Request(Struct):
    instance: InstanceId
    epoch: int
    block_tokens: int
    end_ms: float
    predicted_ms: float
    compute_ms: float
    #: of the prompt: nobody can have computed or pulled more
    num_tokens: int
    routed_at: float
    renewed_at: float
    #: the router that gave it, empty for this one
    origin: str = ""
    is_prefilled: bool = False
    is_learnt: bool = False


class LoadTracker:
    """Loads and learnt rates of all instances that were ever asked about.

    A request counts until it is reported done, or for `request_timeout_seconds` after its last sign
    of life, so a lost report never counts for ever.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._models: dict[str, _Model] = {}
        self._table = LoadTable()
        self._workers: dict[InstanceId, LoadRow] = {}
        #: rises whenever an instance loses its row
        self._version = 0
        #: by time of the last sign of life, oldest first
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self.num_expired = 0
        #: reports whose times cannot be true, so that no rate was learnt from them
        self.num_implausible = 0
        self._swept_at = self._compared_at = 0.0
        #: reports of rates since they were compared
        self._num_learnt = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_workers(self) -> int:
        """Number of instances with a load of their own."""
        return len(self._workers)

    def of(self, instance: InstanceId, epoch: int, model: str, now: float) -> InstanceLoad:
        """Return the load of an instance; a higher epoch than before starts with an empty queue.

        A new instance starts with the mean work of its model's others: it takes its share from now
        on, instead of all requests until it has caught up.
        """
        worker = self._workers.get(instance)
        if worker is None or worker.model != model:
            self._add_workers([LoadKey(instance, epoch, model)], now)
            worker = self._workers[instance]
        elif min(epoch, MAX_EPOCH) > worker.epoch:
            worker.restart(epoch)
        worker.advance(now, self._settings.work_half_life_seconds)
        worker.seen_at = now
        return _load(worker)

    def fill(self, selection: LoadSelection, now: float, candidate_table: k.F64) -> None:
        """Do `of` for each instance of the selection; write the loads into the rows of a table.

        Nothing is predicted in them yet. O(instances), and compiled.
        """
        if selection.rows_found_by is not self or selection.version != self._version:
            self._find_rows(selection, now)
        if IS_COMPILED:
            half_life = self._settings.work_half_life_seconds
            table = self._table
            k.fill_loads(
                candidate_table,
                table.lines,
                table.epochs,
                selection.rows,
                selection.epochs,
                now,
                half_life,
            )
            return
        for line, asked in enumerate(selection.keys):
            load = self.of(*asked, now)
            candidate_table[line, k.PREDICTED : k.NUM_ASKED] = (
                0.0,
                load.in_flight,
                load.queued_ms,
                load.work_ms,
                load.compute_ms_per_token,
                load.pull_ms_per_token,
            )

    def known(self, instance: InstanceId, now: float, epoch: int = 0) -> InstanceLoad | None:
        """Return the load of an instance, None if it was never a candidate or long ago.

        What an epoch before `epoch` had to do died with it.
        """
        worker = self._workers.get(instance)
        if worker is None or worker.epoch < epoch:
            return None
        worker.advance(now, self._settings.work_half_life_seconds)
        return _load(worker)

    def routed(
        self,
        request_id: str,
        instance: InstanceId,
        plan: Plan,
        transfer_ms: float,
        now: float,
        origin: str = "",
    ) -> None:
        """Count a request that has been sent to an instance, which `of` has been asked about.

        `origin` is the router that sent it there, if it was another one.
        """
        self.expire(now)
        worker = self._workers[instance]
        compute_ms = plan.compute_tokens * worker.compute_ms_per_token
        worker.in_flight += 1
        worker.given_ms += compute_ms + transfer_ms
        worker.work_ms += compute_ms
        self._requests[request_id] = _Request(
            instance=instance,
            epoch=worker.epoch,
            block_tokens=plan.block_tokens,
            end_ms=worker.given_ms,
            predicted_ms=compute_ms + transfer_ms,
            compute_ms=compute_ms,
            num_tokens=plan.num_tokens,
            routed_at=now,
            renewed_at=now,
            origin=origin,
        )

    def prompt_of(self, request_id: str) -> tuple[int, int] | None:
        """Return a counted request's (tokens, tokens of a block), None once it no longer counts."""
        request = self._requests.get(request_id)
        return None if request is None else (request.num_tokens, request.block_tokens)

    def instance_of(self, request_id: str) -> InstanceId | None:
        """Return where a request was sent, None once it no longer counts."""
        request = self._requests.get(request_id)
        return None if request is None else request.instance

    def is_prefilled(self, request_id: str) -> bool:
        """Say whether the end of a counted request's prefill has been told."""
        request = self._requests.get(request_id)
        return request is not None and request.is_prefilled

    def forget_origins(self, origins: Set[str]) -> int:
        """Stop counting what other routers gave; return how many requests that were."""
        given = [name for name, each in self._requests.items() if each.origin in origins]
        for name in given:
            request = self._requests.pop(name)
            if worker := self._worker_of(request):
                worker.in_flight -= 1
                if not request.is_prefilled:
                    _withdraw(worker, request)
        return len(given)

    def prefilled(self, request_id: str, report: Report, now: float) -> bool:
        """Take in that a prefill has ended; return whether the request was still counted."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.renewed_at = now
        self._requests.move_to_end(request_id)
        self._end_prefill(request, report, now, ended_at=now)
        return True

    def done(self, request_id: str, report: Report, now: float) -> bool:
        """Take in that a request has ended; return whether it was still counted."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._end_prefill(request, report, now, ended_at=None)
        if worker := self._worker_of(request):
            worker.in_flight -= 1
        return True

    def expire(self, now: float) -> None:
        """Forget requests without a sign of life, and instances that nobody asks about."""
        if now - self._compared_at >= COMPARE_SECONDS:
            self._compare(now)
        timeout = self._settings.request_timeout_seconds
        while self._requests:
            request = next(iter(self._requests.values()))
            if request.renewed_at + timeout > now and len(self._requests) < MAX_REQUESTS:
                break
            self._requests.popitem(last=False)
            self.num_expired += 1
            if worker := self._worker_of(request):
                worker.in_flight -= 1
        if now - self._swept_at > timeout:
            self._swept_at = now
            unseen = [
                instance
                for instance, worker in self._workers.items()
                # not `seen_at + timeout <= now`, which a short timeout is lost in
                if now - worker.seen_at > timeout and not worker.in_flight
            ]
            for instance in unseen:
                self._remove_worker(instance)

    def _find_rows(self, selection: LoadSelection, now: float) -> None:
        """Have a row for each instance on the roll."""
        new = [
            asked
            for asked in selection.keys
            if (known := self._workers.get(asked.instance)) is None or known.model != asked.model
        ]
        if new:
            self._add_workers(new, now)
        selection.rows = _fixed([self._workers[asked.instance].row for asked in selection.keys])
        selection.rows_found_by, selection.version = self, self._version

    def _add_workers(self, new: Iterable[LoadKey], now: float) -> None:
        """Give rows to instances that have none for their model."""
        means: dict[str, float] = {}
        for instance, epoch, model in new:
            if instance in self._workers:
                self._remove_worker(instance)
            prior = self._models.setdefault(model, _Model(self._settings))
            if model not in means:
                means[model] = self._mean_work_ms(model, now)
            rates = prior.compute.ms_per_token, prior.pull.ms_per_token
            ratio = self._settings.max_rate_ratio
            worker = self._workers[instance] = LoadRow(self._table, epoch, model, rates, ratio)
            worker.work_ms, worker.as_of, worker.seen_at = means[model], now, now

    def _mean_work_ms(self, model: str, now: float) -> float:
        others = [worker for worker in self._workers.values() if worker.model == model]
        for other in others:
            other.advance(now, self._settings.work_half_life_seconds)
        return sum(worker.work_ms for worker in others) / len(others) if others else 0.0

    def _compare(self, now: float) -> None:
        """Keep rates near those of their model, of which little is known nearer. O(workers)"""
        self._compared_at, self._num_learnt = now, 0
        for model in self._models.values():
            model.compared = model.rates
        for worker in self._workers.values():
            model = self._models[worker.model]
            is_silent = worker.learnt_at + FADE_AFTER_SECONDS <= now
            is_fading = is_silent and worker.num_samples and model.learnt_at > worker.learnt_at
            if is_fading and worker.faded_at + FADE_INTERVAL_SECONDS <= now:
                worker.faded_at = now
                worker.fade(*model.rates)
            else:
                worker.follow(*model.rates)

    def _remove_worker(self, instance: InstanceId) -> None:
        self._version += 1
        self._table.release(self._workers.pop(instance).row)

    def _worker_of(self, request: _Request) -> LoadRow | None:
        worker = self._workers.get(request.instance)
        return worker if worker and worker.epoch == request.epoch else None

    def _end_prefill(
        self, request: _Request, report: Report, now: float, ended_at: float | None
    ) -> None:
        worker = self._worker_of(request)
        if worker is None:
            return
        worker.advance(now, self._settings.work_half_life_seconds)
        if not request.is_prefilled:
            request.is_prefilled = True
            if report.failed:
                _withdraw(worker, request)
                return
            if report.ttft_ms is not None:
                ended_at = min(request.routed_at + report.ttft_ms / 1000, now)
            _correct_queue(worker, request.end_ms, ended_at, now)
        if report.computed_tokens is not None and not request.is_learnt:
            request.is_learnt = True
            computed_tokens = min(report.computed_tokens, request.num_tokens)
            self._learn(worker, request, report, computed_tokens, now)

    def _learn(
        self,
        worker: LoadRow,
        request: _Request,
        report: Report,
        computed_tokens: int,
        now: float,
    ) -> None:
        model = self._models[worker.model]
        actual_ms = computed_tokens * worker.compute_ms_per_token
        worker.work_ms = max(worker.work_ms + actual_ms - request.compute_ms, 0.0)
        elapsed_ms = 1000 * (now - request.routed_at)
        pulled_tokens = (report.pulled_blocks or 0) * request.block_tokens
        pulled_tokens = min(pulled_tokens, request.num_tokens)
        reported = [
            (report.prefill_ms, computed_tokens, 0.0, model.compute, worker.learn_compute),
            (
                report.pull_ms,
                pulled_tokens,
                self._settings.pull_fixed_ms,
                model.pull,
                worker.learn_pull,
            ),
        ]
        for took_ms, tokens, fixed_ms, rate, learn in reported:
            if not took_ms or tokens < MIN_LEARNT_TOKENS:
                continue
            if not is_plausible(took_ms, elapsed_ms, report.ttft_ms, report.output_tokens):
                self.num_implausible += 1
                continue
            model.learnt_at = now
            moving_ms = max(took_ms - fixed_ms, 0.0)
            rate.learn(tokens, moving_ms)
            learn(tokens, moving_ms, rate.ms_per_token, now)
            self._num_learnt += 1
        if self._num_learnt * COMPARED_A_REPORT >= len(self._workers) and model.has_moved:
            self._compare(now)


def _load(worker: LoadRow) -> InstanceLoad:
    """Return the load as of the last advance."""
    return InstanceLoad(
        int(worker.in_flight),
        worker.given_ms - worker.drained_ms,
        worker.work_ms,
        worker.compute_ms_per_token,
        worker.pull_ms_per_token,
    )


def _withdraw(worker: LoadRow, request: _Request) -> None:
    """Take back what a failed request would still have cost."""
    ahead_ms = min(max(request.end_ms - worker.drained_ms, 0.0), request.predicted_ms)
    worker.given_ms -= ahead_ms
    worker.work_ms = max(worker.work_ms - ahead_ms, 0.0)


def _correct_queue(worker: LoadRow, end_ms: float, ended_at: float | None, now: float) -> None:
    """Set how far the worker has got: prefills end in order, so this one's end is a known place.

    Without the time of the end it only says that the worker is at least that far.
    """
    if end_ms <= worker.reported_ms:
        return
    worker.reported_ms = end_ms
    if ended_at is None:
        reached_ms = max(worker.drained_ms, end_ms)
    else:
        reached_ms = end_ms + 1000 * (now - ended_at)
    worker.drained_ms = min(reached_ms, worker.given_ms)
