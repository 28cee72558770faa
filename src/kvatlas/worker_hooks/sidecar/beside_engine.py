"""What a plugin puts beside its engine: a ring in shared memory and the sidecar that reads it."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from kvatlas.common.backoff import Backoff
from kvatlas.common.runtime_folder import runtime_folder
from kvatlas.schemas.settings import Settings, load_settings
from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.reporting.engine_pulse import EnginePulse
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar.detached import start_detached
from kvatlas.worker_hooks.sidecar.launch import FENCED_STATUS
from kvatlas.worker_hooks.sidecar.options import SidecarOptions

#: a sidecar that has ended is started again after so long at first, and at most
REVIVE_SECONDS, MAX_REVIVE_SECONDS = 0.5, 30.0
#: a sidecar that hangs for so long is ended; it beats twice a second, and starts within seconds
SIDECAR_SILENT_SECONDS = 60.0
#: TOML file of settings, as --config is for the roles of the command line
CONFIG_VARIABLE = "KVATLAS_CONFIG"

_log = printable_log(__name__)


class BesideEngine:
    """A hook, its sidecar process and the folder of both; `close` ends and removes them."""

    def __init__(self, options: SidecarOptions, *, lists: bool = False) -> None:
        """Start them; the options' paths are replaced. Raises KvatlasError or OSError."""
        with contextlib.ExitStack() as owned:
            self.folder = owned.enter_context(runtime_folder())
            self.options = msgspec.structs.replace(
                options,
                ring_path=str(self.folder / "ring"),
                socket_path=str(self.folder / "socket"),
                pool_path=str(self.folder / "pool") if options.num_slots else "",
            )
            self.options.validate()
            ring = RingWriter.create(Path(self.options.ring_path), lists=lists)
            self._ring, self.hook = ring, WorkerHook(ring)
            owned.callback(self.hook.close)
            self.sidecar = start_detached(self.options)
            owned.callback(lambda: self.sidecar.stop())
            self._owned = owned.pop_all()
        #: sidecars started so far; another one has made a serve pool of its own
        self.generation = 1
        self._revivals = Backoff(REVIVE_SECONDS, MAX_REVIVE_SECONDS, MAX_REVIVE_SECONDS)
        #: the end of the present sidecar has been noted
        self._is_noted = False
        #: of the present sidecar
        self._pulse = EnginePulse(SIDECAR_SILENT_SECONDS)
        #: a forked child leaves everything to its parent
        self._owner_pid = os.getpid()
        self._is_closed = False
        #: held while a sidecar is started or stopped
        self._lock = threading.Lock()
        self.hook.start_beats(also=self.revive)

    def revive(self) -> None:
        """Start the sidecar again if it has ended, unless another instance has taken its place.

        One that hangs is ended first. The next one asks the engine to list what it holds, so
        nothing is lost but time.
        """
        with self._lock:
            status, now = self.sidecar.exit_status, time.monotonic()
            if self._is_closed or status == FENCED_STATUS:
                return
            if status is None:
                self._pulse.look(self._ring.reader_beats, 0, now)
                if not self._pulse.is_stalled:
                    return
                seconds = self._pulse.silence_seconds
                _log.error("kvatlas: the sidecar gave no sign of life for %.0f s: killed", seconds)
                status = self.sidecar.kill()
            if not self._is_noted:
                self._is_noted = True
                pause = self._revivals.next(now)
                _log.error("kvatlas: the sidecar ended with %s; again in %.0f s", status, pause)
            if self._revivals.seconds_left(now):
                return
            self._is_noted = False
            try:
                self.sidecar = start_detached(self.options)
                self._pulse = EnginePulse(SIDECAR_SILENT_SECONDS)
                self.generation += 1
            except OSError as error:
                _log.error("kvatlas: no sidecar: %s", error)

    def close(self) -> None:
        """Let the sidecar publish what is left, then end it. Idempotent."""
        if os.getpid() != self._owner_pid:
            self._is_closed = True  # the thread that may hold the lock is the parent's
            return
        with self._lock:
            self._is_closed = True
        self._owned.close()


def plugin_settings() -> Settings:
    """Return the settings of an engine's environment; raises InvalidSetting."""
    file = os.environ.get(CONFIG_VARIABLE)
    return load_settings(Path(file) if file else None)


def default_worker(port: int | None) -> str:
    """Return a name for an engine that was given none; two that share it fence each other."""
    host = socket.gethostname()
    return host if port is None else f"{host}-{port}"
