"""Other routers of the fleet: their requests count here too, and theirs are found from here.

    own signal --publish--> all others     others' signals --ReplicaState--> loads, predictions

A router that is silent for SILENCE_SECONDS no longer counts, and neither does what it gave. All
of it is an overlay: nothing of it is in the log, and a single router works the same.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec

from kvatlas.events.bus import Bus, Subscription
from kvatlas.events.subjects import ROUTERS, router_subject
from kvatlas.router.decision.failures import Failures
from kvatlas.router.decision.loads import LoadTracker
from kvatlas.router.decision.overdue import OverdueRequests
from kvatlas.router.decision.predictions import PredictedBlocks
from kvatlas.router.decision.requests import Report
from kvatlas.router.recorder import without_chains
from kvatlas.router.replicas.signals import (
    MAX_DECISION_ID,
    Alive,
    Done,
    Joined,
    Prefilled,
    Routed,
    Signal,
    StateRequested,
    decode_signal,
    encode_signal,
    router_of,
)
from kvatlas.schemas.errors import (
    BusUnavailable,
    MalformedBatch,
    MalformedSignal,
    RequestFailed,
    UnknownDecision,
)
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Decision, decode_decision

#: between two signs of life of a router that has nothing else to say
ALIVE_SECONDS = 1.0
#: several signs of life: a shorter one forgets routers that are only slow
SILENCE_SECONDS = 5.0
#: own requests that a router that has joined is told about
MAX_RETOLD = 10_000
#: bytes of the chain of each of them: predictions are short-lived, loads are not
MAX_RETOLD_CHAIN_BYTES = 1_024
#: signals that wait for the broker; older ones are dropped and counted
MAX_WAITING = 10_000
#: of which so many have their chain; the others tell of load only
MAX_WAITING_WITH_CHAIN = 512
#: a decision that is larger goes without its chains: more than a broker takes by default
MAX_ANSWER_BYTES = 1 << 20
#: how long another router may take to find a decision of its own
ASK_SECONDS = 1.0
#: routers that are heard; more are none of this fleet
MAX_REPLICAS = 1_024

_logger = logging.getLogger(__name__)


class ReplicaState:
    """What other routers do to the loads of this one. Pure: callers pass the time."""

    def __init__(
        self,
        router_id: str,
        loads: LoadTracker,
        overlay: PredictedBlocks,
        failures: Failures,
        overdue: OverdueRequests | None = None,
    ) -> None:
        """`overdue` has this router's own requests, about which others may get the reports."""
        self.router_id, self._overdue = router_id, overdue
        self._loads, self._overlay, self._failures = loads, overlay, failures
        #: router -> when it was last heard
        self._heard: dict[str, float] = {}
        #: own requests under way
        self._own: dict[str, Routed] = {}
        #: signals of others, and requests of routers that fell silent
        self.num_taken = self.num_forgotten = 0

    @property
    def num_replicas(self) -> int:
        """Routers that are heard, without this one."""
        return len(self._heard)

    def published(self, signal: Signal) -> None:
        """Remember what this router says itself."""
        match signal:
            case Routed(decision_id, chain=chain):
                if len(chain) > MAX_RETOLD_CHAIN_BYTES:
                    signal = msgspec.structs.replace(signal, chain=chain[:MAX_RETOLD_CHAIN_BYTES])
                self._own[decision_id] = signal
                while len(self._own) > MAX_RETOLD:
                    del self._own[next(iter(self._own))]
            case Done(decision_id):
                self._own.pop(decision_id, None)

    def apply(self, router: str, signal: Signal, now: float) -> list[Signal]:
        """Count what another router says; return what it has to be told in turn."""
        if router == self.router_id:
            return []
        is_news = router not in self._heard
        if is_news and len(self._heard) >= MAX_REPLICAS:
            return []
        self._heard[router] = now
        self.num_taken += 1
        match signal:
            case Joined():
                return self._requests_in_flight()
            case StateRequested(asked):
                return self._requests_in_flight() if asked == self.router_id else []
            case Routed():
                self._routed(router, signal, now)
            case Prefilled(decision_id, report):
                self._hear(decision_id, report, now)
                self._loads.prefilled(decision_id, report, now)
            case Done(decision_id, report):
                self._done(signal, now)
            case Alive():
                pass
        # of a router that was silent, or here before us, what it gave meanwhile is unknown
        return [StateRequested(router)] if is_news else []

    def sweep(self, now: float) -> None:
        """Forget routers that are silent and what they gave, and own requests that have expired."""
        silent = {router for router, at in self._heard.items() if at + SILENCE_SECONDS < now}
        if silent:
            for router in silent:
                del self._heard[router]
            num_requests = self._loads.forget_origins(silent)
            self.num_forgotten += num_requests
            _logger.info("silent: %s; %d requests count no more", sorted(silent)[:8], num_requests)
        for name in [name for name in self._own if self._loads.instance_of(name) is None]:
            del self._own[name]

    def _requests_in_flight(self) -> list[Signal]:
        """Return what says of all own requests where they are and how far."""
        told: list[Signal] = []
        for name, routed in self._own.items():
            if self._loads.instance_of(name) is not None:
                told.append(routed)
                if self._loads.is_prefilled(name):
                    told.append(Prefilled(name, Report()))
        return told

    def _routed(self, router: str, signal: Routed, now: float) -> None:
        instance = InstanceId(signal.worker, signal.rank)
        if self._loads.instance_of(signal.decision_id) is not None:
            return  # told again because somebody joined
        self._loads.of(instance, signal.epoch, signal.model, now)
        self._loads.routed(
            signal.decision_id, instance, signal.plan, signal.transfer_ms, now, router
        )
        self._overlay.expect(signal.decision_id, (instance, signal.epoch), signal.chain, now)

    def _hear(self, decision_id: str, report: Report, now: float) -> None:
        if self._overdue is None or report.failed:
            return
        self._overdue.reported(decision_id, now)
        # of another router's request, which is not watched here, it says as much of the worker
        if instance := self._loads.instance_of(decision_id):
            self._overdue.answered(instance, now)

    def _done(self, signal: Done, now: float) -> None:
        instance = self._loads.instance_of(signal.decision_id)
        self._own.pop(signal.decision_id, None)
        self._hear(signal.decision_id, signal.report, now)
        self._loads.done(signal.decision_id, signal.report, now)
        if signal.report.failed:
            self._overlay.withdraw(signal.decision_id)
            if instance is not None:
                self._failures.failed(instance, now)


