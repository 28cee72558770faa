"""The numbers of all workers' loads, a row each, so that one pass brings a whole fleet up to now.

    row    given  drained  reported  work  as of  seen at  in flight  compute  pull      epoch
    w1/0 [  812  |  640   |   512   | ...                                          ]    [  7  ]
    free [                                                                         ]    [     ]

Kept by loads.py, which says what they mean; `price_kernel.fill_loads` is the pass.
"""

import math
from typing import overload

import numpy as np

from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.rates import WORKER_SAMPLES, RateEstimate

FIRST_ROWS = 64
#: far above what a worker says of its epoch, and still a number of 64 bits
MAX_EPOCH = 2**62


class LoadTable:
    """Rows of numbers, given out and taken back; it grows, and rows stay where they are."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._free: list[int] = []
        self._bind_arrays(np.zeros((FIRST_ROWS, k.NUM_LOADS)), np.zeros(FIRST_ROWS, np.int64))

    def _bind_arrays(self, lines: k.F64, epochs: k.I64) -> None:
        #: for the pass over many rows
        self.lines, self.epochs = lines, epochs
        #: the same memory for single numbers, which are plain ones so
        self.cells = lines.reshape(-1).data.cast("B").cast("d")
        self.epoch_of = epochs.data.cast("B").cast("q")

    def acquire(self) -> int:
        """Return a row of zeros."""
        if self._free:
            row = self._free.pop()
            self.lines[row], self.epochs[row] = 0.0, 0
            return row
        if self._num_rows == len(self.lines):
            more = np.zeros_like(self.lines), np.zeros_like(self.epochs)
            self._bind_arrays(
                np.vstack((self.lines, more[0])), np.concatenate((self.epochs, more[1]))
            )
        self._num_rows += 1
        return self._num_rows - 1

    def release(self, row: int) -> None:
        """Let a row be taken by somebody else."""
        self._free.append(row)


class _Cell:
    """A number of a worker, which stands in its row."""

    def __init__(self, column: int) -> None:
        self._column = column

    @overload
    def __get__(self, worker: None, kind: type["LoadRow"]) -> "_Cell": ...
    @overload
    def __get__(self, worker: "LoadRow", kind: type["LoadRow"]) -> float: ...
    def __get__(self, worker: "LoadRow | None", kind: type["LoadRow"]) -> "float | _Cell":
        if worker is None:
            return self
        return worker.table.cells[worker.first_cell + self._column]

    def __set__(self, worker: "LoadRow", value: float) -> None:
        worker.table.cells[worker.first_cell + self._column] = value


class LoadRow:
    """One row of the table, by name, and what is learnt of its worker."""

    in_flight = _Cell(k.FLYING)
    given_ms, drained_ms = _Cell(k.GIVEN), _Cell(k.DRAINED)
    #: end_ms of the newest request whose prefill is reported; `drained` is exact up to here
    reported_ms = _Cell(k.REPORTED)
    work_ms = _Cell(k.DONE_WORK)
    as_of, seen_at = _Cell(k.AS_OF), _Cell(k.SEEN_AT)
    compute_ms_per_token, pull_ms_per_token = _Cell(k.COMPUTE_RATE), _Cell(k.PULL_RATE)

    def __init__(
        self,
        table: LoadTable,
        epoch: int,
        model: str,
        rates: tuple[float, float],
        max_rate_ratio: float,
    ) -> None:
        self.table, self.row = table, table.acquire()
        self.first_cell = self.row * k.NUM_LOADS
        self.model = model
        self._compute, self._pull = (
            RateEstimate(rate, WORKER_SAMPLES, max_rate_ratio) for rate in rates
        )
        #: when the newest report of a rate came, or the last one before it was dropped; seconds
        self.learnt_at = self.faded_at = -math.inf
        self.compute_ms_per_token, self.pull_ms_per_token = rates
        self._set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """Its incarnation; the pass over many rows may have raised it."""
        return self.table.epoch_of[self.row]

    def _set_epoch(self, epoch: int) -> None:
        self.table.epoch_of[self.row] = min(epoch, MAX_EPOCH)

    def restart(self, epoch: int) -> None:
        """Forget the requests of an earlier incarnation; what it had to do died with it."""
        self._set_epoch(epoch)
        self.in_flight = 0.0
        self.given_ms = self.drained_ms = self.reported_ms = 0.0

    def advance(self, now: float, half_life_seconds: float) -> None:
        """Let the time pass: the queue drains, old work fades."""
        seconds = now - self.as_of
        if seconds <= 0.0:
            return
        self.as_of = now
        if self.drained_ms < self.given_ms:
            self.drained_ms = min(self.given_ms, self.drained_ms + 1000 * seconds)
        if self.work_ms:
            self.work_ms *= 0.5 ** (seconds / half_life_seconds)

    @property
    def num_samples(self) -> int:
        """Number of reports that its rates rest on."""
        return len(self._compute) + len(self._pull)

    def learn_compute(self, tokens: int, ms: float, model_rate: float, now: float) -> None:
        """Add a report of how long it computed."""
        self.learnt_at = now
        self._compute.learn(tokens, ms, model_rate)
        self._set_rates()

    def learn_pull(self, tokens: int, ms: float, model_rate: float, now: float) -> None:
        """Add a report of how long its pulls took, without their fixed part."""
        self.learnt_at = now
        self._pull.learn(tokens, ms, model_rate)
        self._set_rates()

    def fade(self, compute_rate: float, pull_rate: float) -> None:
        """Drop the oldest report of each rate: what is learnt comes nearer to the model's rates."""
        self._compute.drop_oldest(compute_rate)
        self._pull.drop_oldest(pull_rate)
        self._set_rates()

    def follow(self, compute_rate: float, pull_rate: float) -> None:
        """Stay near the model's rates as they are by now; take them if little is learnt of it."""
        self._compute.follow(compute_rate)
        self._pull.follow(pull_rate)
        self._set_rates()

    def _set_rates(self) -> None:
        self.compute_ms_per_token = self._compute.ms_per_token
        self.pull_ms_per_token = self._pull.ms_per_token
