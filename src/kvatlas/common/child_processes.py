"""Child processes: signals that are safe to send, an end with a limit, and one supervisor for all.

    start --ready--> asked now and then --ended, or silent--> killed --pause--> start ...

The supervisor decides by `ChildHealth`, which is pure. A child that runs and does not answer is as
useless as one that has ended, and nothing but a question finds it.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvatlas.common.backoff import Backoff
from kvatlas.schemas.errors import KvatlasError

_PR_SET_PDEATHSIG = 1

_logger = logging.getLogger(__name__)


def signal_child(process: Process, number: signal.Signals) -> None:
    """Send a signal to a child that may have ended already.

    `Process.kill` and the like ask for the child's status first, and so take it from the event
    loop's watcher, which then knows no status ("Unknown child process").
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def kill_child(process: Process) -> int:
    """End a child at once; return its status when it has ended."""
    signal_child(process, signal.SIGKILL)
    return await process.wait()


async def end_child(
    process: Process, seconds: float, name: str, numbers: tuple[signal.Signals, ...]
) -> int:
    """Ask a child to end with these signals, kill it after so long; return its status."""
    for number in numbers:
        signal_child(process, number)
    try:
        async with asyncio.timeout(seconds):
            return await process.wait()
    except TimeoutError:
        _logger.warning("%s (process %d) did not stop in %g s: killed", name, process.pid, seconds)
        return await kill_child(process)


def die_with_parent(parent_pid: int) -> None:
    """Let the system kill this process when its parent ends, however that ends. Linux only.

    To be called by the child; the parent's thread that has started it has to live on.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)


class ChildLimits(Struct, frozen=True):
    """How patient a supervisor is; seconds."""

    #: until it is of use; then it counts as failed
    start_seconds: float
    #: between two questions, and what an answer may take
    ask_seconds: float = 1.0
    answer_seconds: float = 2.0
    #: questions in a row without an answer after which it is killed
    max_unanswered: int = 3
    #: before it is started again: at first, and at most
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 30.0


class ChildHealth:
    """What a supervisor knows of a child; pure."""

    def __init__(self, limits: ChildLimits) -> None:
        self.limits = limits
        # one that has run for as long as the longest pause fails for another reason than before
        self._pauses = Backoff(
            limits.first_pause_seconds, limits.longest_pause_seconds, limits.longest_pause_seconds
        )
        #: questions in a row without an answer
        self.num_unanswered = 0
        #: how often it ended, did not answer or did not start; and why the last time
        self.num_failures = 0
        self.reason = ""

    def answered(self) -> None:
        """A question was answered."""
        self.num_unanswered = 0

    def unanswered(self) -> bool:
        """A question was not answered; return whether that is enough to kill the child."""
        self.num_unanswered += 1
        return self.num_unanswered >= self.limits.max_unanswered

    @property
    def silence(self) -> str:
        """How long it has been silent, in words."""
        asked = self.limits
        seconds = self.num_unanswered * (asked.ask_seconds + asked.answer_seconds)
        return f"did not answer {self.num_unanswered} questions in about {seconds:.0f} s"

    def failed(self, reason: str, now: float) -> float:
        """The child is no more; return the seconds until it is started again."""
        self.num_unanswered = 0
        self.num_failures += 1
        self.reason = reason
        return self._pauses.next(now)


class Child(Protocol):
    """A process as a supervisor needs it; after `kill`, `start` may be called again."""

    async def start(self) -> None:
        """Return when it is of use. Raises KvatlasError or OSError with the reason."""
        ...

    async def ended(self) -> int:
        """Return its status when it has ended."""
        ...

    async def answers(self) -> bool:
        """Ask it something; return whether the answer is right. May be cancelled."""
        ...

    async def kill(self) -> None:
        """End it at once, if it runs, and let go of what belongs to it."""
        ...


class Supervisor:
    """Keeps one child of use: `start` it first, then let `run` run.

    `name` is for people. `on_change` is called with the reason when the child is of no use, and
    with "" when it is again.
    """

    def __init__(
        self,
        child: Child,
        name: str,
        limits: ChildLimits,
        on_change: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._child, self._name = child, name
        self._on_change, self._clock = on_change, clock
        self.health = ChildHealth(limits)

    async def start(self) -> None:
        """Start the child; raises what it raises, or TimeoutError, and leaves none then."""
        try:
            async with asyncio.timeout(self.health.limits.start_seconds):
                await self._child.start()
        except BaseException:
            await self._child.kill()
            raise

    async def run(self, first_failure: str = "") -> None:
        """Watch the child, and start it again whenever it is of no use; without end.

        `first_failure` says why it does not run now; empty where it does.
        """
        reason = first_failure
        while True:
            if not reason:
                reason = await self._until_useless()
                await self._child.kill()
            pause = self.health.failed(reason, self._clock())
            text = f"{self._name} {reason}"
            _logger.error("%s; it is started again in %g s", text, pause)
            self._on_change(text)
            await asyncio.sleep(pause)
            reason = await self._start_again()

    async def _start_again(self) -> str:
        try:
            await self.start()
        except TimeoutError:
            return f"did not start within {self.health.limits.start_seconds:g} s"
        except (KvatlasError, OSError) as error:
            return f"did not start: {error}"
        _logger.info("%s runs again", self._name)
        self._on_change("")
        return ""

    async def _until_useless(self) -> str:
        """Return why the child is of no use any more."""
        ended = asyncio.ensure_future(self._child.ended())
        try:
            while True:
                await asyncio.wait((ended,), timeout=self.health.limits.ask_seconds)
                if ended.done():
                    return f"ended with status {ended.result()}"
                if await self._answers():
                    self.health.answered()
                elif self.health.unanswered():
                    return self.health.silence
        finally:
            ended.cancel()

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(self.health.limits.answer_seconds):
                return await self._child.answers()
        except (TimeoutError, OSError):
            return False
