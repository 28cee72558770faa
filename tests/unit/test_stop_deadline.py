"""A process that was asked to stop ends in time, whatever its event loop does."""

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from kvatlas.worker_hooks.sidecar.stop_deadline import OVERDUE_STATUS, StopDeadline, end_of
from testkit.waiting import WAIT_SECONDS

#: a process whose loop never waits once it runs; it says so first
SPINNING = """
    import asyncio
    from time import sleep
    from kvatlas.worker_hooks.sidecar.process import signals_call
    from kvatlas.worker_hooks.sidecar.stop_deadline import begin_stop_with, end_of, limit_stop

    async def spin():
        deadline = limit_stop("spinner", 0.2)
        deadline.what_is_lost = lambda: "2 batches"
        async with signals_call(lambda reason: None):
            {watch}
            print("ready", flush=True)
            {body}

    asyncio.run(spin())
"""
BODIES = {
    "spins": "while True: pass",
    "waits for ever": "await asyncio.Event().wait()",
    "has a thread that hangs": "asyncio.get_running_loop().run_in_executor(None, sleep, 600)",
}


def a_process(body: str, watch: str = "pass") -> "subprocess.Popen[str]":
    program = textwrap.dedent(SPINNING.format(body=body, watch=watch))
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_that_hears_nothing_ends_and_says_what_is_lost(
    body: str, number: signal.Signals
) -> None:
    with a_process(body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == OVERDUE_STATUS
    (line,) = errors.splitlines()
    expected = f"spinner: expected to stop within 0.2 s after signal {number.name}, found at "
    assert line.startswith(expected)
    assert line.endswith("ends now; lost: 2 batches")


def test_a_process_that_hears_nothing_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with parent, a_process("while True: pass", f"begin_stop_with(end_of({parent.pid}))") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        parent.kill()
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == OVERDUE_STATUS
    assert "after its parent ended, found at <string>:" in errors


def test_only_the_first_beginning_counts() -> None:
    statuses: queue.Queue[int] = queue.Queue()
    deadline = StopDeadline("a test", 0.0, statuses.put)
    deadline.begin("signal SIGTERM")
    deadline.begin("signal SIGINT")
    assert statuses.get(timeout=WAIT_SECONDS) == OVERDUE_STATUS
    assert deadline.reason == "signal SIGTERM"
    assert statuses.empty()


def test_a_deadline_that_is_cancelled_ends_nothing() -> None:
    statuses: queue.Queue[int] = queue.Queue()
    deadline = StopDeadline("a test", WAIT_SECONDS, statuses.put)
    before = set(threading.enumerate())
    deadline.begin("signal SIGTERM")
    (thread,) = set(threading.enumerate()) - before
    deadline.cancel()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert statuses.empty()


def test_the_end_of_a_process_is_seen_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        has_ended = end_of(child.pid)
        assert not has_ended()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended()
        assert child.returncode is None
    assert end_of(child.pid)()
    assert not end_of(os.getpid())()


def test_a_deadline_waits_for_a_drain() -> None:
    statuses: queue.Queue[int] = queue.Queue()
    deadline = StopDeadline("a test", 0.0, statuses.put)
    deadline.extend(WAIT_SECONDS)
    before = set(threading.enumerate())
    deadline.begin("signal SIGTERM")
    (thread,) = set(threading.enumerate()) - before
    deadline.cancel()
    thread.join(WAIT_SECONDS)
    assert statuses.empty()
