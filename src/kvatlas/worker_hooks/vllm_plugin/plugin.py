"""What vLLM calls when it loads kvatlas, and what of vLLM is replaced.

    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
                         "endpoint": "nats://HOST:4222?worker=w0"}'

vLLM accepts two names of publishers only, so the scheme of the endpoint chooses: a broker's is
ours, any other stays with the stock publisher. Three things are replaced, each once and if it is
there: the publisher named `zmq`, `Scheduler.__init__` (a complete scheduler has the block pool) and
`Scheduler.reset_prefix_cache` (an idle engine would keep the clear to itself until its next step).
"""

import atexit
import functools
import os
import time
from typing import Any

from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.sidecar.beside_engine import BesideEngine, plugin_settings
from kvatlas.worker_hooks.sidecar.plugin_endpoint import is_plugin_endpoint, parse_endpoint
from kvatlas.worker_hooks.vllm_plugin import running
from kvatlas.worker_hooks.vllm_plugin.facts import sidecar_options
from kvatlas.worker_hooks.vllm_plugin.publisher import EngineReports

_PATCHED = "_is_kvatlas"
#: whole digests, by which the live block pool is asked; only our publisher reads the events
_INT_HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"

_log = printable_log("vllm.kvatlas")  # below `vllm`, so that vLLM prints it


def register() -> None:
    """Take our places in vLLM; again is no error, and a vLLM without them stays as it is."""
    try:
        from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
        from vllm.v1.core.sched.scheduler import Scheduler

        stock = EventPublisherFactory._registry["zmq"]
        if getattr(stock, _PATCHED, False):
            return
        _replace_init(Scheduler)
        _replace_reset(Scheduler)
        EventPublisherFactory._registry["zmq"] = _publisher_maker(EventPublisher, stock)
    except (ImportError, AttributeError, KeyError) as error:
        _log.error("kvatlas does not know this vLLM and publishes nothing: %r", error)


def _publisher_maker(base: type, stock: Any) -> Any:
    publisher = type("KvatlasPublisher", (VllmPublisher, base), {})

    def make(data_parallel_rank: int = 0, **config: Any) -> Any:
        if not is_plugin_endpoint(config.get("endpoint", "")):
            return stock(data_parallel_rank=data_parallel_rank, **config)
        return publisher(data_parallel_rank, config["endpoint"])

    setattr(make, _PATCHED, True)
    return make


class VllmPublisher:
    """Tells the sidecar beside the engine; until `attach` has started one, it tells nothing.

    Nothing here raises into the engine: what fails is logged once and leaves an engine that
    publishes nothing.
    """

    def __init__(self, data_parallel_rank: int, endpoint: str) -> None:
        self._data_parallel_rank, self._endpoint = data_parallel_rank, endpoint
        self._beside: BesideEngine | None = None
        self._reports: EngineReports | None = None
        os.environ[_INT_HASHES] = "0"

    def attach(self, scheduler: Any) -> None:
        """Start the sidecar for a complete scheduler."""
        try:
            self._start(scheduler)
        except Exception as error:  # noqa: BLE001 - the engine's border: whatever it is, it serves on
            _log.error("kvatlas: no KV events leave this engine: %r", error)

    def _start(self, scheduler: Any) -> None:
        rank = self._data_parallel_rank
        said, settings = parse_endpoint(self._endpoint), plugin_settings()
        options = sidecar_options(said, settings, rank, scheduler, _version())
        beside = self._beside = BesideEngine(options, lists=True)
        atexit.register(self.shutdown)
        pool = scheduler.kv_cache_manager.block_pool
        # groups that cut blocks of other sizes than ours are counted by the engine, and not by us
        can_audit = len(scheduler.kv_cache_config.kv_cache_groups) == 1 and not said.block_tokens
        self._reports = EngineReports(
            beside.hook,
            rank,
            _is_cached_in(pool),
            (lambda: _num_cached_in(pool)) if can_audit else None,
        )
        self._reports.start()
        running.begin(rank, running.Running(beside, self._reports))
        _log.info("kvatlas: %s speaks to %s", beside.options.instance, said.nats_url)

    def publish(self, batch: Any) -> None:
        """Tell what a step did."""
        if self._reports is not None:
            self._reports.batch(batch.ts, batch.events)

    def shutdown(self) -> None:
        """Let the sidecar publish what is left and end. Idempotent."""
        atexit.unregister(self.shutdown)
        running.end(self._data_parallel_rank)
        if self._reports is not None:
            self._reports.close()
        if self._beside is not None:
            self._beside.close()
        self._reports = self._beside = None


def _is_cached_in(pool: Any) -> Any:
    """Return a look into the live block map, which is another object after each reset."""

    def is_cached(engine_hash: Any, group: int) -> bool:
        if not isinstance(engine_hash, bytes):
            return False  # cut to 64 bits, it finds nothing
        key = engine_hash + group.to_bytes(4, "big")
        return pool.cached_block_hash_to_block.get_one_block(key) is not None

    return is_cached


def _num_cached_in(pool: Any) -> int:
    return len(pool.cached_block_hash_to_block)


def _replace_init(scheduler: Any) -> None:
    stock = scheduler.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        publisher = getattr(self, "kv_event_publisher", None)
        if isinstance(publisher, VllmPublisher):
            publisher.attach(self)

    scheduler.__init__ = init


def _replace_reset(scheduler: Any) -> None:
    stock = scheduler.reset_prefix_cache

    @functools.wraps(stock)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_reset = stock(self, *args, **kwargs)
        if isinstance(self.kv_event_publisher, VllmPublisher):
            flush_events(self)
        return is_reset

    scheduler.reset_prefix_cache = reset


def flush_events(scheduler: Any) -> None:
    """Publish what the engine has queued, as its next step would."""
    try:
        from vllm.distributed.kv_events import KVEventBatch

        events = list(scheduler.kv_cache_manager.take_events())
        if scheduler.connector is not None:
            events += scheduler.connector.take_events()
        if events:
            scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
    except (ImportError, AttributeError, TypeError) as error:
        _log.error("kvatlas: a reset is told with the next step only: %r", error)


def _version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))
