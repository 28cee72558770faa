"""`kvatlas` with a clock on its event loop: python timed_serve.py FILE serve --port 0 ...

A request waits for the turn of the event loop that is under way. The file gets, at the end, when
each longer turn ended (`perf_counter`) and the processor seconds that it took: others on the
machine make a turn last longer, but not cost more.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import ClassVar

from kvatlas.__main__ import main

#: shorter turns are not kept
LEAST_SECONDS = 0.0005


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that remembers its longer turns."""

    #: of the process: there is one loop in it
    turns: ClassVar[list[tuple[float, float]]] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        seconds = time.thread_time() - began
        if seconds >= LEAST_SECONDS:
            self.turns.append((time.perf_counter(), seconds))


class TimedPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes timed loops."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return TimedLoop()


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    asyncio.set_event_loop_policy(TimedPolicy())
    try:
        main()
    finally:
        path.write_text(json.dumps(TimedLoop.turns))