class RouterReplicas:
    """Speaks for one router to all others for as long as it is entered."""

    def __init__(
        self,
        bus: Bus,
        state: ReplicaState,
        find: Callable[[str], Decision | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._state, self._find, self._clock = bus, state, find, clock
        self._waiting: deque[Signal] = deque(maxlen=MAX_WAITING)
        self._is_due = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        #: announcements that could not be read, and own signals dropped before they were sent
        self.num_rejected = self.num_dropped = 0

    async def __aenter__(self) -> Self:
        subject = router_subject(self._state.router_id)
        self._subscriptions.append(await self._bus.listen(ROUTERS, self._receive))
        self._subscriptions.append(await self._bus.serve(subject, self._answer))
        self.publish(Joined())
        self._tasks = [
            asyncio.create_task(part()) for part in (self._publish_waiting, self._send_heartbeats)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for subscription in self._subscriptions:
            await subscription.close()

    @property
    def num_replicas(self) -> int:
        """Routers that are heard, without this one."""
        return self._state.num_replicas

    def publish(self, signal: Signal) -> None:
        """Tell all others; at once if there is a broker, and never waiting for it."""
        self._state.published(signal)
        if len(self._waiting) == MAX_WAITING:
            self.num_dropped += 1
        if len(self._waiting) >= MAX_WAITING_WITH_CHAIN and isinstance(signal, Routed):
            signal = msgspec.structs.replace(signal, chain=b"")
        self._waiting.append(signal)
        self._is_due.set()

    async def decision(self, decision_id: str) -> Decision:
        """Return a decision of another router. Raises UnknownDecision."""
        router = router_of(decision_id)
        if router == self._state.router_id:
            raise UnknownDecision(decision_id)
        try:
            answer = await self._bus.request(
                router_subject(router), decision_id.encode(), ASK_SECONDS
            )
            return decode_decision(answer)
        except (BusUnavailable, RequestFailed, MalformedBatch):
            raise UnknownDecision(decision_id) from None

    def _receive(self, payload: bytes) -> None:
        try:
            envelope = decode_signal(payload)
        except MalformedSignal as error:
            self.num_rejected += 1
            _logger.debug("an announcement on %s: %s", ROUTERS, error)
            return
        for signal in self._state.apply(envelope.router, envelope.signal, self._clock()):
            self.publish(signal)

    async def _answer(self, payload: bytes) -> bytes:
        decision_id = payload[:MAX_DECISION_ID].decode(errors="replace")
        found = self._find(decision_id)
        if found is None:
            raise UnknownDecision(decision_id)
        answer = msgspec.msgpack.encode(found)
        if len(answer) > MAX_ANSWER_BYTES:
            return msgspec.msgpack.encode(without_chains(found))
        return answer

    async def _publish_waiting(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._waiting:
                payload = encode_signal(self._state.router_id, self._waiting[0])
                try:
                    await self._bus.announce(ROUTERS, payload)
                except BusUnavailable:
                    await asyncio.sleep(ALIVE_SECONDS)
                else:
                    self._waiting.popleft()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            if not self._waiting:
                self.publish(Alive())
            self._state.sweep(self._clock())
