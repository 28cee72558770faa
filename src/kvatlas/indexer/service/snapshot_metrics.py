"""What is known of snapshots, for Prometheus; registered by whoever serves /metrics of an index."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas.indexer.service.index_service import IndexService


class SnapshotCollector(Collector):
    """Reads the status when somebody asks; yields nothing where snapshots are not asked for."""

    def __init__(self, service: IndexService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Yield what this replica knows and did."""
        status = self._service.snapshots
        if status is None:
            return
        loaded = self._service.loaded
        if status.headroom is not None:
            yield GaugeMetricFamily(
                "kv_snapshot_headroom_sequences",
                "Messages that the log may lose before the oldest snapshot is of no use",
                value=status.headroom,
            )
        if status.log_first is not None:
            yield GaugeMetricFamily(
                "kv_log_first_sequence", "First message that the log keeps", value=status.log_first
            )
        for name, text, gauge in (
            ("kv_snapshots", "Snapshots that are kept", status.num_snapshots),
            ("kv_snapshot_bytes", "Size of the last one taken here", status.num_bytes),
            ("kv_snapshot_pause_seconds", "How long it paused the fold", status.pause_seconds),
            ("kv_snapshot_upload_seconds", "How long it took to store", status.upload_seconds),
            ("kv_snapshot_loaded", "Started from a snapshot", float(loaded is not None)),
            (
                "kv_snapshot_load_seconds",
                "How long reading that one took",
                loaded.seconds if loaded else 0.0,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=gauge)
        for name, text, count in (
            ("kv_snapshots_written", "Snapshots taken here", status.num_written),
            ("kv_snapshots_failed", "Looks and uploads that failed", status.num_failed),
        ):
            yield CounterMetricFamily(name, text, value=count)
