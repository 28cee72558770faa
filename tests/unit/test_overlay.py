import pytest

from kvatlas.router.decision import predictions as module
from kvatlas.router.decision.predictions import PredictedBlocks
from kvatlas.schemas.ids import InstanceId

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)
LIFE_1, LIFE_2 = (W1, 1), (W2, 1)


def chain(*runs: tuple[str, int]) -> bytes:
    """Return a chain of runs of blocks; equal runs from the start give equal hashes."""
    names = [f"{name}{n}" for name, length in runs for n in range(length)]
    return b"".join(name.encode().rjust(16, b".") for name in names)


@pytest.fixture
def overlay() -> PredictedBlocks:
    return PredictedBlocks(life_seconds=2.0)


def test_a_routed_chain_is_predicted_at_its_worker(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 100)), now=0.0)
    assert overlay.predicted_beyond(chain(("a", 100)), {}, now=1.0) == {LIFE_1: 100}


@pytest.mark.parametrize("shared", [1, 7, 8, 9, 63, 64, 65, 99, 100])
def test_siblings_share_their_head_to_the_block(overlay: PredictedBlocks, shared: int) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", shared), ("b", 100 - shared)), now=0.0)
    sibling = chain(("a", shared), ("c", 50))
    assert overlay.predicted_beyond(sibling, {}, now=1.0) == {LIFE_1: shared}


def test_strangers_share_nothing(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    assert overlay.predicted_beyond(chain(("b", 10)), {}, now=1.0) == {}


def test_the_index_is_not_counted_twice(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    assert overlay.predicted_beyond(chain(("a", 10)), {W1: 4, W2: 9}, now=1.0) == {LIFE_1: 6}


def test_what_the_index_confirms_is_over(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    assert overlay.predicted_beyond(chain(("a", 12)), {W1: 10}, now=1.0) == {}
    assert (len(overlay), overlay.num_confirmed) == (0, 1)


def test_a_longer_match_of_another_branch_confirms_nothing(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 4), ("b", 6)), now=0.0)
    assert overlay.predicted_beyond(chain(("a", 4), ("c", 20)), {W1: 20}, now=1.0) == {}
    assert len(overlay) == 1


def test_a_prediction_ends_with_its_life(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    assert overlay.predicted_beyond(chain(("a", 10)), {}, now=2.0) == {}
    overlay.settle(lambda *_: False, 1)
    assert (len(overlay), overlay.num_bytes, overlay.num_expired) == (0, 0, 1)


def test_a_prediction_that_came_true_unseen_has_not_expired(overlay: PredictedBlocks) -> None:
    for number in range(4):
        overlay.expect(f"d{number}", LIFE_1, chain((f"{number}x", 10)), now=0.0)
    overlay.predicted_beyond(chain(("z", 10)), {}, now=2.0)
    asked: list[tuple[object, bytes]] = []

    def is_held(life: object, last: bytes) -> bool:
        asked.append((life, last))
        return last != chain(("2x", 10))[-16:]

    assert overlay.settle(is_held, 3)
    assert not overlay.settle(is_held, 3)
    assert asked == [(LIFE_1, chain((f"{n}x", 10))[-16:]) for n in range(4)]
    assert (overlay.num_confirmed, overlay.num_expired) == (3, 1)


def test_what_nobody_judges_is_bounded(
    overlay: PredictedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    for number in range(5):
        overlay.expect(f"d{number}", LIFE_1, chain((f"{number}x", 10)), now=3.0 * number)
    overlay.predicted_beyond(chain(("z", 10)), {}, now=60.0)
    assert overlay.num_expired == 3
    assert not overlay.settle(lambda *_: True, 9)
    assert overlay.num_confirmed == 2


def test_a_failed_request_takes_its_prediction_back(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    overlay.expect("d2", LIFE_1, chain(("a", 4)), now=0.0)
    overlay.withdraw("d1")
    overlay.withdraw("d1")
    assert overlay.predicted_beyond(chain(("a", 10)), {}, now=1.0) == {LIFE_1: 4}


def test_an_older_longer_prediction_survives_a_younger_one(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 100)), now=0.0)
    overlay.expect("d2", LIFE_1, chain(("a", 10)), now=0.1)
    assert overlay.predicted_beyond(chain(("a", 100)), {}, now=1.0) == {LIFE_1: 100}
    overlay.withdraw("d2")
    assert overlay.predicted_beyond(chain(("a", 100)), {}, now=1.0) == {LIFE_1: 100}


def test_each_life_of_an_instance_has_its_own(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", (W1, 1), chain(("a", 10)), now=0.0)
    overlay.expect("d2", (W1, 2), chain(("a", 5)), now=0.0)
    assert overlay.predicted_beyond(chain(("a", 10)), {}, now=1.0) == {(W1, 1): 10, (W1, 2): 5}


def test_nothing_is_predicted_without_a_life(overlay: PredictedBlocks) -> None:
    off = PredictedBlocks(life_seconds=0.0)
    off.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    assert len(off) == 0


def test_a_prompt_without_a_full_block_predicts_nothing(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, b"", now=0.0)
    assert (len(overlay), overlay.predicted_beyond(b"", {}, now=0.0)) == (0, {})


def test_the_oldest_goes_when_there_are_too_many(
    overlay: PredictedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    for n, life in enumerate([LIFE_1, LIFE_2, (InstanceId("w3", 0), 1)]):
        overlay.expect(f"d{n}", life, chain(("a", 10)), now=0.0)
    assert LIFE_1 not in overlay.predicted_beyond(chain(("a", 10)), {}, now=0.0)
    assert (len(overlay), overlay.num_dropped) == (2, 1)


def test_the_oldest_goes_when_they_are_too_large(
    overlay: PredictedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 200)
    overlay.expect("d1", LIFE_1, chain(("a", 10)), now=0.0)
    overlay.expect("d2", LIFE_2, chain(("a", 10)), now=0.0)
    assert overlay.num_bytes == 160


def test_an_entry_is_small_however_long_its_chain_is(overlay: PredictedBlocks) -> None:
    overlay.expect("d1", LIFE_1, chain(("a", 8_192)), now=0.0)
    assert len(module._marks(8_192)) < 60
