"""When an ended lease counts; seconds are plain numbers here."""

import pytest

from kvatlas.events.leases import LeaseChange
from kvatlas.indexer.service.lease_expiry import LeaseExpiry, LogSilence
from kvatlas.schemas.ids import InstanceId

W1 = InstanceId("w1", 0)
ALIVE = [(W1, 7)]


def alive(epoch: int = 7) -> LeaseChange:
    return LeaseChange(W1, epoch, "alive")


def expired(epoch: int | None = 7) -> LeaseChange:
    return LeaseChange(W1, epoch, "expired")


@pytest.fixture
def lapses() -> LeaseExpiry:
    """Return one that has been connected for long."""
    lapses = LeaseExpiry(ended_seconds=1, missing_seconds=30, settling_seconds=10)
    lapses.apply(alive())
    assert lapses.due(ALIVE, True, -100) == []
    return lapses


@pytest.mark.parametrize("kind", ["expired", "released"])
def test_an_ended_lease_counts_after_its_grace(lapses: LeaseExpiry, kind: str) -> None:
    lapses.apply(LeaseChange(W1, 7, kind))  # type: ignore[arg-type]
    assert lapses.due(ALIVE, True, 0) == []
    assert lapses.due(ALIVE, True, 1) == ALIVE


def test_a_lease_that_is_taken_again_does_not_count(lapses: LeaseExpiry) -> None:
    lapses.apply(expired())
    assert lapses.due(ALIVE, True, 0) == []
    lapses.apply(alive())
    assert lapses.due(ALIVE, True, 5) == []


def test_its_grace_begins_anew_when_it_ends_again(lapses: LeaseExpiry) -> None:
    lapses.apply(expired())
    lapses.due(ALIVE, True, 0)
    lapses.apply(alive())
    lapses.due(ALIVE, True, 0.5)
    lapses.apply(expired())
    assert lapses.due(ALIVE, True, 1) == []
    assert lapses.due(ALIVE, True, 2) == ALIVE


def test_a_lease_renewed_since_the_connect_counts_while_others_settle() -> None:
    """A broker that comes back finds leases that ran out meanwhile, and their living holders."""
    lapses = LeaseExpiry(ended_seconds=1, missing_seconds=30, settling_seconds=10)
    found, renewed = InstanceId("found", 0), InstanceId("renewed", 0)
    both = [(found, 7), (renewed, 7)]
    lapses.due(both, True, 0)
    for instance, tellings in ((found, 1), (renewed, 2)):
        for _ in range(tellings):
            lapses.apply(LeaseChange(instance, 7, "alive"))
        lapses.apply(LeaseChange(instance, 7, "expired"))
    assert lapses.due(both, True, 0.9) == []
    assert lapses.due(both, True, 1) == [(renewed, 7)]
    assert lapses.due(both, True, 10) == both


def test_an_outage_makes_all_leases_doubtful_again() -> None:
    lapses = LeaseExpiry(ended_seconds=1, missing_seconds=30, settling_seconds=10)
    lapses.due(ALIVE, True, 0)
    lapses.apply(alive())
    lapses.apply(alive())
    lapses.due(ALIVE, False, 1)
    lapses.apply(expired())
    assert lapses.due(ALIVE, True, 2) == []
    assert lapses.due(ALIVE, True, 5) == []
    assert lapses.due(ALIVE, True, 12) == ALIVE


def test_who_never_had_a_lease_gets_more_time(lapses: LeaseExpiry) -> None:
    other = (InstanceId("w2", 0), 1)
    assert lapses.due([*ALIVE, other], True, 0) == []
    assert lapses.due([*ALIVE, other], True, 29) == []
    assert lapses.due([*ALIVE, other], True, 30) == [other]


def test_the_lease_of_an_older_epoch_is_none_and_of_a_newer_one_is() -> None:
    lapses = LeaseExpiry(1, 30, 0)
    lapses.apply(alive(epoch=6))
    assert lapses.due(ALIVE, True, 0) == []
    assert lapses.due(ALIVE, True, 30) == ALIVE
    lapses.apply(alive(epoch=8))
    assert lapses.due(ALIVE, True, 99) == []


def test_a_lease_that_ended_before_it_was_seen_counts_as_ended(lapses: LeaseExpiry) -> None:
    lapses.apply(expired(epoch=None))
    lapses.due(ALIVE, True, 0)
    assert lapses.due(ALIVE, True, 1) == ALIVE


def test_nobody_is_declared_dead_while_the_broker_is_away_or_soon_after(
    lapses: LeaseExpiry,
) -> None:
    """A broker that was away for longer than a lease lives must not kill the fleet."""
    lapses.apply(expired())
    assert lapses.due(ALIVE, False, 50) == []
    assert lapses.due(ALIVE, True, 51) == []
    assert lapses.due(ALIVE, True, 60) == []
    assert lapses.due(ALIVE, True, 61) == ALIVE


def test_who_is_no_longer_alive_is_forgotten(lapses: LeaseExpiry) -> None:
    lapses.apply(expired())
    assert lapses.due([], True, 0) == []
    assert lapses.due(ALIVE, True, 5) == []


class TestLogSilence:
    """Leases are renewed and the log says nothing."""

    def test_a_log_without_a_message_is_silent_while_leases_are_renewed(self) -> None:
        silence = LogSilence(10.0)
        assert not silence.is_silent(100.0, True, 100.0)
        for at in (104.0, 108.0, 112.0):
            silence.renewed(at)
        assert not silence.is_silent(100.0, True, 109.9)
        assert silence.is_silent(100.0, True, 112.0)
        assert not silence.is_silent(111.9, True, 112.0)

    def test_without_workers_there_is_nothing_to_say(self) -> None:
        silence = LogSilence(10.0)
        silence.renewed(101.0)  # the last one left
        silence.is_silent(100.0, True, 100.0)
        assert not silence.is_silent(100.0, True, 500.0)

    def test_an_outage_counts_for_nothing(self) -> None:
        silence = LogSilence(10.0)
        assert not silence.is_silent(100.0, False, 150.0)
        assert not silence.is_silent(100.0, True, 151.0)
        silence.renewed(158.0)
        assert not silence.is_silent(100.0, True, 160.0)
        assert silence.is_silent(100.0, True, 161.0)
