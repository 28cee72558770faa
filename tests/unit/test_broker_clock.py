"""What time it is at the broker, with hosts whose clocks differ."""

import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

import kvatlas
from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.nats.broker_clock import BrokerClock
from kvatlas.events.nats.quorum import _nanoseconds
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.router.http.app import create_app
from kvatlas.router.service import RouterService
from kvatlas.schemas.settings import RouterSettings
from testkit.builders import a_batch, stored, subject_of, up
from testkit.waiting import until

SECOND = 10**9
MS = 10**6
#: of the broker's clock against ours, in seconds
SKEWS = (-86_400.0, 86_400.0)
#: what a slow machine may take
LIMIT_MS = 3_600_000.0


def test_the_middle_of_an_exchange_is_when_the_broker_answered() -> None:
    clock = BrokerClock()
    assert clock.offset_ns is None
    clock.take(100, 300, 5_000)
    assert clock.offset_ns == 4_800


def test_the_shortest_exchange_counts() -> None:
    clock = BrokerClock()
    clock.take(0, 40 * MS, 1_020 * MS)
    clock.take(100 * MS, 102 * MS, 1_104 * MS)
    clock.take(200 * MS, 240 * MS, 1_205 * MS)
    assert clock.offset_ns == 1_003 * MS


def test_a_clock_that_is_set_is_believed_at_once() -> None:
    clock = BrokerClock()
    for at in range(5):
        clock.take(at * SECOND, at * SECOND + MS, at * SECOND + 7 * SECOND)
    clock.take(6 * SECOND, 6 * SECOND + 3 * MS, 4 * SECOND)
    assert clock.offset_ns is not None
    assert abs(clock.offset_ns + 2 * SECOND) < 4 * MS


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1970-01-01T00:00:01Z", SECOND),
        ("1970-01-01T02:00:01.123456789+02:00", SECOND + 123_456_000),
        ("noon", None),
        ("1970-01-01T00:00:01", None),
        (None, None),
        (7, None),
    ],
)
def test_the_time_of_an_answer_is_read_or_left_out(text: object, ns: int | None) -> None:
    assert _nanoseconds(text) == ns


@pytest.fixture(params=SKEWS)
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[MemoryBus]:
    skew: float = request.param
    clock: Callable[[], float] = lambda: time.time() + skew  # noqa: E731
    async with MemoryBroker(clock).connect() as bus:
        await bus.declare_stream(events_stream())
        yield bus


async def test_a_broker_with_another_clock_makes_no_event_older_or_younger(bus: MemoryBus) -> None:
    state, settings = IndexState(ReferenceIndex()), IndexServiceLimits(poll_seconds=0.01)
    async with IndexService(bus, state, settings=settings) as service:
        await service.wait_ready()
        batch, publisher = a_batch(up(), stored(1)), bus.publisher(KV_EVENTS)
        await publisher.publish(subject_of(batch), encode(batch))
        await publisher.flush()
        await until(lambda: service.state.stream_sequence == 1)
        delays = service.convergence_ms()
        assert 0 < delays["max"] < LIMIT_MS
        assert delays["max"] >= delays["p50"] >= 0
        router = RouterService(service.index, service, RouterSettings())
        transport = httpx.ASGITransport(create_app(router))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            (worker,) = (await client.get("/v1/workers")).json()["workers"]
        assert 0 < worker["last_event_age_ms"] < LIMIT_MS


#: files that read this host's wall clock: for people, for names, and in engines' own formats
WALL_CLOCKS = {
    "events/folder_objects.py",  # files of this host
    "events/leases.py",  # within a day of the broker's (ADR-0021)
    "events/memory/bus.py",  # is the broker
    "events/memory/keys.py",
    "events/nats/objects.py",
    "events/archive/replay.py",  # what a person means by 14:00
    "indexer/service/index_service.py",
    "cli/quarantine.py",
    "reference/http.py",
    "reference/worker.py",
    "router/service.py",
    "worker_hooks/recordings/captures.py",
    "worker_hooks/sidecar/service.py",  # epochs, which rise whatever the clock says
    "worker_hooks/transfer/nixl/process.py",
    "worker_hooks/vllm_plugin/plugin.py",
}


def test_wall_clocks_are_read_where_no_other_hosts_time_is_near() -> None:
    """What another host dates is compared with `Bus.clock_offset_ns`; waiting is monotonic."""
    sources = Path(kvatlas.__file__).parent
    reads = re.compile(r"\btime\.time(_ns)?\b|datetime\.(now|utcnow)\b|date\.today\b")
    found = {
        str(file.relative_to(sources))
        for file in sources.rglob("*.py")
        if reads.search(file.read_text())
    }
    assert found <= WALL_CLOCKS, "is the time of another host compared with it?"
    assert "Date" not in (sources / "router" / "http" / "page.html").read_text()
