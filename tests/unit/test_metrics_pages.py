"""docs/metrics.md and the alert rules speak of the metrics that there are."""

import re
from pathlib import Path

from prometheus_client import generate_latest

from kvatlas.events.memory_bus import MemoryBroker
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.dead_letter_metrics import DeadLetterCollector
from kvatlas.indexer.dead_letter_writing import DeadLetterSettings
from kvatlas.indexer.service import IndexService
from kvatlas.indexer.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshot_writing import SnapshotSettings
from kvatlas.indexer.state import IndexState
from kvatlas.router.app import create_app
from testkit.fleet import Fleet

ROOT = Path(__file__).parents[2]
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
    service.snapshots.headroom = 5  # shown once there is a snapshot
    app.metrics.registry.register(SnapshotCollector(service))
    app.metrics.registry.register(DeadLetterCollector(service))
    exposition = generate_latest(app.metrics.registry).decode()
    named = set(re.findall(r"^# HELP (\S+)", exposition, re.MULTILINE))
    return named | WITH_SIBLINGS


def test_the_page_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(kv_\w+)` \|", page, re.MULTILINE)) == shown()


def test_every_alert_asks_for_a_metric_that_exists() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text()
    expressions = re.findall(r"^ +expr: (.+)$", rules, re.MULTILINE)
    assert len(expressions) == rules.count("- alert:") > 10
    for expression in expressions:
        asked = set(re.findall(r"kv_\w+", expression))
        assert asked
        assert asked <= shown()
