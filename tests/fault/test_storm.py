"""A whole fleet under random kills and pauses, and whether its judge would notice a lie."""

import json
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.bus import Message
from kvatlas.events.codec import encode
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.schemas.fleet import Trust
from testkit.builders import a_batch, a_control, stored, subject_of, up
from testkit.storm.chains import Chains
from testkit.storm.truth import Truth, TruthWriter
from testkit.storm.verifying import Ended, Log, Recovery, Verdict, judge
from testkit.storm.watching import Asker, Look, Matched, Seen

SECONDS, SEED, WORKERS = 20, 4, 3
#: of a request that met a dead router; machines that run tests run other things beside them
PATIENCE_SECONDS = 60


@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_a_storm_loses_nothing_and_what_is_called_exact_is_true(tmp_path: Path) -> None:
    arguments = ["--seconds", SECONDS, "--seed", SEED, "--workers", WORKERS, "--json"]
    more = ["--patience", PATIENCE_SECONDS, "--folder", tmp_path]
    main = Path(__file__).parent / "storm.py"
    command = [sys.executable, "-P", main, *arguments, *more]
    process = await create_subprocess_exec(*map(str, command), stdout=PIPE)
    out, _ = await process.communicate()
    found = json.loads(out.splitlines()[-1])
    broken = {name: found[name] for name in ("acked_lost", "wrong_exact", "unanswered")}
    assert broken == dict.fromkeys(broken, 0), found
    assert (found["digest_equal"], found["settled"], found["contradictions"]) == (True, True, 0)
    assert found["faults"], "nothing was broken"
    assert min(found["acked"], found["checked_exact"], found["requests"]) > 100, found
    assert process.returncode == 0


# --- the judge itself ---------------------------------------------------------------------------
# w0's engine stores blocks 0 and 1 of chain 0 (op 1, batch 1), then removes block 0 (op 2, batch 2)

CHAINS = Chains(1)
BATCHES = [
    a_batch(up(), stored(1, 2), worker="w0"),
    a_batch(stored(3), worker="w0", seq=2),
]
LOG = [Message(at, subject_of(each), encode(each), at) for at, each in enumerate(BATCHES, 1)]
EXPIRED = a_control(worker="w0")


@pytest.fixture
def truths(tmp_path: Path) -> list[Truth]:
    first, second = CHAINS.chains[0].blocks[:2]
    writer = TruthWriter(tmp_path / "w0-0.truth")
    writer.op(1, [first, second], [])
    writer.sent(1, 1, 1)
    writer.acked([(1, 1)])
    writer.op(2, [], [first])
    writer.sent(1, 2, 2)
    writer.close()
    return [Truth(tmp_path / "w0-0.truth")]


def judged(
    truths: list[Truth],
    tmp_path: Path,
    *,
    looks: list[Look] | None = None,
    answers: list[Matched] | None = None,
    unanswered: list[str] | None = None,
    log: list[Message] | None = None,
    agreements: list[dict[str, tuple[int, str]]] | None = None,
) -> Verdict:
    asker = Asker(CHAINS, "", 1, 1.0, 1.0)
    asker.answers, asker.unanswered = answers or [], unanswered or []
    url = f"sqlite:///{tmp_path}/archive.db"
    with SqlArchive(url) as archive:
        archive.append_events([], (), 0)
    ended = Ended(LOG if log is None else log, truths, url, agreements or [], 0, {}, True)
    return judge(ended, looks or [], asker, [Recovery("kill_worker", "w0", 0.0, 1.5)], CHAINS)


def a_match(stream_sequence: int, blocks: int) -> Matched:
    return Matched(stream_sequence, 0, 2, (("w0", blocks),))


def a_look(stream_sequence: int, seq: int, num_blocks: int, xor: int) -> Look:
    seen = Seen("w0", 1, seq, Trust.exact, num_blocks, xor)
    return Look("indexer-a", 0.0, stream_sequence, (seen,))


