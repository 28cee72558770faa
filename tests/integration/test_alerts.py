"""The alert rules as Prometheus evaluates them; skipped where promtool is not installed."""

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest

from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.dead_letter_metrics import DeadLetterCollector
from kvatlas.indexer.service.dead_letters import DeadLetterSettings
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshots.writing import SnapshotSettings
from kvatlas.router.http.app import create_app
from kvatlas.router.service import RouterService
from kvatlas.schemas.settings import RouterSettings
from testkit.builders import a_batch, stored, subject_of, up
from testkit.waiting import until

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def promtool(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROMTOOL), "test", "rules", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "file", sorted((PROMETHEUS / "tests").glob("*.yaml")), ids=lambda f: f.stem
)
def test_alerts_fire_and_are_silent_as_their_tests_say(file: Path) -> None:
    ran = promtool(file)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def one_test(tmp_path: Path, series: list[dict[str, str]], expected: list[object]) -> Path:
    """Write a test of all alerts at once, after a minute and after an hour."""
    shutil.copy(PROMETHEUS / "alerts.yaml", tmp_path)
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    asked = [
        {"expr": firing, "eval_time": at, "exp_samples": expected} for at in ("1m", "12m", "1h")
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": asked}
    content = {"rule_files": ["alerts.yaml"], "evaluation_interval": "15s", "tests": [test]}
    file = tmp_path / "test.yaml"
    file.write_bytes(msgspec.yaml.encode(content))
    return file


async def exposition_of_a_new_fleet() -> str:
    """Return what /metrics of a router says that has seen its first worker and snapshot."""
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        batch, publisher = a_batch(up(), stored(1)), bus.publisher(KV_EVENTS)
        await publisher.publish(subject_of(batch), encode(batch))
        await publisher.flush()
        service = IndexService(
            bus,
            IndexState(ReferenceIndex()),
            snapshots=SnapshotSettings(seconds=0.5, messages=1),
            dead_letters=DeadLetterSettings(),
        )
        async with service:
            await service.wait_ready()
            assert service.snapshots
            status = service.snapshots
            await until(lambda: status.num_written == 1 and status.headroom is not None)
            app = create_app(RouterService(service.index, service, RouterSettings()))
            app.metrics.registry.register(SnapshotCollector(service))
            app.metrics.registry.register(DeadLetterCollector(service))
            return generate_latest(app.metrics.registry).decode()


async def test_a_new_fleet_fires_no_alert(tmp_path: Path) -> None:
    exposition = await exposition_of_a_new_fleet()
    assert "kv_snapshot_headroom_sequences" in exposition
    series = []
    for line in exposition.splitlines():
        if line.startswith("kv_"):
            name, _, value = line.rpartition(" ")
            labels = re.search(r"\{(.*)\}", name)
            every = ", ".join(filter(None, (labels and labels[1], 'instance="r", job="kvatlas"')))
            values = f"{float(value):.9f}x240"
            series.append({"series": f"{name.partition('{')[0]}{{{every}}}", "values": values})
    ran = promtool(one_test(tmp_path, series, []))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    series = [{"series": 'kv_connected{instance="r"}', "values": "0x240"}]
    ran = promtool(one_test(tmp_path, series, []))
    assert ran.returncode == 1
    assert "KvatlasBrokerAway" in ran.stdout + ran.stderr
