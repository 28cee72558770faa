"""Every setting does something: each has a probe here, and one without a probe fails.

A probe of a setting is one of these:
- `ARRIVES`: a real entry point gives its value to the part that acts on it (`testkit.arrivals`);
- `DECIDES`: a router does otherwise in one story than it does by default;
- `SHOWS`: a function of the settings answers otherwise than it does by default.

A new setting needs a line in one of them. All values come through the environment.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.cli.commands import run_command
from kvatlas.events.archive import sql as sql_archive
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_DECISIONS, events_stream
from kvatlas.indexer.index.reference import ReferenceIndex
from kvatlas.reference import worker as reference_worker
from kvatlas.router.decision.requests import Report
from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.router.http.hot_routes import SCORE, HotRoutes
from kvatlas.router.recorder import MemoryDecisionLog, StreamDecisionLog
from kvatlas.runtime import broker, serve
from kvatlas.runtime import health_server as face
from kvatlas.runtime.stopping import Stopped
from kvatlas.runtime.worker_fleet import EngineOptions
from kvatlas.schemas.errors import PromptTooLarge, TransportUnavailable
from kvatlas.schemas.hashing import HashAlgorithm
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.settings import Settings, load_settings, settings_by_key, variable_of
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar import __main__ as sidecar
from kvatlas.worker_hooks.sidecar import exchange
from kvatlas.worker_hooks.sidecar import service as sidecar_service
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.transfer.nixl.transport import NixlTransport
from testkit.arrivals import Arrivals, Seen
from testkit.fleet import Fleet, a_prompt, a_request
from testkit.ports import kept_port
from testkit.sidecars import beside
from testkit.waiting import until

#: nothing listens there, and nothing gets so far
NATS = "nats://127.0.0.1:1"
Environment = Mapping[str, str]


def settings_of(values: Mapping[str, object]) -> Settings:
    """Return the tree that these values make, by way of the environment."""
    return load_settings(environment={variable_of(key): str(v) for key, v in values.items()})


# --- what arrives where -------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """Where a value has to come, from which entry point on, and as what."""

    entry: str
    path: str
    value: object
    comes_as: Callable[[Any], Any] = lambda value: value


def sleeping(value: float) -> Arrival:
    return Arrival("sidecar", "sleep.delay", value)


ARRIVES: dict[str, Arrival] = {
    "nats.url": Arrival("bus", "NatsBus.servers", "nats://127.0.0.1:9"),
    "nats.credentials": Arrival("bus", "NatsBus.creds_file", "some.creds", Path),
    "nats.folder": Arrival("embedded", "embedded_server.folder", "here", Path),
    "log.max_bytes": Arrival("streams", "events_stream.max_bytes", 7_000_001),
    "log.max_age_seconds": Arrival("streams", "events_stream.max_age_seconds", 71.0),
    "log.decisions_max_bytes": Arrival("streams", "decisions_stream.max_bytes", 7_000_002),
    "log.decisions_max_age_seconds": Arrival("streams", "decisions_stream.max_age_seconds", 72.0),
    "log.dead_letters_max_bytes": Arrival("streams", "dead_letters_stream.max_bytes", 7_000_003),
    "log.dead_letters_max_age_seconds": Arrival(
        "streams", "dead_letters_stream.max_age_seconds", 73.0
    ),
    "log.replicas": Arrival("streams", "events_stream.replicas", 3),
    "fleet.key": Arrival("sidecar", "EngineStateTracker.fleet_key", "ab" * 16, bytes.fromhex),
    "fleet.block_hash": Arrival(
        "sidecar",
        "EngineStateTracker.descriptor.algorithm",
        "sha256",
        lambda _: HashAlgorithm.sha256_128,
    ),
    "fleet.wire_version": Arrival("sidecar", "Outbox.wire_version", 100),
    "indexer.kernel": Arrival("indexer", "ReferenceIndex.made", "reference", lambda _: True),
    "indexer.snapshot_seconds": Arrival("indexer", "IndexService.snapshots.seconds", 74.0),
    "indexer.snapshot_messages": Arrival("indexer", "IndexService.snapshots.messages", 75),
    "indexer.snapshots_kept": Arrival("indexer", "IndexService.snapshots.kept", 76),
    "indexer.snapshots_kept_seconds": Arrival(
        "indexer", "IndexService.snapshots.kept_seconds", 77.0
    ),
    "indexer.shared_folder": Arrival("shared", "SharedIndexReader.folder", "there", Path),
    "indexer.event_bytes_per_second": Arrival(
        "indexer", "IndexService.settings.budget.bytes_per_second", 7_001.0
    ),
    "indexer.event_burst_bytes": Arrival(
        "indexer", "IndexService.settings.budget.burst_bytes", 7_002.0
    ),
    "indexer.event_throttle_seconds": Arrival(
        "indexer", "IndexService.settings.budget.throttle_seconds", 7.0
    ),
    "indexer.max_event_throttle_seconds": Arrival(
        "indexer", "IndexService.settings.budget.max_throttle_seconds", 78.0
    ),
    "router.host": Arrival("indexer", "http_server.host", "localhost"),
    "router.port": Arrival("indexer", "http_server.port", kept_port()),
    "router.is_port_shared": Arrival("shared", "HealthServer.is_port_shared", True),
    "router.drain_seconds": Arrival("indexer", "role.drain_seconds", 7.5),
    "router.allowed_hosts": Arrival("indexer", "http_server.settings.allowed_hosts", "kv.example"),
    "router.max_connections": Arrival("indexer", "http_server.limits.bounds.max_connections", 77),
    "router.max_inflight_body_bytes": Arrival(
        "indexer", "http_server.limits.bounds.max_inflight_body_bytes", 70_000_000
    ),
    "router.keep_alive_seconds": Arrival(
        "indexer", "http_server.limits.bounds.keep_alive_seconds", 79.0
    ),
    "archive.url": Arrival("archive", "SqlArchive.url", "sqlite:///here.db"),
    "archive.port": Arrival("archive", "http_server.port", kept_port()),
    "sidecar.lease_ttl_seconds": Arrival(
        "sidecar",
        "LeaseKeeper.ttl_seconds",
        41.0,
        lambda value: value - sidecar_service.NOTICE_SECONDS,
    ),
    "sidecar.digest_seconds": sleeping(0.0731),
    "sidecar.engine_silent_seconds": Arrival("sidecar", "EnginePulse.silent_seconds", 42.0),
    "sidecar.max_outbox_bytes": Arrival("sidecar", "Outbox.max_bytes", 70_001),
    "sidecar.max_outbox_seconds": Arrival("sidecar", "Outbox.max_seconds", 43.0),
    "sidecar.coalesce_seconds": Arrival("sidecar", "Outbox.coalesce_seconds", 0.0041),
    "sidecar.coalesce_bytes": Arrival("sidecar", "Outbox.coalesce_bytes", 4_001),
    "sidecar.namespace_blocks_per_second": Arrival(
        "sidecar", "Reporter.budgets.blocks_per_second", 4_002.0
    ),
    "sidecar.namespace_burst_blocks": Arrival("sidecar", "Reporter.budgets.burst_blocks", 4_003.0),
    "sidecar.metrics_address": Arrival(
        "sidecar", "metrics_server.address", f"127.0.0.1:{kept_port()}"
    ),
    "sidecar.pull_deadline_seconds": Arrival(
        "worker", "ReferenceEngine.options.pull_deadline_seconds", 44.0
    ),
    "nixl.ucx_tls": Arrival("sidecar", "NixlTransport.settings.ucx_tls", "tcp"),
    "nixl.progress_thread": Arrival("sidecar", "NixlTransport.settings.progress_thread", True),
    "nixl.idle_ms": Arrival("sidecar", "NixlTransport.settings.idle_ms", 45.0),
    "nixl.busy_ms": Arrival("sidecar", "NixlTransport.settings.busy_ms", 0.45),
    "nixl.max_quarantined": Arrival("sidecar", "NixlTransport.settings.max_quarantined", 46),
    "nixl.max_sources": Arrival("sidecar", "NixlTransport.settings.max_sources", 47),
    "nixl.start_seconds": Arrival("sidecar", "NixlTransport.settings.start_seconds", 48.0),
}


async def unavailable(_: object) -> None:
    """Start no transport: what it was made with is all that is looked at."""
    raise TransportUnavailable("seen")


class Entries:
    """The entry points, each run as far as the parts of its settings are made."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, nats_url: str) -> None:
        self._patch, self._folder, self._nats_url = patch, folder, nats_url
        self.arrivals = Arrivals(patch)

    async def run(self, entry: str, values: Mapping[str, object]) -> None:
        """Run an entry point with these values; Seen ends it."""
        try:
            await getattr(self, entry)(values)
        except Seen:
            pass
        except BaseExceptionGroup as group:
            if group.subgroup(Seen) is None:
                raise

    async def bus(self, values: Mapping[str, object]) -> None:
        self.arrivals.spy(broker, "NatsBus", Seen())
        await serve.serve_indexer(settings_of({"router.port": 0, **values}), True)

    async def streams(self, values: Mapping[str, object]) -> None:
        for name in ("events_stream", "decisions_stream"):
            self.arrivals.spy(broker, name)
        self.arrivals.spy(broker, "dead_letters_stream", Seen())
        given = {"nats.url": NATS, "router.port": 0, **values}
        await serve.serve_indexer(settings_of(given), True)

    async def embedded(self, values: Mapping[str, object]) -> None:
        self.arrivals.spy(broker, "embedded_server", Seen())
        engines = EngineOptions(0, 1, 16, 16, 1.0, 1.0, 1.0)
        await serve.serve_all(settings_of({"router.port": 0, **values}), engines, True)

    async def indexer(self, values: Mapping[str, object]) -> None:
        self.arrivals.spy(serve, "role")
        self.arrivals.spy(face, "http_server")
        self.arrivals.spy(serve, "IndexService", Seen())

        def reference_index(made: bool = True) -> Any:
            return ReferenceIndex() if made else None

        self._patch.setattr(serve, "ReferenceIndex", reference_index)
        self.arrivals.spy(serve, "ReferenceIndex")
        await serve.serve_indexer(settings_of({"nats.url": self._nats_url, **values}), True)

    async def shared(self, values: Mapping[str, object]) -> None:
        self.arrivals.spy(serve, "HealthServer")
        self.arrivals.spy(serve, "SharedIndexReader", Seen())
        given = {"nats.url": self._nats_url, "router.port": kept_port(), **values}
        await serve.serve_router(settings_of(given), True)

    async def archive(self, values: Mapping[str, object]) -> None:
        self.arrivals.spy(face, "http_server")
        self.arrivals.spy(sql_archive, "SqlArchive", Seen())
        await serve.serve_archive(settings_of({"nats.url": self._nats_url, **values}), True)

    async def worker(self, values: Mapping[str, object]) -> None:
        self.arrivals.spy(reference_worker, "ReferenceEngine", Seen())
        settings = settings_of({"nats.url": self._nats_url, "sidecar.transport": "none", **values})
        options = reference_worker.WorkerOptions("w", settings, folder=str(self._folder))
        await reference_worker.run_worker(options, lambda _: None)

    async def sidecar(self, values: Mapping[str, object]) -> None:
        for name in (
            "EngineStateTracker",
            "Outbox",
            "LeaseKeeper",
            "EnginePulse",
            "Reporter",
            "metrics_server",
        ):
            self.arrivals.spy(sidecar_service, name)
        self._patch.setattr(NixlTransport, "__aenter__", unavailable)
        self.arrivals.spy(exchange, "NixlTransport")
        self.arrivals.spy(asyncio, "sleep")
        options = self.sidecar_options(values)
        bus = MemoryBroker().connect()
        async with bus:
            await bus.declare_stream(events_stream())
            async with beside(options, bus) as running:
                await running.channel.flush()
                await until(lambda: bool(self.arrivals.given("NixlTransport.settings")))
                await until(lambda: bool(self.arrivals.given("EnginePulse.silent_seconds")))

    def sidecar_options(self, values: Mapping[str, object]) -> SidecarOptions:
        """Return what the command `sidecar` gives to its sidecar."""
        seen: list[SidecarOptions] = []

        async def run_sidecar(options: SidecarOptions, *_: object) -> str:
            seen.append(options)
            raise Seen

        ring, socket = self._folder / "ring", self._folder / "socket"
        RingWriter.create(ring).close()
        for key, value in values.items():
            self._patch.setenv(variable_of(key), str(value))
        self._patch.setattr(sidecar, "run_sidecar", run_sidecar)
        arguments = ["--worker", "w", "--model", "m", "--ring", str(ring), "--socket", str(socket)]
        arguments += ["--pool", str(self._folder / "pool"), "--slots", "4", "--block-bytes", "64"]
        arguments += ["--kv-fingerprint", "00" * 16, "--nats", NATS]
        # the command starts an event loop of its own
        with contextlib.suppress(Seen), ThreadPoolExecutor(1) as pool:
            pool.submit(run_command, ["sidecar", *arguments]).result()
        ring.unlink()
        return seen[0]