def xor(*positions: int) -> int:
    found = 0
    for position in positions:
        found ^= CHAINS.mixed[CHAINS.chains[0].blocks[position]]
    return found


def test_the_judge_lets_the_truth_pass(truths: list[Truth], tmp_path: Path) -> None:
    found = judged(
        truths,
        tmp_path,
        looks=[a_look(1, 1, 2, xor(0, 1)), a_look(2, 2, 1, xor(1))],
        answers=[a_match(1, 2), a_match(2, 0)],
    )
    assert (found.checked_exact, found.wrong_exact, found.unknown_truth) == (4, 0, 0)
    assert (found.acked, found.batches_lost_unacked) == (1, 0)


@pytest.mark.parametrize("answer", [a_match(1, 1), a_match(2, 1), a_match(2, 2)])
def test_the_judge_sees_a_match_that_was_not(
    truths: list[Truth], tmp_path: Path, answer: Matched
) -> None:
    assert judged(truths, tmp_path, answers=[answer]).wrong_exact == 1


LIES: list[Callable[[], Look]] = [
    lambda: a_look(1, 1, 2, xor(0)),
    lambda: a_look(1, 1, 1, xor(0, 1)),
    lambda: a_look(2, 1, 2, xor(0, 1)),
    lambda: a_look(1, 2, 1, xor(1)),
]


@pytest.mark.parametrize("lie", LIES)
def test_the_judge_sees_a_worker_that_was_not_so(
    truths: list[Truth], tmp_path: Path, lie: Callable[[], Look]
) -> None:
    assert judged(truths, tmp_path, looks=[lie()]).wrong_exact == 1


def test_the_judge_sees_an_exact_worker_that_is_gone(truths: list[Truth], tmp_path: Path) -> None:
    ended = Message(3, "kv.control.w0.0", encode(EXPIRED), 3)
    found = judged(truths, tmp_path, answers=[a_match(3, 0)], log=[*LOG, ended])
    assert found.wrong_exact == 1
    assert Log([*LOG, ended]).position("w0", 2) == (1, 2)


def test_the_judge_counts_what_it_cannot_know(truths: list[Truth], tmp_path: Path) -> None:
    truths[0].sent[1, 1] = None
    found = judged(truths, tmp_path, answers=[a_match(1, 2)])
    assert (found.wrong_exact, found.unknown_truth) == (0, 1)


def test_the_judge_misses_no_acknowledged_batch(truths: list[Truth], tmp_path: Path) -> None:
    # the archive of these tests is empty: what the stream has is lost there
    assert judged(truths, tmp_path).acked_lost == 1
    in_stream = judged(truths, tmp_path, log=LOG[1:])
    assert (in_stream.acked_lost, in_stream.batches_lost_unacked) == (1, 1)
    assert in_stream.examples[0].startswith("acknowledged, not in the stream")


def test_a_verdict_holds_only_if_all_of_it_does() -> None:
    good = Verdict({}, is_settled=True, digest_equal=True)
    assert good.holds
    for name in ("acked_lost", "wrong_exact", "unanswered", "contradictions"):
        assert not msgspec.structs.replace(good, **{name: 1}).holds
    for name in ("is_settled", "digest_equal"):
        assert not msgspec.structs.replace(good, **{name: False}).holds


def test_readers_are_equal_only_if_the_replay_is(truths: list[Truth], tmp_path: Path) -> None:
    empty = IndexState(ReferenceIndex()).state_digest()
    both = {"indexer-a": (0, empty), "indexer-b": (0, empty)}
    assert judged(truths, tmp_path, agreements=[both]).digest_equal
    other = "0" * 32
    wrongs: list[dict[str, tuple[int, str]]] = [
        {"indexer-a": (0, empty), "indexer-b": (0, other)},
        {"indexer-a": (0, other), "indexer-b": (0, other)},
        {"indexer-a": (1, empty), "indexer-b": (1, empty)},
        {"indexer-a": (0, empty)},
    ]
    for wrong in wrongs:
        assert not judged(truths, tmp_path, agreements=[both, wrong]).digest_equal
