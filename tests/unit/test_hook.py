"""What an engine's adapter may rely on."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawEvent,
    RawListed,
    RawRemoved,
    RawStored,
    decode_raw,
)
from kvatlas.worker_hooks.reporting import hook as hook_module
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import Lost, RingReader, RingWriter
from testkit.waiting import until


class Ends:
    """A hook and the reader of its ring."""

    def __init__(
        self,
        path: Path,
        capacity: int = 1 << 16,
        *,
        lists: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hook = WorkerHook(RingWriter.create(path, capacity, lists=lists), clock)
        self.reader = RingReader(path)

    def take(self) -> list[RawEvent | Lost]:
        return [r if isinstance(r, Lost) else decode_raw(r) for r in self.reader.read()]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path / "ring")
    yield made
    made.hook.close()
    made.reader.close()


def test_what_is_said_arrives(ends: Ends) -> None:
    ends.hook.stored([1, b"2"], None, [1, 2, 3, 4], cache_salt="s")
    ends.hook.removed([1], tier=Tier.dram, group=3)
    ends.hook.cleared()
    ends.hook.cleared(Tier.ssd)
    tokens = b"".join(i.to_bytes(4, "little") for i in (1, 2, 3, 4))
    assert ends.take() == [
        RawStored((1, b"2"), None, tokens, cache_salt="s"),
        RawRemoved((1,), Tier.dram, 3),
        RawCleared(),
        RawCleared(Tier.ssd),
    ]
    assert ends.hook.num_appended == 4


def test_nothing_that_is_said_raises(ends: Ends) -> None:
    ends.hook.stored([1], None, [-1])
    ends.hook.stored([1], None, b"123")  # three bytes are the edge's business
    ends.hook.stored(7, None, [1])  # type: ignore[arg-type]
    ends.hook.stored([object()], None, [1])  # type: ignore[list-item]
    ends.hook.stored([2**70], None, [1])
    ends.hook.removed(None)  # type: ignore[arg-type]
    assert ends.hook.num_rejected == 5
    assert len(ends.take()) == 1


def test_a_closed_hook_takes_what_is_said_in_silence(tmp_path: Path) -> None:
    hook = WorkerHook(RingWriter.create(tmp_path / "ring"))
    hook.close()
    hook.close()
    hook.stored([1], None, [1])
    hook.cleared()
    hook.pump()
    assert hook.num_rejected == 2


def test_without_room_events_are_counted(tmp_path: Path) -> None:
    ends = Ends(tmp_path / "ring", 4096)
    for i in range(100):
        ends.hook.stored([i], None, bytes(64))
    assert ends.hook.num_lost > 0
    assert ends.take()[-1] == Lost(ends.hook.num_lost)
    ends.hook.close()
    ends.reader.close()


def test_a_listing_goes_on_with_later_calls_and_never_fills_the_ring(tmp_path: Path) -> None:
    ends = Ends(tmp_path / "ring", 1 << 14, lists=True)
    blocks = [RawStored((i,), None, bytes(64)) for i in range(1000)]
    ends.hook.answer_listings(lambda: iter(blocks))
    ends.hook.pump()
    assert ends.take() == []
    ends.reader.want_listing()
    taken: list[RawEvent | Lost] = []
    for _ in range(100):
        ends.hook.pump()
        ends.hook.pump()
        taken += ends.take()
    assert taken == [*blocks, RawListed(True)]
    assert ends.hook.num_lost == 0
    ends.hook.close()
    ends.reader.close()


def test_what_happens_during_a_listing_is_reported_in_its_order(ends: Ends) -> None:
    ends.hook.answer_listings(lambda: iter([RawStored((1,), None, bytes(64))] * 65))
    ends.reader.want_listing()
    ends.hook.removed([7])
    assert len(ends.take()) == 65  # itself and the first part
    ends.hook.removed([8])
    assert ends.take() == [RawRemoved((8,)), RawStored((1,), None, bytes(64)), RawListed(True)]


def test_who_cannot_list_says_so(ends: Ends) -> None:
    ends.reader.want_listing()
    ends.hook.pump()
    assert ends.take() == [RawListed(False)]


def test_a_listing_that_fails_is_not_complete(ends: Ends) -> None:
    def broken() -> Iterator[RawStored]:
        yield RawStored((1,), None, bytes(64))
        raise RuntimeError("dictionary changed size during iteration")

    ends.hook.answer_listings(broken)
    ends.reader.want_listing()
    ends.hook.pump()
    assert ends.take()[-1] == RawListed(False)
    assert ends.hook.num_rejected == 1


class TestBeats:
    """Signs of life of the engine's process."""

    @pytest.fixture(autouse=True)
    def _often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hook_module, "BEAT_SECONDS", 0.01)

    async def test_an_idle_engine_gives_them_and_events_are_none(self, ends: Ends) -> None:
        ends.hook.removed([1])
        assert ends.reader.beats == 0
        ends.hook.start_beats()
        await until(lambda: ends.reader.beats > 3)

    async def test_a_loop_that_does_not_pump_ends_them_until_it_does(self, tmp_path: Path) -> None:
        ticks: list[int] = []
        now = 100.0
        ends = Ends(tmp_path / "clocked", clock=lambda: now)
        ends.hook.start_beats(loop_seconds=2.0, also=lambda: ticks.append(ends.reader.beats))
        await until(lambda: ends.reader.beats > 3)
        now = 102.0
        before = len(ticks)
        await until(lambda: len(ticks) > before + 5)
        assert ticks[-1] == ticks[-3]
        ends.hook.pump()
        await until(lambda: ends.reader.beats > ticks[before + 5] + 3)
        ends.hook.close()
        ends.reader.close()

    def test_they_end_with_the_hook(self, ends: Ends) -> None:
        before = set(threading.enumerate())
        ends.hook.start_beats()
        (thread,) = set(threading.enumerate()) - before
        ends.hook.close()
        assert not thread.is_alive()