@pytest.fixture
async def nats_url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_server(tmp_path / "nats") as server:
        yield server.url


@pytest.mark.parametrize("entry", sorted({arrival.entry for arrival in ARRIVES.values()}))
async def test_what_acts_on_a_setting_is_given_its_value(
    entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nats_url: str
) -> None:
    expected = {key: each for key, each in ARRIVES.items() if each.entry == entry}
    entries = Entries(monkeypatch, tmp_path, nats_url)
    await entries.run(entry, {key: each.value for key, each in expected.items()})
    missing = {
        key: entries.arrivals.given(each.path)
        for key, each in expected.items()
        if each.comes_as(each.value) not in entries.arrivals.given(each.path)
    }
    assert missing == {}


# --- what a router decides ----------------------------------------------------------------------

#: setting -> another value, and values of others that it shows beside
DECIDES: dict[str, tuple[object, dict[str, object]]] = {
    "router.policy": ("round_robin", {}),
    "router.max_candidates": (2, {}),
    "router.load_window_ms": (1.0, {}),
    "router.balance_weight": (5.0, {}),
    "router.work_half_life_seconds": (1.0, {}),
    "router.pull_weight": (0.5, {}),
    "router.min_pull_tokens": (100_000, {}),
    "router.degraded_match_share": (0.1, {}),
    "router.predicted_match_share": (0.1, {}),
    "router.predicted_seconds": (900.0, {}),
    "router.prefill_tokens_per_second": (3_000.0, {}),
    "router.pull_tokens_per_second": (50_000.0, {}),
    "router.max_rate_ratio": (50.0, {}),
    "router.pull_fixed_ms": (50.0, {}),
    "router.dram_ms_per_1k_tokens": (1.0, {}),
    "router.ssd_ms_per_1k_tokens": (1.0, {}),
    "router.remote_ms_per_1k_tokens": (1.0, {}),
    "router.failure_pause_seconds": (0.1, {}),
    "router.max_failure_pause_seconds": (1.0, {}),
    "router.request_timeout_seconds": (5.0, {}),
    "router.seed": (8, {"router.policy": "random"}),
}


