"""What the plugin has started in this process, for the KV connector beside it."""

from typing import NamedTuple

from kvatlas.worker_hooks.sidecar.beside_engine import BesideEngine
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.vllm_plugin.publisher import EngineReports


class Running(NamedTuple):
    """One engine's hook and sidecar."""

    beside: BesideEngine
    reports: EngineReports

    @property
    def options(self) -> SidecarOptions:
        """What the sidecar was told."""
        return self.beside.options


_running: dict[int, Running] = {}


def begin(rank: int, running: Running) -> None:
    """Note what runs for a rank."""
    _running[rank] = running


def end(rank: int) -> None:
    """Note that it ended."""
    _running.pop(rank, None)


def current(rank: int | None = None) -> Running | None:
    """Return what runs for a rank, or for the only one; None if nothing does.

    It begins when vLLM's scheduler is complete, so a connector looks when it has its first request.
    """
    if rank is None:
        return next(iter(_running.values()), None)
    return _running.get(rank)
