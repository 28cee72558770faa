from kvatlas.router.decision.failures import Failures
from kvatlas.schemas.ids import InstanceId

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)


def test_a_failure_is_avoided_for_a_while() -> None:
    failures = Failures(1, 30)
    failures.failed(W1, 10)
    assert failures.avoided(10.9) == {W1}
    assert failures.avoided(11) == frozenset()


def test_failures_under_way_together_count_once() -> None:
    failures = Failures(1, 30)
    for now in (10, 10.2, 10.9):
        failures.failed(W1, now)
    assert failures.avoided(11) == frozenset()


def test_failing_again_doubles_the_pause_up_to_the_maximum() -> None:
    failures = Failures(1, 3)
    failures.failed(W1, 0)
    failures.failed(W1, 1)
    assert failures.avoided(2.9) == {W1}
    failures.failed(W1, 3)
    assert failures.avoided(5.9) == {W1}
    assert failures.avoided(6) == frozenset()


def test_a_failure_long_ago_does_not_count() -> None:
    failures = Failures(1, 3)
    failures.failed(W1, 0)
    failures.failed(W1, 100)
    assert failures.avoided(101) == frozenset()


def test_a_success_ends_it_and_others_are_not_concerned() -> None:
    failures = Failures(1, 30)
    failures.failed(W1, 0)
    failures.failed(W2, 0)
    failures.succeeded(W1)
    assert failures.avoided(0.5) == {W2}
