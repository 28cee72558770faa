"""How many dead letters a replica wrote, for Prometheus; registered as SnapshotCollector is."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas.events.dead_letters import KINDS
from kvatlas.indexer.service.index_service import IndexService


class DeadLetterCollector(Collector):
    """Reads the writer's counters; yields nothing where no letters are written."""

    def __init__(self, service: IndexService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Yield what this replica wrote, each kind from the start on, and what it left out."""
        letters = self._service.letters
        if letters is None:
            return
        written = CounterMetricFamily(
            "kv_dead_letters", "Letters about unreadable messages, written here", labels=["kind"]
        )
        for kind in KINDS:
            written.add_metric([kind], letters.num_written[kind])
        yield written
        yield CounterMetricFamily(
            "kv_dead_letters_dropped",
            "Unreadable messages without a letter from here",
            value=letters.num_dropped,
        )
