"""Workers from which nothing comes back, as a router sees them by what is reported."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvatlas.router.decision.overdue import (
    MAX_PROBE_SECONDS,
    MAX_WATCHED,
    PROBE_REQUESTS,
    PROBE_SECONDS,
    OverdueRequests,
)
from kvatlas.schemas.ids import InstanceId

W0, W1, W2 = InstanceId("w0", 0), InstanceId("w1", 0), InstanceId("w2", 0)
NEW = b"n" * 16


class Fleet:
    """Workers of which some answer, and clients of which some report."""

    def __init__(self, least_seconds: float = 10.0, factor: float = 4.0) -> None:
        self.overdue = OverdueRequests(least_seconds, factor)
        self.now = 1000.0
        self.hung: set[InstanceId] = set()
        #: of each worker, how many of its requests are reported
        self.share: dict[InstanceId, float] = {}
        self.held: set[tuple[InstanceId, bytes]] = set()
        self._random = random.Random(7)
        self._numbers: Iterator[int] = iter(range(1, 10**9))

    def send(self, *instances: InstanceId, epoch: int = 1, new_block: bytes = b"") -> list[str]:
        """Send a request to each; those that are reported are so 0.2 s later."""
        self.overdue.look(self.now, lambda who, block: (who, block) in self.held)
        names = []
        for instance in instances:
            name = f"d{next(self._numbers)}"
            self.overdue.routed(name, instance, epoch, 100.0, self.now, new_block)
            names.append(name)
        for name, instance in zip(names, instances, strict=True):
            is_reported = self._random.random() < self.share.get(instance, 1.0)
            if instance not in self.hung and is_reported:
                self.overdue.reported(name, self.now + 0.2)
        return names

    def go_on(self, seconds: int, *instances: InstanceId, new_block: bytes = b"") -> None:
        """Send a request to each of them each second."""
        for _ in range(seconds):
            self.send(*instances, new_block=new_block)
            self.now += 1.0
        self.send()

    @property
    def suspects(self) -> set[InstanceId]:
        """Those that are left out, or are due to be tried again."""
        return {who for who in (W0, W1, W2) if self.overdue.reason(who, self.now)}


def test_a_worker_that_answers_no_more_is_left_out_and_said_why() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.hung.add(W0)
    fleet.go_on(14, W0, W1)
    assert set(fleet.overdue.left_out(fleet.now)) == {W0}
    reason = fleet.overdue.reason(W0, fleet.now)
    assert reason.startswith("overdue: no answer reported to ")
    assert fleet.overdue.num_suspected == 1


def test_it_is_tried_again_now_and_then_and_taken_back_when_it_answers() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.hung.add(W0)
    tried: list[float] = []
    for _ in range(600):
        fleet.send()
        is_open = W0 not in fleet.overdue.left_out(fleet.now)
        fleet.send(*([W0] if is_open else []), W1)
        tried += [fleet.now] if is_open else []
        fleet.now += 1.0
    assert fleet.suspects == {W0}
    pauses = [after - before for before, after in pairwise(tried) if after - before > 1.0]
    assert len(pauses) > 10
    assert pauses[1:] == [float(PROBE_REQUESTS)] * len(pauses[1:])
    fleet.hung.clear()
    fleet.now += MAX_PROBE_SECONDS
    assert not fleet.overdue.left_out(fleet.now)
    fleet.send(W0)
    assert fleet.suspects == set()


@pytest.mark.parametrize(
    ("num_elsewhere", "pause"), [(200, PROBE_SECONDS), (2, 10.0), (0, MAX_PROBE_SECONDS)]
)
def test_a_suspect_gets_a_small_part_of_few_and_of_many_requests(
    num_elsewhere: int, pause: float
) -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.hung.add(W0)
    fleet.go_on(14, W0, W1)
    fleet.now += MAX_PROBE_SECONDS
    began = fleet.now
    fleet.send(W0)
    while W0 in fleet.overdue.left_out(fleet.now):
        fleet.send(*[W1] * num_elsewhere)
        fleet.now += 1.0
    assert fleet.now - began == pause


@pytest.mark.parametrize("seconds", [12, 600])
def test_one_honest_client_takes_a_healthy_worker_back_however_many_never_report(
    seconds: int,
) -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    for _ in range(seconds):  # another client asks for W0 only and sends nothing there
        left_out = fleet.overdue.left_out(fleet.now)
        for number in range(50):
            to = W1 if W0 in left_out else W0
            fleet.overdue.routed(f"a{fleet.now}-{number}", to, 1, 100.0, fleet.now)
        fleet.go_on(1, W1)
    assert fleet.suspects == {W0}
    stopped_at = fleet.now
    while fleet.suspects:
        fleet.send(W1 if W0 in fleet.overdue.left_out(fleet.now) else W0)
        fleet.now += 0.25
    assert fleet.now - stopped_at <= PROBE_SECONDS + 0.25


def test_an_answer_to_another_router_clears_a_suspect() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.share = {W0: 0.0}
    fleet.go_on(14, W0, W1)
    assert fleet.suspects == {W0}
    fleet.overdue.answered(W0, fleet.now)
    assert fleet.suspects == set()
    fleet.overdue.answered(W2, fleet.now)  # never routed to from here
    for _ in range(300):
        fleet.go_on(1, W0, W1)
        fleet.overdue.answered(W0, fleet.now)
    assert fleet.overdue.num_suspected == 1


def test_requests_of_other_models_are_no_reason_to_try_a_suspect() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.hung.add(W0)
    fleet.go_on(14, W0, W1)
    fleet.now += MAX_PROBE_SECONDS
    fleet.send(W0)
    for number in range(10 * PROBE_REQUESTS):
        fleet.overdue.routed(f"m{number}", W2, 1, 100.0, fleet.now, model="another")
    fleet.now += PROBE_SECONDS
    assert set(fleet.overdue.left_out(fleet.now)) == {W0}


def test_a_late_report_clears_a_suspect() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.hung.add(W0)
    (late,) = fleet.send(W0)
    fleet.go_on(14, W0, W1)
    assert fleet.suspects == {W0}
    fleet.overdue.reported(late, fleet.now)
    assert fleet.suspects == set()


@pytest.mark.parametrize("new_block", [b"", NEW])
def test_a_fleet_whose_clients_never_report_suspects_no_worker(new_block: bytes) -> None:
    fleet = Fleet()
    fleet.share = dict.fromkeys((W0, W1, W2), 0.0)
    fleet.go_on(500, W0, W1, W2, new_block=new_block)
    assert fleet.overdue.num_suspected == 0
    assert fleet.overdue.num_overdue > 1000


def test_reports_that_end_everywhere_condemn_no_worker() -> None:
    fleet = Fleet()
    fleet.go_on(50, W0, W1)
    fleet.share = {W0: 0.0, W1: 0.0}
    fleet.go_on(200, W0, W1)
    assert fleet.suspects == set()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_clients_of_which_only_some_report_condemn_no_worker(share: float) -> None:
    fleet = Fleet()
    fleet.share = {W0: share, W1: share, W2: 1.0}
    fleet.go_on(1000, W0, W1, W2)
    assert fleet.overdue.num_suspected == 0


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 45), (0.2, 120)])
def test_nor_do_they_keep_a_hung_worker_from_being_found(share: float, seconds: int) -> None:
    fleet = Fleet()
    fleet.share = {W0: share, W1: share}
    fleet.go_on(300, W0, W1)
    fleet.hung.add(W0)
    fleet.go_on(seconds, W0, W1)
    assert fleet.suspects == {W0}


def test_a_worker_whose_own_clients_never_reported_is_not_measured_by_others() -> None:
    fleet = Fleet()
    fleet.share = {W0: 0.0}
    fleet.go_on(500, W0, W1)
    assert fleet.overdue.num_suspected == 0


def test_blocks_that_appear_are_an_answer_too() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.share = {W0: 0.0}  # its clients have changed
    fleet.held.add((W0, NEW))
    fleet.go_on(300, W0, W1, new_block=NEW)
    assert fleet.overdue.num_suspected == 0


def test_a_long_queue_is_no_hang() -> None:
    fleet = Fleet()
    for number in range(40):
        fleet.overdue.routed(f"q{number}", W0, 1, 30_000.0, fleet.now)
        fleet.overdue.routed(f"f{number}", W1, 1, 100.0, fleet.now)
        fleet.overdue.reported(f"f{number}", fleet.now + 0.2)
        if number == 0:
            fleet.overdue.reported("q0", fleet.now + 0.2)
    fleet.now += 4 * 30.0 - 1.0
    fleet.send()
    assert fleet.overdue.num_overdue == 0


def test_clients_that_report_the_end_only_are_waited_for_as_long_as_ends_take() -> None:
    fleet = Fleet()
    names: list[tuple[float, str]] = []
    for second in range(600):
        while names and names[0][0] + 20.0 <= fleet.now:  # each answer takes 20 s
            fleet.overdue.reported(names.pop(0)[1], fleet.now)
        fleet.overdue.look(fleet.now, lambda *_: False)
        for instance in (W0, W1):
            fleet.overdue.routed(f"{instance}{second}", instance, 1, 100.0, fleet.now)
            names.append((fleet.now, f"{instance}{second}"))
        fleet.now += 1.0
        assert fleet.suspects == set()


def test_another_incarnation_begins_without_a_past() -> None:
    fleet = Fleet()
    fleet.go_on(20, W0, W1)
    fleet.hung.add(W0)
    fleet.go_on(14, W0, W1)
    assert fleet.suspects == {W0}
    fleet.send(W0, epoch=2)
    assert fleet.suspects == set()
    fleet.go_on(60, W1)
    assert fleet.suspects == set()


def test_memory_is_bounded() -> None:
    overdue = OverdueRequests(10.0, 4.0)
    for number in range(MAX_WATCHED + 50):
        overdue.routed(f"d{number}", InstanceId(f"w{number}", 0), 1, 1.0, 0.0)
    assert len(overdue) == MAX_WATCHED
