"""Child processes: signals, an end with a limit, one supervisor."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import psutil
import pytest

from kvatlas.common.child_processes import (
    ChildHealth,
    ChildLimits,
    Supervisor,
    end_child,
    kill_child,
    signal_child,
)
from kvatlas.schemas.errors import RouterNotStarted
from testkit.peer import stop
from testkit.waiting import WAIT_SECONDS, until

LIMITS = ChildLimits(
    WAIT_SECONDS,
    ask_seconds=0.02,
    answer_seconds=0.2,
    max_unanswered=3,
    first_pause_seconds=0.01,
    longest_pause_seconds=0.02,
)
#: says a line for each one that it gets
ECHO = (
    "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
)


class TestChildHealth:
    def test_it_takes_several_questions_without_an_answer_in_a_row(self) -> None:
        health = ChildHealth(ChildLimits(1.0, max_unanswered=3))
        assert [health.unanswered(), health.unanswered()] == [False, False]
        health.answered()
        assert [health.unanswered() for _ in range(3)] == [False, False, True]
        assert health.silence == "did not answer 3 questions in about 9 s"

    def test_pauses_grow_while_it_fails_and_begin_anew_when_it_ran_for_long(self) -> None:
        health = ChildHealth(ChildLimits(1.0, first_pause_seconds=1.0, longest_pause_seconds=5.0))
        now, pauses = 0.0, []
        for _ in range(4):
            pauses.append(health.failed("ended with status 1", now))
            now += pauses[-1] + 0.5
        assert pauses == [1.0, 2.0, 4.0, 5.0]
        assert health.failed("ended with status 1", now + 5.0) == 1.0
        assert (health.num_failures, health.reason) == (5, "ended with status 1")

    def test_silence_of_one_process_is_not_held_against_the_next(self) -> None:
        health = ChildHealth(ChildLimits(1.0, max_unanswered=2))
        health.unanswered()
        health.failed("ended with status 1", 0.0)
        assert not health.unanswered()


class Echo:
    """A real process that answers questions."""

    def __init__(self, program: str = ECHO) -> None:
        self.program = program
        self.pids: list[int] = []
        self.process: Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", self.program), stdin=PIPE, stdout=PIPE
        )
        self.pids.append(self.process.pid)
        assert self.process.stdout
        if await self.process.stdout.readline() != b"ready\n":
            raise RouterNotStarted(f"status {await self.process.wait()}")

    async def ended(self) -> int:
        assert self.process
        return await self.process.wait()

    async def answers(self) -> bool:
        assert self.process
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(b"?\n")
        return await self.process.stdout.readline() == b"?\n"

    async def kill(self) -> None:
        if self.process is not None:
            await kill_child(self.process)


@contextlib.asynccontextmanager
async def supervised(child: Echo) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    changes: list[str] = []
    supervisor = Supervisor(child, "the echo", LIMITS, changes.append)
    await supervisor.start()
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, changes
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await child.kill()


class TestSupervisor:
    async def test_one_that_answers_is_left_alone(self) -> None:
        child = Echo()
        async with supervised(child) as (supervisor, changes):
            supervisor.health.num_unanswered = 2
            await until(lambda: supervisor.health.num_unanswered == 0)
        assert (len(child.pids), changes) == (1, [])

    async def test_one_that_ends_is_started_again_with_the_reason(self) -> None:
        child = Echo()
        async with supervised(child) as (_, changes):
            os.kill(child.pids[0], signal.SIGKILL)
            await until(lambda: len(changes) == 2)
        assert changes == ["the echo ended with status -9", ""]
        assert len(child.pids) == 2

    async def test_one_that_hangs_is_killed_and_started_again(self) -> None:
        child = Echo()
        async with supervised(child) as (_, changes):
            stop(child.pids[0])
            await until(lambda: len(changes) == 2)
            assert not psutil.pid_exists(child.pids[0])
        assert changes[0].startswith("the echo did not answer 3 questions")
        assert changes[1] == ""

    async def test_one_that_does_not_start_is_tried_until_it_does(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        child = Echo()
        async with supervised(child) as (supervisor, changes):
            child.program = "raise SystemExit(7)"
            os.kill(child.pids[0], signal.SIGKILL)
            await until(lambda: supervisor.health.num_failures >= 4)
            child.program = ECHO
            await until(lambda: changes[-1] == "")
        assert "the echo did not start: status 7" in changes
        lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(lines) == supervisor.health.num_failures

    async def test_the_first_start_raises_and_leaves_nothing(self) -> None:
        child = Echo("raise SystemExit(7)")
        with pytest.raises(RouterNotStarted, match="status 7"):
            await Supervisor(child, "the echo", LIMITS).start()
        assert not psutil.pid_exists(child.pids[0])


class TestSignals:
    async def test_a_child_that_has_just_died_keeps_its_status_whatever_is_sent(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "asyncio"):
            for _ in range(20):
                process = await asyncio.create_subprocess_exec("sleep", "600")
                os.kill(process.pid, signal.SIGKILL)
                # dead and perhaps not reaped: the loop, which notes that, does not run meanwhile
                signal_child(process, signal.SIGTERM)
                assert await kill_child(process) == -signal.SIGKILL
        assert [record.getMessage() for record in caplog.records] == []

    async def test_one_that_does_not_stop_in_time_is_killed(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "600")
        stop(process.pid)
        assert await end_child(process, 0.05, "sleeper", (signal.SIGTERM,)) == -signal.SIGKILL
        assert f"sleeper (process {process.pid}) did not stop in 0.05 s: killed" in caplog.text
