"""An archive that contradicts itself is told; one that does not is not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.cli.commands import run_command
from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.archive.port import BatchKey, DecisionRecord, EventRecord, Hole
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.bus import Message
from kvatlas.hindsight.check import CheckReport, check_archive, check_json, check_lines
from kvatlas.indexer import ReferenceIndex
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import (
    ControlRecord,
    Digest,
    EventBatch,
    Resync,
    SourceDegraded,
)
from kvatlas.schemas.routing import (
    DECISION_VERSION,
    Candidate,
    CandidateScore,
    ChainGroup,
    Decision,
    Plan,
    Question,
    encode_decision,
)
from testkit.builders import (
    a_batch,
    a_control,
    digest,
    hashes,
    inventory,
    messages,
    stored,
    subject_of,
    up,
)

LOG: list[EventBatch | ControlRecord] = [
    a_batch(up(), stored(1, 2)),
    a_batch(up(), stored(1), worker="w2"),
    a_batch(stored(3, parent=2), digest(1, 2, 3), seq=2),
    a_control(worker="w2"),
    a_batch(stored(4, parent=3), seq=3),
]


def an_archive(
    log: list[EventBatch | ControlRecord],
    *decisions: Decision,
    holes: tuple[Hole, ...] = (),
    without: tuple[int, ...] = (),
    cursor: int | None = None,
) -> MemoryArchive:
    archive = MemoryArchive()
    lost = {n for hole in holes for n in range(hole.first, hole.last + 1)} | set(without)
    records = [
        EventRecord(message, _key(item))
        for item, message in zip(log, messages(log), strict=True)
        if message.stream_sequence not in lost
    ]
    archive.append_events(records, holes, len(log) if cursor is None else cursor)
    records_of_decisions = [
        DecisionRecord(Message(at, "kv.decisions.model", encode_decision(each), at), each.id)
        for at, each in enumerate(decisions, 1)
    ]
    archive.append_decisions(records_of_decisions, (), len(decisions))
    return archive


def _key(item: EventBatch | ControlRecord) -> BatchKey | None:
    if not isinstance(item, EventBatch):
        return None
    return BatchKey(item.worker, item.rank, item.epoch, item.seq)


def a_decision(
    stream_sequence: int,
    held: dict[str, int],
    *,
    name: str = "1",
    trust: Trust = Trust.exact,
    chain: bytes = hashes(1, 2, 3, 4),
    scored: int | None = None,
) -> Decision:
    """A decision about the chain 1, 2, 3, 4: worker -> blocks held; `scored` differs from them."""
    candidates = tuple(
        Candidate(worker, 0, trust, 0, 4, 0, (blocks, 0, 0, 0, 0), 0, 0, 0.0, 0.0, 1.0, 1.0)
        for worker, blocks in held.items()
    )
    scores = tuple(
        CandidateScore(
            each.worker,
            0,
            "http://w",
            trust,
            4 * (sum(each.held) if scored is None else scored),
            {},
            1.0,
            {},
        )
        for each in candidates
    )
    return Decision(
        v=DECISION_VERSION,
        id=f"{'0' * 12}router{name:0>8}",
        ts_ns=1,
        stream_sequence=stream_sequence,
        policy="predicted_ttft",
        model="model",
        prompt_tokens=16,
        chosen=scores[0],
        candidates=scores,
        num_candidates=len(scores),
        plan=Plan(4, 0, (), 16),
        reasons=(),
        settings={},
        question=Question(16, 0, 1, candidates),
        groups=(ChainGroup("model", 4, "xxh3_128", chain=chain),),
    )


def check(archive: MemoryArchive) -> CheckReport:
    return check_archive(archive, ReferenceIndex)


def the_contradiction(archive: MemoryArchive, name: str) -> str:
    """Return the only contradiction, which has to be of this check."""
    report = check(archive)
    found = {each.name: each.examples for each in report.checks if each.num_contradictions}
    assert list(found) == [name]
    assert (report.num_contradictions, len(found[name])) == (1, 1)
    return found[name][0]


# --- nothing wrong ------------------------------------------------------------------------------


def test_a_sound_archive_has_no_contradictions() -> None:
    decisions = [a_decision(1, {"w1": 2}), a_decision(5, {"w1": 4}, name="2")]
    report = check(an_archive(LOG, *decisions))
    assert report.num_contradictions == 0
    assert {each.name: each.num_checked for each in report.checks} == {
        "order": 7,
        "batches": 4,
        "digests": 1,
        "decisions": 2,
        "rows": 7,
    }
    assert (report.stream_sequence, report.num_holes, report.num_absent) == (5, 0, 0)


def test_a_new_epoch_begins_its_count_anew() -> None:
    log = [*LOG, a_batch(up(), stored(9), digest(9), epoch=2), a_batch(seq=7)]
    assert check(an_archive(log)).num_contradictions == 0


def test_a_match_is_what_the_engine_reuses_of_what_it_holds() -> None:
    log = [a_batch(up(num_unreusable_trailing_blocks=1), stored(1, 2)), *LOG[1:]]
    right = an_archive(log, a_decision(5, {"w1": 3}))
    assert check(right).num_contradictions == 0
    text = the_contradiction(an_archive(log, a_decision(5, {"w1": 4})), "decisions")
    assert "w1/0 matches 16 tokens, in the fold 12" in text


# --- order --------------------------------------------------------------------------------------


def test_a_message_within_a_hole_is_a_contradiction() -> None:
    archive = an_archive(LOG)
    archive.append_events([], [Hole(4, 4)], 5)
    text = the_contradiction(archive, "order")
    assert text == "message 4 is there, in the hole from 4 to 4"


def test_a_message_beyond_the_cursor_is_a_contradiction() -> None:
    text = the_contradiction(an_archive(LOG, cursor=4), "order")
    assert text == "message 5 is beyond the cursor, 4"


def test_an_index_that_goes_back_is_a_contradiction() -> None:
    decisions = [a_decision(5, {"w1": 4}), a_decision(3, {"w1": 3}, name="2")]
    text = the_contradiction(an_archive(LOG, *decisions), "order")
    assert text.startswith("the index of router router went back from 5 to 3, decision ")


def test_messages_out_of_order_are_a_contradiction() -> None:
    class Shuffled(MemoryArchive):
        def read_events(self, first: int, last: int) -> Iterator[Message]:
            found = super().read_events(first, last)
            yield from sorted(found, key=lambda message: message.stream_sequence == 4)

    archive = Shuffled()
    archive.append_events([EventRecord(m, None) for m in messages(LOG)], (), 5)
    assert the_contradiction(archive, "order") == "message 4 comes after 5"


# --- batches ------------------------------------------------------------------------------------


def test_a_batch_that_is_there_twice_is_a_contradiction() -> None:
    archive = an_archive(LOG)
    again = Message(6, subject_of(LOG[2]), messages(LOG)[2].payload, 6)
    archive.append_events([EventRecord(again, None)], (), 6)
    text = the_contradiction(archive, "batches")
    assert text == "batch 2 of w1/0, epoch 1, is there twice, at 6"


def test_a_batch_that_is_missing_without_a_word_is_a_contradiction() -> None:
    text = the_contradiction(an_archive(LOG, without=(3,)), "batches")
    assert text == "w1/0 epoch 1 lacks 2 to 2 without a word, at 5"


def test_an_epoch_that_lacks_its_beginning_is_a_contradiction() -> None:
    log: list[EventBatch | ControlRecord] = [*LOG, a_batch(stored(9), epoch=2, seq=2)]
    text = the_contradiction(an_archive(log), "batches")
    assert text == "w1/0 epoch 2 lacks 1 to 1 without a word, at 6"


def test_a_loss_that_the_instance_has_told_is_none() -> None:
    log = [*LOG, a_batch(Resync(4, 6), seq=7), a_batch(inventory(1, as_of=7), digest(1), seq=8)]
    report = check(an_archive(log))
    assert report.num_contradictions == 0


def test_a_loss_that_is_told_in_part_is_a_contradiction() -> None:
    log: list[EventBatch | ControlRecord] = [*LOG, a_batch(Resync(5, 6), seq=7)]
    text = the_contradiction(an_archive(log), "batches")
    assert text == "w1/0 epoch 1 lacks 4 to 6 without a word, at 6"


def test_a_batch_behind_its_successors_is_a_contradiction() -> None:
    log = [LOG[0], a_batch(stored(9), seq=3), a_batch(Resync(2, 2), seq=4), a_batch(seq=2)]
    text = the_contradiction(an_archive(log), "batches")
    assert text == "batch 2 of w1/0, epoch 1, comes after its successors, at 4"


def test_what_lies_in_a_hole_is_missing_with_a_word() -> None:
    report = check(an_archive(LOG, holes=(Hole(3, 3),)))
    assert (report.num_contradictions, report.num_holes) == (0, 1)
    assert report.checks[1].num_skipped == 1


def test_a_hole_excuses_one_gap_of_each_and_no_more() -> None:
    log = [*LOG, a_batch(seq=5)]
    text = the_contradiction(an_archive(log, holes=(Hole(3, 3),)), "batches")
    assert text == "w1/0 epoch 1 lacks 4 to 4 without a word, at 6"


def test_a_message_that_cannot_be_read_excuses_its_worker() -> None:
    archive = an_archive(LOG, without=(3,))
    unreadable = Message(3, subject_of(LOG[2]), b"\xc1", 3)
    archive.append_events([EventRecord(unreadable, None)], (), 5)
    report = check(archive)
    assert report.num_contradictions == 0
    assert report.checks[1].num_skipped == 2


# --- digests ------------------------------------------------------------------------------------


def test_a_digest_that_an_exact_instance_contradicts_itself_by_is_told() -> None:
    log: list[EventBatch | ControlRecord] = [*LOG, a_batch(digest(1, 2), seq=4)]
    text = the_contradiction(an_archive(log), "digests")
    assert text == (
        "w1/0 was exact and holds 2 blocks in hbm by its own digest, 4 in the fold, at 6"
    )


def test_blocks_that_differ_in_equal_number_are_told() -> None:
    wrong = Digest(Tier.hbm, 4, TierDigest(4, 12345).xor)
    log: list[EventBatch | ControlRecord] = [*LOG, a_batch(wrong, seq=4)]
    assert "4 in the fold" in the_contradiction(an_archive(log), "digests")


def test_who_is_in_doubt_may_differ() -> None:
    log = [
        *LOG,
        a_batch(SourceDegraded("missed something"), digest(1), seq=4),
        a_batch(digest(2), seq=5),
    ]
    report = check(an_archive(log))
    assert report.num_contradictions == 0
    assert (report.checks[2].num_checked, report.checks[2].num_skipped) == (1, 2)


# --- decisions ----------------------------------------------------------------------------------


def test_an_exact_match_that_the_fold_contradicts_is_told() -> None:
    archive = an_archive(LOG, a_decision(3, {"w1": 4}))
    text = the_contradiction(archive, "decisions")
    assert text.endswith("at 3: w1/0 matches 16 tokens, in the fold 12")


def test_a_match_of_nothing_is_looked_at_as_well() -> None:
    text = the_contradiction(an_archive(LOG, a_decision(3, {"w1": 0})), "decisions")
    assert text.endswith("w1/0 matches 0 tokens, in the fold 12")


def test_a_score_that_differs_from_its_candidate_is_told() -> None:
    archive = an_archive(LOG, a_decision(3, {"w1": 3}, scored=2))
    text = the_contradiction(archive, "decisions")
    assert text.endswith("w1/0 matches 8 tokens, in the fold 12")


@pytest.mark.parametrize(("worker", "found"), [("w2", "gone"), ("w9", "unknown")])
def test_who_is_called_exact_and_is_not_is_told(worker: str, found: str) -> None:
    text = the_contradiction(an_archive(LOG, a_decision(5, {worker: 0})), "decisions")
    assert text.endswith(f"{worker}/0 is called exact, the fold has it {found}")


def test_only_exact_candidates_have_to_be_right() -> None:
    archive = an_archive(LOG, a_decision(3, {"w1": 4}, trust=Trust.degraded))
    assert check(archive).num_contradictions == 0


def test_what_cannot_be_compared_is_skipped() -> None:
    salted = a_decision(3, {"w1": 4}, chain=b"")
    newer = a_decision(99, {"w1": 4}, name="2")
    report = check(an_archive(LOG, salted, newer))
    assert report.num_contradictions == 0
    assert (report.checks[3].num_checked, report.checks[3].num_skipped) == (0, 2)


def test_behind_a_hole_of_the_archive_only_who_is_exact_there_is_compared() -> None:
    archive = an_archive(LOG, a_decision(5, {"w1": 4}), holes=(Hole(3, 3),))
    report = check(archive)
    assert report.num_contradictions == 0
    assert report.checks[3].num_skipped == 1


# --- what people see ----------------------------------------------------------------------------


def test_what_is_skipped_is_told_with_its_reasons() -> None:
    salted = a_decision(3, {"w1": 4}, chain=b"")
    newer = a_decision(99, {"w1": 4}, name="2")
    assert check_lines(check(an_archive(LOG, salted, newer)))[4] == (
        "ok  decisions  0 exact candidates of decisions, 2 skipped (1 prompts whose blocks are not"
        " recorded, such as salted ones; 1 decisions by an index that is newer than the archive),"
        " 0 contradictions"
    )


def test_batches_that_do_not_count_in_a_replay_are_told_apart() -> None:
    log: list[EventBatch | ControlRecord] = [a_batch(up(), epoch=2), a_batch(up(), epoch=1)]
    told = check_lines(check(an_archive(log)))[2]
    assert told == (
        "ok  batches    2 batches in the log (1 counted; 1 came after the end of their epoch, or"
        " twice), 0 contradictions"
    )


def test_a_report_is_a_line_a_check_and_json() -> None:
    report = check(an_archive(LOG, a_decision(3, {"w1": 4})))
    lines = check_lines(report)
    assert [line[:14] for line in lines[1:5]] == [
        "ok  order     ",
        "ok  batches   ",
        "ok  digests   ",
        "BAD decisions ",
    ]
    assert lines[5].startswith("      decision ")
    content = json.loads(check_json(report))
    assert (content["ok"], content["checks"][3]["num_contradictions"]) == (False, 1)


def test_the_command_ends_with_1_on_a_contradiction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, without, status in (("good", (), 0), ("bad", (3,), 1)):
        url = f"sqlite:///{tmp_path}/{name}.db"
        with SqlArchive(url) as archive:
            records = [
                EventRecord(message, _key(item))
                for item, message in zip(LOG, messages(LOG), strict=True)
                if message.stream_sequence not in without
            ]
            archive.append_events(records, (), len(LOG))
        assert run_command(["check", "--archive", url, "--json"]) == status
        last_line = capsys.readouterr().out.splitlines()[-1]
        assert json.loads(last_line)["ok"] is (status == 0)


# --- the page -----------------------------------------------------------------------------------


def test_the_page_on_consistency_names_tests_that_are_there() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/consistency.md").read_text()
    tests = re.findall(r"`([a-z]+/test_\w+\.py)?::(test_\w+)`", page)
    assert len(tests) > 20
    file = ""
    for named, test in tests:
        file = named or file
        assert f"def {test}(" in (root / "tests" / file).read_text(), f"{file}::{test}"
    for path in re.findall(r"`([a-z]+/\w+\.(?:py|txt))`", page):
        assert (root / "tests" / path).is_file(), path
