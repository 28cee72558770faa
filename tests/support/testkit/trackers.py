"""What an edge holds and tells, for tests that hear of it from one engine."""

from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import KvEvent, NamespaceSeen, SourceDegraded
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.engine_words import DESCRIPTOR, MODEL

ROOT = DESCRIPTOR.namespace(MODEL, None, None).root()


def held(tracker: EngineStateTracker, tier: Tier = Tier.hbm) -> set[bytes]:
    """Return what the fleet has been told that a tier holds."""
    return {block for block, _ in tracker.residency.blocks(tier)}


def without_namespaces(events: list[KvEvent]) -> list[KvEvent]:
    """Leave out what tells of namespaces."""
    return [event for event in events if not isinstance(event, NamespaceSeen)]


def doubts(events: list[KvEvent]) -> list[str]:
    """Return the reasons of all doubts that were told, empty ones too."""
    return [event.reason for event in events if isinstance(event, SourceDegraded)]
