"""docs/metrics.md and the alert rules speak of the metrics that there are."""

import re
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import generate_latest

from kvatlas.events.archive.archiver import Archiver
from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.dead_letter_metrics import DeadLetterCollector
from kvatlas.indexer.service.dead_letters import DeadLetterSettings
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshots.writing import SnapshotSettings
from kvatlas.router.http.app import create_app
from kvatlas.router.http.archive_app import ArchiveCollector
from kvatlas.router.http.server.hosts import HostRules
from kvatlas.router.http.server.limits import Bounds, HttpLimits
from kvatlas.worker_hooks.sidecar import metrics as sidecar_metrics
from testkit.fleet import Fleet, StillFeed

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
#: of a test in deploy/prometheus/tests: whether an alert fires at a time
EXPECTATION = r'count\(ALERTS\{alertname="(\w+)", alertstate="firing"\}\)'
#: shown by routers that have a bus to hear others on
WITH_SIBLINGS = {"kv_router_siblings", "kv_router_signals_dropped_total"}


def shown() -> set[str]:
    fleet = Fleet()
    fleet.up("w1")
    app = create_app(fleet.router())
    bus, state = MemoryBroker().connect(), IndexState(ReferenceIndex())
    service = IndexService(
        bus, state, snapshots=SnapshotSettings(), dead_letters=DeadLetterSettings()
    )
    assert service.snapshots
    # shown once there is a snapshot
    service.snapshots.headroom, service.snapshots.log_first = 5, 1
    app.metrics.registry.register(SnapshotCollector(service))
    app.metrics.registry.register(DeadLetterCollector(service))
    app.metrics.registry.register(ArchiveCollector(Archiver(bus, MemoryArchive())))
    app.served_under(HttpLimits(Bounds()), HostRules.accepting_any())
    exposition = generate_latest(app.metrics.registry).decode()
    named = set(re.findall(r"^# HELP (\S+)", exposition, re.MULTILINE))
    named |= set(sidecar_metrics.FAMILIES)
    return named | WITH_SIBLINGS


def test_the_page_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(kv_\w+)` \|", page, re.MULTILINE)) == shown()


def rules() -> dict[str, str]:
    """Return the expression of each alert."""
    content = msgspec.yaml.decode((PROMETHEUS / "alerts.yaml").read_bytes())
    found = [rule for group in content["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in found}) == len(found) > 10
    return {rule["alert"]: rule["expr"] for rule in found}


def rule_tests() -> list[dict[str, Any]]:
    """Return what `promtool test rules` reads, of all files."""
    files = sorted((PROMETHEUS / "tests").glob("*.yaml"))
    return [test for file in files for test in msgspec.yaml.decode(file.read_bytes())["tests"]]


def test_every_alert_asks_for_a_metric_that_exists() -> None:
    for expression in rules().values():
        asked = set(re.findall(r"\bkv_\w+", expression))
        assert asked
        assert asked <= shown()


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for test in rule_tests():
        for expected in test["promql_expr_test"]:
            asked = re.fullmatch(EXPECTATION, expected["expr"])
            assert asked, f"{test['name']}: write it as {EXPECTATION}"
            (fires if expected["exp_samples"] else silent).add(asked[1])
    assert fires == set(rules())
    assert silent == set(rules())


def test_the_tests_of_alerts_have_metrics_that_exist() -> None:
    for test in rule_tests():
        named = {each["series"].partition("{")[0] for each in test["input_series"]}
        assert named <= shown(), test["name"]


def test_every_alert_is_on_the_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [alert for alert in rules() if alert not in page] == []


def test_totals_of_the_log_are_shown_once_it_is_caught_up() -> None:
    """A start folds the past in, which is no increase of gaps, holes or takeovers."""
    feed = StillFeed(is_ready=False)
    app = create_app(Fleet().router(feed=feed))
    assert "kv_gaps_total" not in generate_latest(app.metrics.registry).decode()
    assert "kv_ready 0.0" in generate_latest(app.metrics.registry).decode()
    feed.is_ready = True
    assert "kv_gaps_total 0.0" in generate_latest(app.metrics.registry).decode()