def story(values: Mapping[str, object]) -> list[Any]:
    """Return what a router says and does while workers hold, fail, report and fall silent."""
    fleet = Fleet()
    shared = a_prompt(2_000)
    held = {"w1": Tier.hbm, "w2": Tier.dram, "w3": Tier.ssd, "w4": Tier.remote, "w5": Tier.hbm}
    for number, (name, tier) in enumerate(held.items(), 1):
        fleet.up(name)
        fleet.holds(name, shared, tier=tier, num_blocks=20 * number)
    fleet.tell("w5", skip=1)  # a gap: it is believed in part
    settings = settings_of({"router.seed": 7, **values}).router
    router = fleet.router(**msgspec.structs.asdict(settings))
    said: list[Any] = []

    def look(tokens: list[int]) -> None:
        answer = router.score(a_request(tokens))
        said.append([(c.worker, c.cost_ms, c.terms, c.predicted_tokens) for c in answer.candidates])
        said.append([router.load_of(InstanceId(name, 0), 1) for name in held])

    def route(tokens: list[int], report: Callable[[str], Report] | None = None) -> None:
        routed = router.route(a_request(tokens))
        said.append((routed.worker, routed.plan))
        if report is not None:
            router.clock.now += 0.5
            router.done(routed.decision_id, report(routed.worker))

    def at_its_speed(worker: str) -> Report:
        took = 20.0 if worker == "w2" else 400.0
        return Report(prefill_ms=took, computed_tokens=4_000, ttft_ms=took)

    look(shared)
    for number in range(8):
        route(a_prompt(4_000, 10_000 * (number + 1)))
        look(a_prompt(4_000, 10_000))
    for seconds in (3.0, 2.0, 5.0):
        router.clock.now += seconds
        look(a_prompt(4_000, 10_000))
        look(shared)
    for _ in range(3):  # each failure doubles the pause
        route(shared, lambda _: Report(failed=True))
        for seconds in (0.5, 1.0, 1.0):
            router.clock.now += seconds
            look(shared)
    for number in range(60):
        route(a_prompt(4_000, 1_000_000 + 10_000 * number), at_its_speed)
    look(shared)
    router.clock.now += 300.0
    look(shared)
    return said


