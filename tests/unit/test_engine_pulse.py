"""Whether the engine beside a sidecar lives."""

import pytest

from kvatlas.worker_hooks.reporting.engine_pulse import LOOK_SECONDS, EnginePulse


class Looking:
    """A sidecar that looks at regular times."""

    def __init__(self, silent_seconds: float = 5.0) -> None:
        self.pulse, self.now = EnginePulse(silent_seconds), 100.0
        self.changes: list[tuple[float, bool]] = []

    def look(self, seconds: float, beats: int, head: int = 0) -> None:
        """Look on for so long at an engine that does nothing."""
        for _ in range(round(seconds / LOOK_SECONDS)):
            if self.pulse.look(beats, head, self.now):
                self.changes.append((self.now, self.pulse.is_stalled))
            self.now += LOOK_SECONDS


def test_an_engine_without_a_beat_is_stalled_until_it_beats_again() -> None:
    looking = Looking()
    looking.look(60, 1)
    assert looking.changes == [(105.0, True)]
    looking.look(1, 2)
    assert looking.changes[1:] == [(160.0, False)]


@pytest.mark.parametrize("counter", ["beats", "head"])
def test_beats_and_records_are_both_signs_of_life(counter: str) -> None:
    looking = Looking()
    for number in range(1, 100):
        looking.look(4, **{"beats": 1, counter: number})
    assert looking.changes == []


def test_a_writer_that_never_beats_is_not_judged() -> None:
    looking = Looking()
    looking.look(10, 0, 8)
    looking.look(3600, 0, 16)
    assert looking.changes == []


def test_a_sidecar_that_stood_still_itself_has_not_seen_silence() -> None:
    looking = Looking()
    looking.look(1, 7)
    looking.now += 600.0
    looking.look(2, 7)
    assert looking.changes == []
    looking.look(5, 7)
    assert [is_stalled for _, is_stalled in looking.changes] == [True]


def test_a_clock_that_steps_back_is_no_silence() -> None:
    looking = Looking()
    looking.look(1, 7)
    looking.now -= 1000.0
    looking.look(4, 7)
    assert looking.changes == []
