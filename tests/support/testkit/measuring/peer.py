"""A peer in a process of its own, because its packages are not ours.

It reads one JSON value a line, `{"call": NAME, ...arguments}`, and answers each with one line,
`{"value": ...}` or `{"error": "..."}`. Peers live in tests/bench/peers and run with the interpreter
of `.venv-peers`, which `make .venv-peers/.installed` makes.
"""

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ROOT = Path(__file__).parents[4]
PEER_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_SCRIPTS = _ROOT / "tests" / "bench" / "peers"


def pin_to_one_cpu() -> None:
    """Stay on one core, children too: the best case of a peer that hands calls to a thread."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class PeerFailed(Exception):
    """The peer raised, or ended."""


class Peer:
    """Runs one script of tests/bench/peers for as long as it is entered."""

    def __init__(self, script: str, *arguments: str) -> None:
        if not PEER_PYTHON.exists():
            raise SystemExit("no peer here: `make .venv-peers/.installed`, or --peer none")
        # the script finds `serving` beside it
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        self._process = subprocess.Popen(
            [str(PEER_PYTHON), str(_SCRIPTS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, call: str, **arguments: Any) -> Any:
        """Return the value of one call. Raises PeerFailed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{call}: the peer has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{call}: {answer['error']}")
        return answer["value"]
