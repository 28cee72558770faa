"""Keeps the embedded broker of use: starts it again when it has ended, or stores nothing any more.

    runs ------ ended ---------------------------------------> started again
    runs ------ health check names a failed write -----------> a condition, until it is healthy
    unhealthy - the disk takes a test file, several times ---> restarted

nats-server 2.15 does not write to a stream again after a write has failed (disk full), though there
is room again: it answers, and acknowledges nothing (nats-io/nats-server#7654).
"""

import asyncio
import logging
import os
import re
import tempfile
from pathlib import Path

from kvatlas.common.backoff import Backoff
from kvatlas.events.nats.embedded.server import EmbeddedServer
from kvatlas.schemas.conditions import BROKER_UNHEALTHY, Conditions
from kvatlas.schemas.errors import ServerNotStarted

#: how often the broker is asked for its health
CHECK_SECONDS = 1.0
#: checks with room on the disk before it is restarted: it may be about to heal by itself
PATIENT_CHECKS = 3
#: pause after a start that failed, or that did not help
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0
#: without a restart for so long, those before count no more
GOOD_SECONDS = 60.0
#: room that a restart takes for granted; less fills up again at once
TEST_BYTES = 1 << 20

#: what a restart mends; other troubles (a stream that cannot be recovered) would come back
_MENDED = re.compile(
    "write error|no space|insufficient|jetstream.*(disabled|not (enabled|available))", re.IGNORECASE
)

_logger = logging.getLogger(__name__)


class EmbeddedKeeper:
    """Looks after one embedded broker for as long as `run` runs."""

    def __init__(
        self, server: EmbeddedServer, conditions: Conditions, check_seconds: float = CHECK_SECONDS
    ) -> None:
        self._server, self._conditions = server, conditions
        self._check_seconds = check_seconds
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, GOOD_SECONDS)
        self._clock = asyncio.get_running_loop().time
        #: checks in a row that found it unhealthy and the disk with room
        self._num_bad = 0
        self.num_restarts = 0

    async def run(self) -> None:
        """Check without end."""
        while True:
            if self._server.pid is None:
                _logger.error("the embedded broker has ended and is started again")
                await self._start_again()
            else:
                await self._check()
            await self._until_due()

    async def _until_due(self) -> None:
        """Return at the next check, or when the broker has ended."""
        try:
            async with asyncio.timeout(self._check_seconds):
                await self._server.ended()
        except TimeoutError:
            pass

    async def _check(self) -> None:
        problem = await self._server.problem()
        if problem is None:
            return  # it says nothing: its clients notice that, and a stopped one may go on
        if not problem:
            self._num_bad = 0
            self._conditions.end(BROKER_UNHEALTHY)
            return
        self._conditions.begin(
            BROKER_UNHEALTHY, f"the embedded broker stores nothing or not all: {problem}"
        )
        has_room = await asyncio.to_thread(_takes_a_file, self._server.streams_folder)
        self._num_bad = self._num_bad + 1 if has_room and _MENDED.search(problem) else 0
        if self._num_bad >= PATIENT_CHECKS and not self._backoff.seconds_left(self._clock()):
            self._num_bad = 0
            _logger.warning("the embedded broker has room on its disk again and is restarted")
            await self._start_again()

    async def _start_again(self) -> None:
        self._backoff.next(self._clock())
        self.num_restarts += 1
        while True:
            try:
                await self._server.restart()
                return
            except ServerNotStarted as error:
                reason = f"the embedded broker does not start: {error}"
                self._conditions.begin(BROKER_UNHEALTHY, reason)
                await asyncio.sleep(self._backoff.next(self._clock()))


def _takes_a_file(folder: Path) -> bool:
    """Say whether a file of TEST_BYTES can be written into a folder."""
    try:
        # unbuffered: closing a buffer whose last write failed fails again
        with tempfile.TemporaryFile(buffering=0, dir=folder) as file:
            content = os.urandom(TEST_BYTES)  # what compresses well would take no room
            is_whole = file.write(content) == len(content)
            os.fsync(file.fileno())
            return is_whole
    except OSError:
        return False
