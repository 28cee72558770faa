"""What every worker has to do, as far as routers gave it, and how fast it turned out to be.

    given_ms     predicted prefill of all requests so far   |--------------------|
    drained_ms   how far the worker has got, by the clock   |---------->  queued = the rest
    end_ms       of a request: given_ms right after it      |-------|  there its prefill ends

A report that a prefill has ended says where `drained` was at that moment, so errors of the
prediction end there and never add up. Pure: callers pass the time in seconds of a monotonic clock.
"""

from collections import OrderedDict
from collections.abc import Set

from msgspec import Struct

from kvatlas.router.requests import Report
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan
from kvatlas.schemas.settings import RouterSettings

#: tokens that a prior counts for, against those of reports
PRIOR_TOKENS = 2_000.0
#: part by which each report replaces what was known before
LEARNING_RATE = 0.1
#: a single report moves a rate by at most this factor
MAX_SURPRISE = 16.0
#: reports of less tell the overhead of a step, not a rate
MIN_LEARNT_TOKENS = 32
MAX_REQUESTS = 1_000_000


class Load(Struct, frozen=True, gc=False):
    """What a policy sees of an instance's load."""

    in_flight: int
    queued_ms: float
    work_ms: float
    compute_ms_per_token: float
    pull_ms_per_token: float


class Rate:
    """Milliseconds per token, learnt from reports that are weighted by their tokens."""

    def __init__(self, ms_per_token: float) -> None:
        #: the present estimate
        self.ms_per_token = ms_per_token
        self._tokens = PRIOR_TOKENS
        self._ms = PRIOR_TOKENS * ms_per_token

    def learn(self, tokens: int, ms: float) -> None:
        """Take a report in."""
        known = self.ms_per_token * tokens
        ms = min(max(ms, known / MAX_SURPRISE), known * MAX_SURPRISE)
        self._tokens += LEARNING_RATE * (tokens - self._tokens)
        self._ms += LEARNING_RATE * (ms - self._ms)
        self.ms_per_token = self._ms / self._tokens


class _Model:
    """Priors of a model's workers: what all of them turned out to be."""

    def __init__(self, settings: RouterSettings) -> None:
        self.compute = Rate(1000 / settings.prefill_tokens_per_second)
        self.pull = Rate(1000 / settings.pull_tokens_per_second)


class _Worker:
    def __init__(self, epoch: int, model: str, prior: _Model, work_ms: float, now: float) -> None:
        self.epoch, self.model = epoch, model
        self.in_flight = 0
        self.given_ms = self.drained_ms = 0.0
        #: end_ms of the newest request whose prefill is reported; `drained` is exact up to here
        self.reported_ms = 0.0
        self.work_ms = work_ms
        self.as_of = self.seen_at = now
        self.compute = Rate(prior.compute.ms_per_token)
        self.pull = Rate(prior.pull.ms_per_token)

    @property
    def load(self) -> Load:
        """The load as of the last advance."""
        return Load(
            self.in_flight,
            self.given_ms - self.drained_ms,
            self.work_ms,
            self.compute.ms_per_token,
            self.pull.ms_per_token,
        )

    def restart(self, epoch: int) -> None:
        """Forget the requests of an earlier incarnation; what it had to do died with it."""
        self.epoch = epoch
        self.in_flight = 0
        self.given_ms = self.drained_ms = self.reported_ms = 0.0

    def advance(self, now: float, half_life_seconds: float) -> None:
        """Let the time pass: the queue drains, old work fades."""
        seconds = now - self.as_of
        if seconds <= 0.0:
            return
        self.as_of = now
        if self.drained_ms < self.given_ms:
            self.drained_ms = min(self.given_ms, self.drained_ms + 1000 * seconds)
        if self.work_ms:
            self.work_ms *= 0.5 ** (seconds / half_life_seconds)


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


class Loads:
    """Loads and learnt rates of all instances that were ever asked about.

    A request counts until it is reported done, or for `request_timeout_seconds` after its last sign
    of life, so a lost report never counts for ever.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._models: dict[str, _Model] = {}
        self._workers: dict[InstanceId, _Worker] = {}
        #: by time of the last sign of life, oldest first
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self.num_expired = 0
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_workers(self) -> int:
        """Number of instances with a load of their own."""
        return len(self._workers)

    def of(self, instance: InstanceId, epoch: int, model: str, now: float) -> Load:
        """Return the load of an instance; a higher epoch than before starts with an empty queue.

        A new instance starts with the mean work of its model's others: it takes its share from now
        on, instead of all requests until it has caught up.
        """
        worker = self._workers.get(instance)
        if worker is None or worker.model != model:
            worker = self._join(instance, epoch, model, now)
        elif epoch > worker.epoch:
            worker.restart(epoch)
        worker.advance(now, self._settings.work_half_life_seconds)
        worker.seen_at = now
        return worker.load

    def known(self, instance: InstanceId, now: float) -> Load | None:
        """Return the load of an instance, None if it was never a candidate or long ago."""
        worker = self._workers.get(instance)
        if worker is None:
            return None
        worker.advance(now, self._settings.work_half_life_seconds)
        return worker.load

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
        compute_ms = plan.compute_tokens * worker.compute.ms_per_token
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
            self._workers = {
                instance: worker
                for instance, worker in self._workers.items()
                if worker.seen_at + timeout > now or worker.in_flight
            }

    def _join(self, instance: InstanceId, epoch: int, model: str, now: float) -> _Worker:
        prior = self._models.setdefault(model, _Model(self._settings))
        others = [w for w in self._workers.values() if w.model == model]
        for other in others:
            other.advance(now, self._settings.work_half_life_seconds)
        mean_ms = sum(w.work_ms for w in others) / len(others) if others else 0.0
        worker = self._workers[instance] = _Worker(epoch, model, prior, mean_ms, now)
        return worker

    def _worker_of(self, request: _Request) -> _Worker | None:
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
            self._learn(worker, request, report, computed_tokens)

    def _learn(
        self, worker: _Worker, request: _Request, report: Report, computed_tokens: int
    ) -> None:
        model = self._models[worker.model]
        actual_ms = computed_tokens * worker.compute.ms_per_token
        worker.work_ms = max(worker.work_ms + actual_ms - request.compute_ms, 0.0)
        if report.prefill_ms and computed_tokens >= MIN_LEARNT_TOKENS:
            worker.compute.learn(computed_tokens, report.prefill_ms)
            model.compute.learn(computed_tokens, report.prefill_ms)
        pulled_tokens = (report.pulled_blocks or 0) * request.block_tokens
        pulled_tokens = min(pulled_tokens, request.num_tokens)
        if report.pull_ms and pulled_tokens >= MIN_LEARNT_TOKENS:
            moving_ms = max(report.pull_ms - self._settings.pull_fixed_ms, 0.0)
            worker.pull.learn(pulled_tokens, moving_ms)
            model.pull.learn(pulled_tokens, moving_ms)


def _withdraw(worker: _Worker, request: _Request) -> None:
    """Take back what a failed request would still have cost."""
    ahead_ms = min(max(request.end_ms - worker.drained_ms, 0.0), request.predicted_ms)
    worker.given_ms -= ahead_ms
    worker.work_ms = max(worker.work_ms - ahead_ms, 0.0)


def _correct_queue(worker: _Worker, end_ms: float, ended_at: float | None, now: float) -> None:
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