@pytest.mark.parametrize("key", DECIDES)
def test_a_router_decides_otherwise(key: str) -> None:
    value, beside_it = DECIDES[key]
    assert story(beside_it) == story(beside_it)
    assert story(beside_it | {key: value}) != story(beside_it)


# --- what shows otherwise -----------------------------------------------------------------------


def is_overdue(settings: Settings, expected_ms: float, after: float) -> bool:
    router = Fleet().router(**msgspec.structs.asdict(settings.router))
    router.overdue.routed("r", InstanceId("w1", 0), 1, expected_ms, 0.0)
    router.overdue.look(after, lambda *_: False)
    return router.overdue.num_overdue > 0


def decisions(settings: Settings, count: int, log: Any) -> Any:
    fleet = Fleet()
    fleet.up("w1")
    router = fleet.router(log=log, **msgspec.structs.asdict(settings.router))
    for number in range(count):
        router.route(a_request(a_prompt(320, 1_000 * number)))
    return log


def body_limit(settings: Settings) -> int:
    router = Fleet().router()
    return HotRoutes(router, settings.router, lambda *_: None, True).max_body_bytes(SCORE)


def is_refused(settings: Settings) -> bool:
    body = json.dumps({"model": "m", "token_ids": list(range(100))}).encode()
    try:
        decode_score_request(body, "application/json", settings.router)
    except PromptTooLarge:
        return True
    return False


