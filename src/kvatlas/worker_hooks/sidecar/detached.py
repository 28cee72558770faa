"""Starting a sidecar that is no descendant of its engine.

    engine --Popen--> stage --fork--> sidecar      the stage ends at once; then the sidecar's parent
      ^                                 |          is init
      '---- pipe: its pid, its status --'

A server of engines ends them by SIGKILL to all their descendants (vLLM does on SIGTERM, SGLang as
well), a session of its own or not. A sidecar among these says nothing any more, and its blocks stay
in the index until its lease ends. This one notices the end of its engine and publishes WorkerDown.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Self

import msgspec

from kvatlas.worker_hooks.sidecar.launch import STOP_SECONDS, SidecarProcess, start_sidecar
from kvatlas.worker_hooks.sidecar.options import SidecarOptions

MODULE = "kvatlas.worker_hooks.sidecar.detached"
#: exit status of a sidecar that has left none
KILLED_STATUS = -signal.SIGKILL
_PID_BYTES = 4


class DetachedSidecar:
    """Does what SidecarProcess does, for a process that is not our child."""

    def __init__(self, pid: int, pipe: int) -> None:
        """`pipe` is readable when the process has written its status, or ended without."""
        self.pid, self._pipe = pid, pipe
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None
        self._lock = threading.Lock()

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._look(0)

    def wait(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """Return its exit status when it has ended; raises subprocess.TimeoutExpired."""
        status = self._look(timeout_seconds)
        if status is None:
            raise subprocess.TimeoutExpired(MODULE, timeout_seconds)
        return status

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """Let it publish what is left and end; kill it if it takes longer. Idempotent."""
        self._send(signal.SIGTERM)
        try:
            return self.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once, as a crash would."""
        self._send(signal.SIGKILL)
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _send(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                signal.pidfd_send_signal(self._pidfd, number)

    def _look(self, seconds: float) -> int | None:
        with self._lock:
            if self._status is None and _is_readable(self._pidfd, seconds):
                said = os.read(self._pipe, 1)
                self._status = said[0] if said else KILLED_STATUS
                os.close(self._pipe)
                os.close(self._pidfd)
            return self._status


def start_detached(options: SidecarOptions) -> DetachedSidecar | SidecarProcess:
    """Start a sidecar as `start_sidecar` does, but out of reach of what ends the engine.

    Returns when it has its process. On a system without file descriptors of processes it is an
    ordinary child. Raises OSError when it does not start.
    """
    if not _has_pidfds():
        return start_sidecar(options)
    if options.parent_pid == 0:
        options = msgspec.structs.replace(options, parent_pid=os.getpid())
    options.validate()
    pipe, theirs = os.pipe()
    try:
        # the engine's pid is for people who look for its sidecar
        command = [sys.executable, "-P", "-m", MODULE, str(theirs), str(options.parent_pid)]
        try:
            stage = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        with stage:
            stage.communicate(msgspec.json.encode(options))
        told = os.read(pipe, _PID_BYTES)
        if len(told) < _PID_BYTES:
            raise ChildProcessError(f"no sidecar: its start ended with {stage.returncode}")
        return DetachedSidecar(int.from_bytes(told, "little"), pipe)
    except BaseException:
        os.close(pipe)
        raise


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _run(pipe: int) -> int:
    """Become the sidecar; the process that was started ends here."""
    if os.fork():
        os._exit(0)
    os.write(pipe, os.getpid().to_bytes(_PID_BYTES, "little"))
    from kvatlas.worker_hooks.sidecar.__main__ import main

    status = 1
    try:
        status = main()
    finally:
        with contextlib.suppress(BrokenPipeError):  # its engine is gone
            os.write(pipe, bytes([status]))
    return status


if __name__ == "__main__":
    sys.exit(_run(int(sys.argv[1])))
