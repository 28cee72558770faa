"""SGLang's plugin: registers a publisher named `nats` that reports to the sidecar beside it.

    --kv-events-config '{"publisher": "nats", "endpoint": "nats://HOST:4222?worker=w0"}'

`register` is the entry point of the group `sglang.srt.plugins`, called in each of SGLang's
processes; the publisher is made and called on the thread of its scheduler. Nothing here raises into
the engine: what fails is logged once, counted, and leaves an engine that publishes nothing.
"""

import atexit
from typing import Any

import msgspec

from kvatlas.schemas.errors import InvalidSetting, KvatlasError
from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.sidecar.beside_engine import BesideEngine, default_worker, plugin_settings
from kvatlas.worker_hooks.sidecar.options import SidecarOptions, shared_options
from kvatlas.worker_hooks.sidecar.plugin_endpoint import parse_endpoint

ENGINE = "sglang"
PUBLISHER = "nats"

_log = printable_log(__name__)


def register() -> None:
    """Make the publisher known to SGLang; again is no error."""
    try:
        from sglang.srt.disaggregation import kv_events  # pyright: ignore[reportMissingImports]

        base, factory = kv_events.EventPublisher, kv_events.EventPublisherFactory
    except (ImportError, AttributeError) as error:
        _log.warning("kvatlas: this SGLang has no registry of event publishers: %s", error)
        return
    # What SGLang may ask of its publishers beyond ours, its own class answers.
    publisher = type("KvatlasPublisher", (SglangPublisher, base), {})
    try:
        factory.register_publisher(PUBLISHER, publisher)
    except KeyError:
        _log.debug("kvatlas: the publisher is registered already")


class SglangPublisher:
    """Appends each batch of the scheduler to the ring of a sidecar that it starts.

    Keyword arguments are all fields of SGLang's configuration; those of ZMQ mean nothing here.
    """

    def __init__(self, attn_dp_rank: int = 0, endpoint: str = "", **_zmq: Any) -> None:
        self._attn_dp_rank = attn_dp_rank
        self._encoder = msgspec.msgpack.Encoder()
        self._beside: BesideEngine | None = None
        #: batches that could not be encoded, or that came while nothing runs beside the engine
        self.num_failed = 0
        try:
            self._beside = BesideEngine(sidecar_options(endpoint, attn_dp_rank))
        except (KvatlasError, OSError) as error:
            _log.error("kvatlas: no KV events leave this engine: %s", error)
        atexit.register(self.shutdown)

    def publish(self, batch: Any) -> None:
        """Report what a step did: one encoding and one copy, without waiting."""
        if self._beside is None:
            self.num_failed += 1
            return
        try:
            if getattr(batch, "attn_dp_rank", None) is None:
                batch.attn_dp_rank = self._attn_dp_rank
            payload = self._encoder.encode(batch)
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            if not self.num_failed:
                _log.error("kvatlas: a batch of KV events cannot be encoded: %s", error)
            self.num_failed += 1
            return
        self._beside.hook.report_published(ENGINE, payload)

    def shutdown(self) -> None:
        """Let the sidecar publish what is left and end. Idempotent."""
        atexit.unregister(self.shutdown)
        if self._beside is None:
            return
        beside, self._beside = self._beside, None
        try:
            beside.close()
        except OSError as error:
            _log.warning("kvatlas: the sidecar was not ended cleanly: %s", error)


def sidecar_options(endpoint: str, rank: int) -> SidecarOptions:
    """Return options from the endpoint, else from SGLang's own arguments. Raises InvalidSetting."""
    said, engine, settings = parse_endpoint(endpoint), _server_args(), plugin_settings()
    block_tokens = said.block_tokens or getattr(engine, "page_size", None)
    model = said.model or getattr(engine, "served_model_name", None)
    for name, value in (("model", model), ("block_tokens", block_tokens)):
        if not value:
            raise InvalidSetting(name, "endpoint", f"SGLang does not tell it: add ?{name}=...")
    return SidecarOptions(
        nats_url=said.nats_url,
        creds_file=settings.nats.credentials,
        worker=said.worker or default_worker(getattr(engine, "port", None)),
        rank=rank,
        model=str(model),
        adapters=said.adapters_of(str(model)),
        base_url=said.base_url or _base_url(engine),
        descriptor=settings.fleet.descriptor(int(block_tokens or 0), said.lookahead_tokens or 0),
        num_unreusable_trailing_blocks=said.unreusable_blocks or 0,
        kv_fingerprint=bytes.fromhex(said.kv_fingerprint),
        p2p_address=said.p2p_address,
        include_tokens=said.include_tokens,
        versions=_versions(),
        ring_path="",
        socket_path="",
        transport="none",
        **said.over(shared_options(settings)),
    )


def _server_args() -> Any:
    """Return SGLang's arguments in this process; None where it does not give them."""
    try:
        from sglang.srt import server_args  # pyright: ignore[reportMissingImports]

        return server_args.get_global_server_args()
    except (ImportError, AttributeError, ValueError, RuntimeError) as error:
        _log.info("kvatlas: SGLang's arguments are not to be had: %s", error)
        return None


def _base_url(engine: Any) -> str:
    """Return where the engine takes requests, unless it listens everywhere."""
    host, port = getattr(engine, "host", None), getattr(engine, "port", None)
    if not host or not port or host in ("0.0.0.0", "::"):
        return ""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _versions() -> dict[str, str]:
    try:
        import sglang  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    return {ENGINE: str(getattr(sglang, "__version__", "unknown"))}
