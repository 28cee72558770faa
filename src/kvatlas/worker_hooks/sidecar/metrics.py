"""What a sidecar counts, for Prometheus: pulls, publications, losses.

    GET /metrics   the text below        GET /healthz   200 while the process runs
    GET /readyz    200 while the broker is there and the worker has an epoch, else 503; and what is
                   wrong (schemas/conditions.py), such as a log that is not stored

Written by hand: an engine's image has the base dependencies only. One answer a connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.fleet import host_and_port
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.printable import printable
from kvatlas.worker_hooks.sidecar.channel import SidecarStatus

#: how long a client may take, and how many there may be at once; others are closed unanswered
ANSWER_SECONDS, MAX_CONNECTIONS = 5.0, 16
MAX_HEAD_BYTES = 8 * 1024
#: what a counter's name begins with that is of blocks which a pull did not bring
MISSING = "missing_"

#: name -> (type, text)
FAMILIES = {
    "kv_sidecar_connected": ("gauge", "Broker is there"),
    "kv_sidecar_blocks": ("gauge", "Blocks that the engine holds, as the sidecar knows them"),
    "kv_sidecar_waiting_bytes": ("gauge", "Events that wait for the broker"),
    "kv_condition": ("gauge", "1 while this is wrong; /readyz gives the reason"),
    "kv_pulled_blocks_total": ("counter", "Blocks that pulls from peers brought"),
    "kv_pull_missing_blocks_total": ("counter", "Blocks that a pull did not bring, by reason"),
    "kv_sidecar_events_total": ("counter", "What else the sidecar counts, by what happened"),
}

_logger = logging.getLogger(__name__)


def exposition(
    instance: InstanceId, status: SidecarStatus, conditions: Mapping[str, bool] | None = None
) -> str:
    """Return what Prometheus reads of one sidecar; `conditions`: name -> whether it is present."""
    where = f'worker="{_label(instance.worker)}",rank="{instance.rank}"'
    samples: dict[str, list[str]] = {name: [] for name in FAMILIES}
    samples["kv_sidecar_connected"].append(f"{{{where}}} {int(status.is_connected)}")
    samples["kv_sidecar_blocks"].append(f"{{{where}}} {status.num_blocks}")
    samples["kv_sidecar_waiting_bytes"].append(f"{{{where}}} {status.waiting_bytes}")
    for name, is_present in (conditions or {}).items():
        labels = f'{{{where},condition="{_label(name)}"}}'
        samples["kv_condition"].append(f"{labels} {int(is_present)}")
    for name, count in status.counters.items():
        if name == "pulled_blocks":
            samples["kv_pulled_blocks_total"].append(f"{{{where}}} {count}")
        elif name.startswith(MISSING):
            labels = f'{{{where},reason="{_label(name.removeprefix(MISSING))}"}}'
            samples["kv_pull_missing_blocks_total"].append(f"{labels} {count}")
        else:
            labels = f'{{{where},what="{_label(name)}"}}'
            samples["kv_sidecar_events_total"].append(f"{labels} {count}")
    lines = []
    for name, (kind, text) in FAMILIES.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [name + sample for sample in samples[name]]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """Return a text as the value of a label; two texts are never alike."""
    shown = printable(text.replace("\\", r"\\"))
    return shown.replace("\\", r"\\").replace('"', r"\"")


@contextlib.asynccontextmanager
async def metrics_server(
    address: str, instance: InstanceId, read: Callable[[], SidecarStatus], conditions: Conditions
) -> AsyncGenerator[None, None]:
    """Answer at `host:port` while the block runs; nowhere for an empty address.

    An address that cannot be had costs the metrics and nothing else; the log says so.
    """
    where = host_and_port(address)
    if where is None:
        yield
        return
    served = _Answers(instance, read, conditions)
    try:
        server = await asyncio.start_server(served.answer, *where, limit=MAX_HEAD_BYTES)
    except OSError as error:
        _logger.error(
            "sidecar.metrics_address: expected a free address, %s: %s; no metrics from here",
            address,
            error.strerror or error,
        )
        yield
        return
    try:
        yield
    finally:
        server.close()
        await served.close()


class _Answers:
    def __init__(
        self, instance: InstanceId, read: Callable[[], SidecarStatus], conditions: Conditions
    ) -> None:
        self._instance, self._read, self._conditions = instance, read, conditions
        self._open: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in tuple(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        problems = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        try:
            if len(self._open) < MAX_CONNECTIONS:
                self._open.add(task)
                with contextlib.suppress(*problems):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(self._answer_to(head))
                        await writer.drain()
        finally:
            self._open.discard(task)
            writer.close()

    def _answer_to(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, text, kind = "404 Not Found", "/metrics, /healthz and /readyz are here\n", "plain"
        if method not in (b"GET", b"HEAD"):
            status, text = "405 Method Not Allowed", "expected GET\n"
        elif path == b"/metrics":
            status, text = (
                "200 OK",
                exposition(self._instance, self._read(), self._conditions.states),
            )
            kind = "plain; version=0.0.4"
        elif path == b"/healthz":
            status, text = "200 OK", "ok\n"
        elif path == b"/readyz":
            now = self._read()
            is_ready = now.is_connected and now.epoch > 0
            status = "200 OK" if is_ready else "503 Service Unavailable"
            text = "ready\n" if is_ready else "no broker, or no epoch yet\n"
            text += "".join(f"{n}: {why}\n" for n, why in self._conditions.reasons.items())
        body = text.encode()
        lines = [f"HTTP/1.1 {status}", f"content-type: text/{kind}; charset=utf-8"]
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body)