def num_waiting(settings: Settings) -> int:
    publisher = MemoryBroker().connect().publisher(KV_DECISIONS)
    return int(decisions(settings, 3, StreamDecisionLog(publisher, settings.router)).num_waiting)


def num_kept(settings: Settings) -> tuple[int, int]:
    log = decisions(settings, 3, MemoryDecisionLog(settings.router))
    return len(log), log.num_reduced


SHOWS: dict[str, tuple[object, Callable[[Settings], object]]] = {
    "router.max_body_bytes": (1_000, body_limit),
    "router.max_prompt_tokens": (99, is_refused),
    "router.overdue_seconds": (60.0, lambda settings: is_overdue(settings, 0.0, 20.0)),
    "router.overdue_factor": (2.0, lambda settings: is_overdue(settings, 10_000.0, 25.0)),
    "router.max_unrecorded_decisions": (2, num_waiting),
    "router.max_unrecorded_decision_bytes": (1, num_waiting),
    "router.max_kept_decisions": (2, num_kept),
    "router.max_kept_decision_bytes": (1, num_kept),
}


@pytest.mark.parametrize("key", SHOWS)
async def test_something_shows_otherwise(key: str) -> None:
    value, shown = SHOWS[key]
    assert shown(settings_of({key: value})) != shown(settings_of({}))


async def test_without_a_transport_nothing_is_pulled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entries = Entries(monkeypatch, tmp_path, NATS)
    options = entries.sidecar_options({"sidecar.transport": "none"})
    assert (options.transport, options.leasable_tiers) == ("none", ())


async def test_a_worker_that_leaves_serves_on_for_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nats_url: str
) -> None:
    made: list[Any] = []

    def noted() -> Any:
        made.append(Stopped())
        return made[0]

    monkeypatch.setattr(reference_worker, "Stopped", noted)
    given = {"nats.url": nats_url, "sidecar.transport": "none", "sidecar.drain_seconds": 0.25}
    options = reference_worker.WorkerOptions("w", settings_of(given), folder=str(tmp_path))
    announced = asyncio.Event()
    running = asyncio.create_task(reference_worker.run_worker(options, lambda _: announced.set()))
    await asyncio.wait_for(announced.wait(), 60.0)
    assert made[0].drain() == 0.25
    made[0].ask("test over")
    await asyncio.wait((running,))


#: settings whose probe is a test of its own above
OWN_TESTS = {"sidecar.transport", "sidecar.drain_seconds"}


def test_every_setting_has_a_probe_and_no_probe_is_of_none() -> None:
    probed = [*ARRIVES, *DECIDES, *SHOWS, *OWN_TESTS]
    assert sorted(probed) == sorted(settings_by_key())


@pytest.mark.parametrize("key", [*ARRIVES, *DECIDES, *SHOWS])
def test_a_probe_has_another_value_than_the_default(key: str) -> None:
    if key in ARRIVES:
        value: object = ARRIVES[key].value
    else:
        value = (DECIDES.get(key) or SHOWS[key])[0]
    section, _, name = key.partition(".")
    default = getattr(getattr(Settings(), section), name)
    assert getattr(getattr(settings_of({key: value}), section), name) != default
