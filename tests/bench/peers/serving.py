"""The peer's side of testkit/measuring/peer.py; needs the standard library only."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls from standard input until it ends; what is printed otherwise goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": calls[asked.pop("call")](**asked)}
        except Exception as error:  # noqa: BLE001 - told to the other side
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
