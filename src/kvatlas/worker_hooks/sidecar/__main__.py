"""The process beside an engine: `python -m kvatlas.worker_hooks.sidecar`, options on its input.

Started within the engine by `sidecar_apart.start_apart` (plugins) or `launch.start_sidecar`, or by
an operator; ends with its engine. What it does meanwhile is in `sidecar_service`.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvatlas.common.line_writing import write_line
from kvatlas.events.nats.bus import NatsBus
from kvatlas.schemas.errors import KvatlasError
from kvatlas.schemas.printable import printable
from kvatlas.worker_hooks.log_lines import write_log_lines
from kvatlas.worker_hooks.reporting.ring import RingReader
from kvatlas.worker_hooks.sidecar.exchange import make_pool
from kvatlas.worker_hooks.sidecar.launch import FENCED_STATUS
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.sidecar.process import leaves, process_ended, signals_call, until_not
from kvatlas.worker_hooks.sidecar.service import FENCED, Sidecar
from kvatlas.worker_hooks.sidecar.stop_deadline import StopDeadline, end_of, limit_stop


async def run_sidecar(options: SidecarOptions, deadline: StopDeadline | None = None) -> str:
    """Run until a signal, the end of the engine, or a newer epoch; return which of them.

    `deadline` is that of the process, which is the sidecar's alone.
    Raises InvalidSetting, RingUnusable, PoolInUse, PoolTooLarge.
    """
    options.validate()
    ring = RingReader(Path(options.ring_path))
    pool = None
    try:
        pool = make_pool(options)
        sidecar = Sidecar(options, ring, _bus(options), pool)
        if deadline is not None:
            deadline.what_is_lost = sidecar.unsent
            deadline.begin_when(
                end_of(options.parent_pid) if options.parent_pid else _end_of_writer(ring)
            )
        async with signals_call(sidecar.stop), asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_stop_with_engine(sidecar, options, ring))
            reason = await sidecar.run()
            watch.cancel()
        return reason
    finally:
        ring.close()
        if pool is not None:
            pool.close()


async def _stop_with_engine(sidecar: Sidecar, options: SidecarOptions, ring: RingReader) -> None:
    if options.parent_pid:
        await process_ended(options.parent_pid)
    else:
        await until_not(ring.has_writer)
    sidecar.stop("engine ended")


def _end_of_writer(ring: RingReader) -> Callable[[], bool]:
    def has_ended() -> bool:
        try:
            return not ring.has_writer()
        except ValueError:  # closed: the sidecar has ended by itself
            return False

    return has_ended


def _bus(options: SidecarOptions) -> NatsBus:
    return NatsBus(
        options.nats_url,
        name=f"kvatlas sidecar {options.instance}",
        creds_file=Path(options.creds_file) if options.creds_file else None,
        nkey_file=Path(options.nkey_file) if options.nkey_file else None,
        replicas=options.replicas,
    )


def main() -> int:
    """Run the sidecar whose options (JSON) are on standard input."""
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=SidecarOptions)
    write_log_lines(f"sidecar {options.instance}")
    status = 1
    try:
        deadline = limit_stop(f"sidecar {options.instance}", options.stop_limit_seconds)
        status = FENCED_STATUS if asyncio.run(run_sidecar(options, deadline)) == FENCED else 0
    except* KvatlasError as errors:
        for error in leaves(errors):
            write_line(sys.stderr, printable(f"sidecar {options.instance}: {error}"))
    return status


if __name__ == "__main__":
    sys.exit(main())
