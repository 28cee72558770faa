"""Pauses between tries."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.common.backoff import Backoff


class TestBackoff:
    def test_pauses_are_doubled_up_to_the_longest(self) -> None:
        backoff, now, pauses = Backoff(1.0, 5.0, 10.0), 0.0, []
        for _ in range(5):
            pauses.append(backoff.next(now))
            now += pauses[-1]
        assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
        assert backoff.num_failures == 5

    def test_they_begin_anew_after_a_calm_time_and_not_before(self) -> None:
        backoff = Backoff(1.0, 8.0, 10.0)
        assert (backoff.next(0.0), backoff.next(10.0)) == (1.0, 2.0)
        assert backoff.next(10.0 + 2.0 + 10.0) == 1.0

    def test_they_begin_anew_when_it_has_worked(self) -> None:
        backoff = Backoff(1.0, 8.0, 10.0)
        backoff.next(0.0)
        backoff.reset()
        assert (backoff.seconds_left(0.1), backoff.next(0.1)) == (0.0, 1.0)

    def test_what_is_left_of_a_pause_is_said(self) -> None:
        backoff = Backoff(2.0, 8.0, 10.0)
        assert backoff.seconds_left(0.0) == 0.0
        backoff.next(1.0)
        assert (backoff.seconds_left(1.5), backoff.seconds_left(3.0)) == (1.5, 0.0)

    @given(st.lists(st.floats(0.0, 1e3), max_size=2000))
    def test_no_number_of_failures_makes_them_longer_than_the_longest(
        self, waits: list[float]
    ) -> None:
        backoff, now, pauses = Backoff(0.1, 3.0, 1e9), 0.0, []
        for wait in waits:
            pauses.append(backoff.next(now))
            now += wait
        assert all(before <= after <= 3.0 for before, after in pairwise(pauses))

    def test_a_long_row_of_failures_overflows_nothing(self) -> None:
        backoff = Backoff(1.0, 60.0, 1e9)
        assert {backoff.next(0.0) for _ in range(5000)} == {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0}
