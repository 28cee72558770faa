"""Starting a sidecar from within an engine; imports nothing of the bus."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import msgspec

from kvatlas.common.own_files import open_file
from kvatlas.worker_hooks.sidecar.options import SidecarOptions

STOP_SECONDS = 15.0
#: exit status of a sidecar that a newer epoch has replaced; starting it again would fight with it
FENCED_STATUS = 3


class SidecarProcess:
    """A sidecar that this process has started; leaving it as a context stops it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """Return its exit status when it has ended; raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout_seconds)

    def begin_stop(self) -> None:
        """Ask it to publish what is left and end; return at once."""
        self._process.terminate()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """Let it publish what is left and end; kill it if it takes longer. Idempotent."""
        self._process.terminate()
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once, as a crash would."""
        self._process.kill()
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start_sidecar(options: SidecarOptions, log_file: Path | None = None) -> SidecarProcess:
    """Start a sidecar with these options and return at once; `SidecarChannel.wait_ready` waits.

    It ends with this process unless the options name another. The options travel through its
    standard input, so that keys show in no list of processes. It writes warnings to `log_file`, or
    where this process does, and has a session of its own: Ctrl-C reaches it through its engine.
    """
    if options.parent_pid == 0:
        options = msgspec.structs.replace(options, parent_pid=os.getpid())
    options.validate()
    command = [sys.executable, "-P", "-m", "kvatlas.worker_hooks.sidecar"]
    if log_file is None:
        process = _start(command, None)
    else:
        log = open_file(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            process = _start(command, log)
        finally:
            os.close(log)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(msgspec.json.encode(options))
    return SidecarProcess(process)


def _start(command: list[str], log: int | None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=log,
        start_new_session=True,
    )
