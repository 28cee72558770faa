"""Workers from which nothing comes back, though requests to others are answered; pure.

    routed --due--> overdue --report, or its blocks appear--> answered, however late
                       `--more of them than chance leaves unreported--> suspect: probed only

A client that never reports, or that sends no request after asking where to, looks the same. What
it costs a healthy worker is bounded: a suspect is tried again after PROBE_SECONDS, and its first
answer to any client clears it. PROBE_REQUESTS bounds what a hung worker costs.

An engine may hang while all that watches it looks alive. What a router sees are requests of which
it hears nothing. It also hears nothing where clients do not report, or not all of them. So a worker
is suspected only if reports about it came before, if reports about others go on, and if its clients
would leave so many requests unreported by chance less often than MAX_CHANCE.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from math import inf

from msgspec import Struct

from kvatlas.schemas.ids import InstanceId

#: fewer requests without an answer say nothing about a worker
MIN_OVERDUE = 3
#: how unlikely it has to be that clients left a worker's requests unreported by chance
MAX_CHANCE = 1e-5
#: what an earlier request counts against the next one, in how many are reported
MEMORY = 0.99
#: what the latest report adds to what is known of how late they come
SMOOTHING = 0.05
#: a suspect is tried again not before so many seconds, nor before so many requests of its model
#: went elsewhere, unless MAX_PROBE_SECONDS have passed: a hung worker gets a small part of few and
#: of many requests, and a healthy one is kept out no longer than by failures that were reported
PROBE_SECONDS, PROBE_REQUESTS, MAX_PROBE_SECONDS = 5.0, 20, 60.0
#: requests watched; further ones are not, which only makes suspicion slower
MAX_WATCHED = 100_000
#: instances known; more, and the first is forgotten, which only clears it
MAX_WORKERS = 10_000
#: requests found overdue by one look, so that no answer pays for many
MAX_PER_LOOK = 64
#: says whether a worker holds a block
IsHeld = Callable[[InstanceId, bytes], bool]


class _Watched(Struct, gc=False):
    instance: InstanceId
    epoch: int
    routed_at: float
    expected_ms: float
    #: the last block that the request makes the worker compute; empty where it computes none
    new_block: bytes
    is_overdue: bool = False


class _Worker(Struct):
    """What is known of one incarnation of an instance."""

    epoch: int
    model: str
    #: when it showed last that it answers
    heard_at: float = -inf
    #: of its requests before those that are overdue now, those reported and not, the older less
    num_reported: float = 0.0
    num_unreported: float = 0.0
    #: requests routed since it was heard that are overdue; when the first of these was routed
    num_overdue: int = 0
    owes_since: float = 0.0
    #: set while it is suspected: when it was tried last, and how many requests of its model were
    #: routed until then
    tried_at: float | None = None
    num_routed_then: int = 0

    @property
    def share_reported(self) -> float:
        """How likely it is that a request is reported, rather too low than too high."""
        return self.num_reported / (self.num_reported + self.num_unreported + 1.0)

    def count(self, num_reported: int, num_unreported: int) -> None:
        """Count requests that are known to be over."""
        memory = MEMORY ** (num_reported + num_unreported)
        self.num_reported = memory * self.num_reported + num_reported
        self.num_unreported = memory * self.num_unreported + num_unreported


class OverdueRequests:
    """Requests by the time when they should have been heard of.

    That is `factor` times what is expected, and never less than `least_seconds`. Expected is what
    the router predicts for the request plus what reports took beyond their predictions lately.
    """

    def __init__(self, least_seconds: float, factor: float) -> None:
        self._least_seconds, self._factor = least_seconds, factor
        self._watched: dict[str, _Watched] = {}
        #: (when it is due, request); has requests that were answered until they would be due
        self._due: list[tuple[float, str]] = []
        self._workers: dict[InstanceId, _Worker] = {}
        #: those that are suspected
        self._suspects: dict[InstanceId, _Worker] = {}
        #: requests routed, by the model of their worker
        self._num_routed = Counter[str]()
        #: seconds from a route to its first report beyond the prediction, smoothed
        self._delay_seconds = 0.0
        #: requests that became overdue, and workers that became suspects, so far
        self.num_overdue = self.num_suspected = 0

    def __len__(self) -> int:
        return len(self._watched)

    def routed(
        self,
        request_id: str,
        instance: InstanceId,
        epoch: int,
        expected_ms: float,
        now: float,
        new_block: bytes = b"",
        model: str = "",
    ) -> None:
        """Watch a request that was sent to an instance of a model, to a suspect as its probe."""
        worker = self._workers.get(instance)
        if worker is None or worker.epoch < epoch:
            self._suspects.pop(instance, None)
            worker = self._workers[instance] = _Worker(epoch, model)
            if len(self._workers) > MAX_WORKERS:
                self._forget(next(iter(self._workers)))
            if len(self._num_routed) > MAX_WORKERS:
                self._num_routed.clear()  # of models whose workers are gone
        self._num_routed[worker.model] += 1
        if worker.tried_at is not None:
            self._try(worker, now)
        if len(self._due) >= MAX_WATCHED:
            return
        expected_seconds = expected_ms / 1000 + self._delay_seconds
        due_at = now + max(self._factor * expected_seconds, self._least_seconds)
        self._watched[request_id] = _Watched(instance, epoch, now, expected_ms, new_block)
        heapq.heappush(self._due, (due_at, request_id))

    def reported(self, request_id: str, now: float) -> None:
        """Take in that a request was answered, or its first token; it clears its worker."""
        watched = self._watched.pop(request_id, None)
        worker = None if watched is None else self._worker_of(watched)
        if watched is None or worker is None:
            return
        if not watched.is_overdue:
            delay = max(now - watched.routed_at - watched.expected_ms / 1000, 0.0)
            self._delay_seconds += SMOOTHING * (delay - self._delay_seconds)
        self._hear(watched.instance, worker, now)
        worker.count(1, 0)

    def answered(self, instance: InstanceId, now: float) -> None:
        """Take in that an instance answered a request that another router sent; it clears it."""
        if worker := self._workers.get(instance):
            self._hear(instance, worker, now)

    def look(self, now: float, is_held: IsHeld) -> None:
        """Find what has become overdue; to be called before suspects are asked for."""
        for _ in range(MAX_PER_LOOK):
            if not self._due or self._due[0][0] > now:
                return
            _, request_id = heapq.heappop(self._due)
            watched = self._watched.get(request_id)
            if watched is None:
                continue
            worker = self._worker_of(watched)
            if worker is None or watched.is_overdue:
                del self._watched[request_id]
            elif watched.new_block and is_held(watched.instance, watched.new_block):
                del self._watched[request_id]
                self._hear(watched.instance, worker, now)
            else:
                watched.is_overdue = True
                heapq.heappush(self._due, (now + MAX_PROBE_SECONDS, request_id))
                self._owe(watched, worker, now)

    def left_out(self, now: float) -> dict[InstanceId, str]:
        """Return the suspects that are not due to be tried again, with the reason."""
        if not self._suspects:
            return {}
        return {
            instance: self.reason(instance, now)
            for instance, worker in self._suspects.items()
            if not self._may_be_tried(worker, now)
        }

    def reason(self, instance: InstanceId, now: float) -> str:
        """Say why an instance is suspected; empty where it is not."""
        worker = self._suspects.get(instance)
        if worker is None:
            return ""
        seconds = now - worker.owes_since
        return f"overdue: no answer reported to {worker.num_overdue} requests for {seconds:.0f} s"

    def _try(self, worker: _Worker, now: float) -> None:
        worker.tried_at, worker.num_routed_then = now, self._num_routed[worker.model]

    def _may_be_tried(self, worker: _Worker, now: float) -> bool:
        seconds = inf if worker.tried_at is None else now - worker.tried_at
        num_routed = self._num_routed[worker.model] - worker.num_routed_then
        # fewer than then: they were counted anew
        is_small_part = not 0 <= num_routed < PROBE_REQUESTS
        return seconds >= (PROBE_SECONDS if is_small_part else MAX_PROBE_SECONDS)

    def _forget(self, instance: InstanceId) -> None:
        self._workers.pop(instance, None)
        self._suspects.pop(instance, None)

    def _hear(self, instance: InstanceId, worker: _Worker, now: float) -> None:
        """The worker answers: what it owed until now was left unreported by its clients."""
        worker.count(0, worker.num_overdue)
        worker.heard_at, worker.num_overdue, worker.tried_at = now, 0, None
        self._suspects.pop(instance, None)

    def _owe(self, watched: _Watched, worker: _Worker, now: float) -> None:
        self.num_overdue += 1
        if watched.routed_at < worker.heard_at:
            worker.count(0, 1)  # it has answered since: the client did not report
            return
        if not worker.num_overdue:
            worker.owes_since = watched.routed_at
        worker.num_overdue += 1
        if worker.tried_at is None and self._is_suspect(watched.instance, worker):
            self.num_suspected += 1
            self._try(worker, now)
            self._suspects[watched.instance] = worker

    def _is_suspect(self, instance: InstanceId, worker: _Worker) -> bool:
        if worker.num_overdue < MIN_OVERDUE or worker.heard_at == -inf:
            return False
        others = [
            other.share_reported
            for name, other in self._workers.items()
            if name != instance and other.heard_at >= worker.owes_since
        ]
        if not others:
            return False  # no reports any more, or nothing is sent elsewhere
        share = min(worker.share_reported, sum(others) / len(others))
        return bool((1.0 - share) ** worker.num_overdue <= MAX_CHANCE)

    def _worker_of(self, watched: _Watched) -> _Worker | None:
        worker = self._workers.get(watched.instance)
        return worker if worker and worker.epoch == watched.epoch else None
