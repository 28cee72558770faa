"""What a worker knew and when, in a file that is whole up to the last line after a `kill -9`.

op     number added removed     the engine has done this; blocks are numbers of Chains
sent   epoch seq op             about to be published: what was held after `op` ops (None: the
                                batch was cut in the middle of one)
acked  [[epoch, seq], ...]      the publisher has said that these are stored
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TruthWriter:
    """Appends lines, each by one write: a process that is killed has lost none before."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def op(self, number: int, added: list[int], removed: list[int]) -> None:
        """Note what the engine is about to say."""
        self._write(["op", number, added, removed])

    def sent(self, epoch: int, seq: int, op: int | None) -> None:
        """Note what a batch brings readers to."""
        self._write(["sent", epoch, seq, op])

    def acked(self, batches: list[tuple[int, int]]) -> None:
        """Note what has to be in the log from now on."""
        self._write(["acked", batches])

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)

    def _write(self, row: list[Any]) -> None:
        os.write(self._file, json.dumps(row, separators=(",", ":")).encode() + b"\n")


class Truth:
    """One process's account, read back."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        #: op -> (added, removed)
        self.ops: dict[int, tuple[list[int], list[int]]] = {}
        #: (epoch, seq) -> op
        self.sent: dict[tuple[int, int], int | None] = {}
        #: (epoch, seq) of batches that were acknowledged
        self.acked: set[tuple[int, int]] = set()
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                self._take(json.loads(line))

    def _take(self, row: list[Any]) -> None:
        match row:
            case ["op", number, added, removed]:
                self.ops[number] = added, removed
            case ["sent", epoch, seq, op]:
                self.sent[epoch, seq] = op
            case ["acked", batches]:
                self.acked.update((epoch, seq) for epoch, seq in batches)

    def states(self) -> Iterator[tuple[int, set[int]]]:
        """Yield (op, blocks held after it), the beginning included; one set that changes."""
        held: set[int] = set()
        yield 0, held
        for number in sorted(self.ops):
            added, removed = self.ops[number]
            held |= set(added)
            held -= set(removed)
            yield number, held
