"""What recordings come to: real captures, hand-made ones, and the faults of facts/peers.md."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored, Digest, Inventory, KvEvent
from kvatlas.worker_hooks.recordings.captures import Frame, jsonable, read_capture
from kvatlas.worker_hooks.recordings.decoding import DecodeOptions, Decoding, names_of
from kvatlas.worker_hooks.recordings.redaction import Redactor
from kvatlas.worker_hooks.recordings.stream_decoding import StreamDecoding
from testkit.builders import up

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "captures"
GOLDEN = ROOT / "tests" / "golden" / "captures"
ENGINE_OF = {"trtllm_pull.json": "trtllm", "mooncake.jsonl": "mooncake", "lmcache.jsonl": "lmcache"}
TIER_OF = {"GPU": "hbm", "PEERSTORE": "other"}


def decoded(
    frames: Iterable[Frame], engine: str = "vllm", **options: Any
) -> tuple[dict[str, Any], list[str]]:
    decoding = Decoding(list(frames), DecodeOptions(engine=engine, **options))
    story = list(decoding.story())
    return decoding.report(), story


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    fields = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    rest = {"token_ids": tokens, "block_size": 2, "lora_id": None, "medium": "GPU"}
    return {**fields, **rest, "lora_name": None, **more}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def frame(sequence: int, *events: dict[str, Any], rank: int | None = 0, topic: str = "") -> Frame:
    return Frame(msgspec.msgpack.encode([1.0, list(events), rank]), topic, sequence)


def held(report: dict[str, Any], tier: str = "hbm") -> list[str]:
    (ranks,) = report["workers"].values()
    groups = ranks.get("0", {})
    found: list[str] = groups.get("0", {}).get(tier, {}).get("engine_hashes", [])
    return found


def expected_captures() -> dict[str, Any]:
    file = REAL / "expected.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def frames_until(name: str, suffix: str) -> list[Frame]:
    """Return a capture's frames; the scenarios of one run follow one another."""
    folder, scenario = name.split("/")
    parts = sorted((REAL / folder).glob(f"0[1-7]*{suffix}"))
    if not scenario[:1].isdigit() or not parts:
        return read_capture(REAL / f"{name}{suffix}").frames
    wanted = [part for part in parts if part.name <= f"{scenario}{suffix}"]
    return [one for part in wanted for one in read_capture(part).frames]


@pytest.mark.skipif(not REAL.exists(), reason="the real captures are not here")
@pytest.mark.parametrize("suffix", [".kvcap", ".jsonl"])
@pytest.mark.parametrize("name", expected_captures())
def test_a_real_capture_comes_to_exactly_what_the_engine_held(name: str, suffix: str) -> None:
    expected = expected_captures()[name]
    frames = frames_until(name, suffix)
    report, _ = decoded(frames)
    wanted: dict[str, Any] = {}
    for medium, groups in expected["resident"].items():
        for group, hashes in groups.items():
            told = {"blocks": len(hashes), "engine_hashes": hashes}
            wanted.setdefault(group, {})[TIER_OF[medium]] = told
    (ranks,) = report["workers"].values()
    assert ranks == {"0": wanted}
    own, _ = decoded(read_capture(REAL / f"{name}{suffix}").frames)
    counts = own["counts"]
    assert counts["stored"] == expected["stored_hashes"]
    assert counts["removed"] == expected["removed_hashes"]
    assert counts["cleared"] == expected["cleared_events"]
    assert counts["stored_events"] == expected["stored_events"]
    assert counts["gaps"] == 0
    redactor = Redactor()
    redacted = [one._replace(payload=redactor.payload(one.payload)) for one in frames]
    assert decoded(redacted)[0] == report


@pytest.mark.parametrize("name", ENGINE_OF)
def test_a_golden_capture_comes_to_what_is_written_beside_it(name: str) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())[name]
    frames = read_capture(GOLDEN / name).frames
    report, _ = decoded(frames, ENGINE_OF[name], file_stem=Path(name).stem)
    assert report == expected


def test_f20_a_block_stored_three_times_goes_with_the_third_removal() -> None:
    frames = [frame(n, stored([7], [1, 2])) for n in range(3)]
    frames += [frame(3, removed(7)), frame(4, removed(7))]
    report, _ = decoded(frames)
    assert held(report) == ["0000000000000007"]
    assert report["counts"]["duplicates"] == 2
    assert held(decoded([*frames, frame(5, removed(7))])[0]) == []


def test_f21_a_reannouncement_is_counted_and_a_clear_ends_it() -> None:
    again = [frame(0, stored([7], [1, 2])), frame(1, stored([7], [1, 2])), frame(2, removed(7))]
    assert held(decoded(again)[0]) == ["0000000000000007"]
    assert held(decoded([*again, frame(3, {"type": "AllBlocksCleared"})])[0]) == []


def test_f25_f26_an_orphan_waits_for_its_parent_and_is_held_meanwhile() -> None:
    report, story = decoded([frame(0, stored([2], [3, 4], 1)), frame(1, stored([1], [1, 2]))])
    assert report["counts"]["orphans_parked"] == 1
    assert held(report) == ["0000000000000001", "0000000000000002"]
    assert "waits for its parent" in story[1]


def test_f60_a_block_that_moves_is_in_its_new_tier_only() -> None:
    blocks = [{"block_hash": 1, "tokens": [{"token_id": 5}] * 2, "cache_level": 0}]
    store = {"event_id": 0, "data": {"type": "stored", "parent_hash": None, "blocks": blocks}}
    move = {"type": "updated", "block_hash": 1, "cache_level": {"old_value": 0, "new_value": 1}}
    frames = [
        Frame(msgspec.json.encode(one), "t", n)
        for n, one in enumerate([store, {"event_id": 1, "data": move}])
    ]
    report, _ = decoded(frames, "trtllm")
    assert held(report) == []
    assert held(report, "dram") == ["0000000000000001"]


def test_a_sequence_that_goes_back_is_a_new_engine() -> None:
    frames = [frame(0, stored([1], [1, 2])), frame(1, stored([2], [3, 4]))]
    report, story = decoded([*frames, frame(0, stored([9], [5, 6]))])
    assert held(report) == ["0000000000000009"]
    assert any("restarted" in line for line in story)


def test_a_gap_is_counted_and_nothing_is_forgotten() -> None:
    report, story = decoded([frame(0, stored([1], [1, 2])), frame(4, stored([2], [3, 4]))])
    assert report["counts"]["gaps"] == 1
    assert any("3 missing" in line for line in story)
    assert len(held(report)) == 2


def test_f57_ranks_have_sequences_and_blocks_of_their_own() -> None:
    frames = [frame(0, stored([1], [1, 2])), frame(0, stored([1], [1, 2]), rank=1)]
    report, _ = decoded([*frames, frame(1, removed(1), rank=1)])
    assert held(report) == ["0000000000000001"]
    assert report["counts"]["gaps"] == 0


def test_several_topics_are_several_workers_and_f41_a_model_may_have_an_at() -> None:
    frames = [frame(0, stored([1], [1, 2]), topic=f"kv@{pod}@org/m@v1") for pod in ("a", "b")]
    assert set(decoded(frames)[0]["workers"]) == {"a", "b"}
    assert set(decoded(frames, worker="mine")[0]["workers"]) == {"mine"}
    assert names_of("kv@10.0.0.1:80@org/m@v1") == ("10.0.0.1:80", "org/m@v1")
    assert names_of("other") == ("other", "")


def test_f39_a_payload_that_is_no_batch_is_counted() -> None:
    report, story = decoded([Frame(b"\xc1"), frame(0, stored([1], [1, 2]))])
    assert report["counts"]["rejected"] == {"malformed_batch": 1}
    assert any("malformed_batch" in line for line in story)


def test_f51_a_block_of_another_size_is_held_without_a_name() -> None:
    report, _ = decoded([frame(0, stored([1], [1, 2, 3, 4], block_size=4))], block_tokens=2)
    assert held(report) == ["0000000000000001"]
    assert report["counts"]["rejected"] == {"block_size": 1}


@pytest.mark.parametrize("engine", ["mooncake", "lmcache", "trtllm"])
def test_values_as_deep_as_the_stack_cost_their_batch_only(engine: str) -> None:
    """Depths that a reader of JSON just takes and the code behind it does not."""
    for depth in range(800, 1000):
        value = '{"key": ' * depth + "1" + "}" * depth
        fields = f'"event_type": {value}, "data": {{"type": {value}}}'
        if engine == "lmcache":
            fields = f'"event_type": "store", "tier": "l1", "entries": [{value}]'
        good = frame(0, stored([1], [1, 2]))
        report, _ = decoded([Frame(f"{{{fields}}}".encode()), good], engine)
        assert engine == "lmcache" or report["counts"]["rejected"]


# --- recordings of our own log ------------------------------------------------------------------

ROOT_HASH = bytes(16)


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def row(seq: int, *events: KvEvent, epoch: int = 1, worker: str = "w") -> dict[str, Any]:
    told = jsonable(msgspec.to_builtins(events, builtin_types=(bytes,)))
    place = {"stream_sequence": seq, "worker": worker, "rank": 0, "epoch": epoch, "seq": seq}
    return {**place, "ts_ns": 1, "events": told}


def read_log(*rows: dict[str, Any], folds: bool = False) -> tuple[dict[str, Any], list[str]]:
    decoding = StreamDecoding(rows, folds=folds)
    story = list(decoding.story())
    return decoding.report(), story


def held_of_log(report: dict[str, Any], tier: str = "hbm") -> list[str]:
    found: list[str] = report["workers"]["w"]["0"]["tiers"].get(tier, {}).get("hashes", [])
    return found


def test_a_recording_of_the_log_is_recognised_and_comes_to_what_is_held(tmp_path: Path) -> None:
    rows = [
        row(1, up("m"), BlockStored(ROOT_HASH, block(1) + block(2))),
        row(2, BlockRemoved(ROOT_HASH, block(1)), BlockStored(ROOT_HASH, block(3), tier=Tier.dram)),
    ]
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    capture = read_capture(file)
    assert (capture.frames, capture.rejected) == ([], ())
    report, story = read_log(*capture.batches)
    assert held_of_log(report) == [block(2).hex()]
    assert held_of_log(report, "dram") == [block(3).hex()]
    assert report["counts"]["rejected"] == {}
    assert len(story) == 4
    redacted, _ = read_log(*map(Redactor().own_batch, capture.batches))
    assert redacted["workers"] == report["workers"]


def test_the_logs_gaps_repetitions_and_epochs_are_noticed() -> None:
    stored_one = BlockStored(ROOT_HASH, block(1))
    rows = [row(1, stored_one), row(1, stored_one), row(4), row(1, epoch=2), row(5)]
    report, story = read_log(*rows)
    counts = report["counts"]
    assert (counts["repeated"], counts["gaps"], counts["stale"]) == (1, 1, 1)
    assert held_of_log(report) == []
    assert any("epoch 2 follows 1" in line for line in story)


def test_the_logs_inventories_replace_a_tier_and_digests_are_compared() -> None:
    parts = [Inventory(1, n, 2, Tier.hbm, ROOT_HASH, block(n)) for n in (1, 2)]
    told = Digest(Tier.hbm, *digest_of([block(1), block(2)]))
    report, _ = read_log(row(1, BlockStored(ROOT_HASH, block(9))), row(2, *parts, told))
    assert held_of_log(report) == [block(1).hex(), block(2).hex()]
    assert report["counts"]["digest_mismatches"] == 0
    report, story = read_log(row(1, parts[1], told))
    assert report["counts"]["digest_mismatches"] == 1
    assert any("parts before it are missing" in line for line in story)


def test_digests_that_say_the_same_again_are_one_line_until_something_else_is_told() -> None:
    empty, one = digest_of([]), digest_of([block(1)])
    idle = [Digest(tier, *empty) for tier in (Tier.hbm, Tier.dram)]
    rows = [
        *(row(seq, *idle) for seq in (1, 2, 3)),
        row(1, *idle, worker="v"),
        row(4, BlockStored(ROOT_HASH, block(1))),
        row(5, Digest(Tier.hbm, *one)),
        row(6, Digest(Tier.hbm, *one)),
        row(7, Digest(Tier.hbm, *empty)),
    ]
    whole, every = read_log(*rows)
    folded, lines = read_log(*rows, folds=True)
    assert folded == whole
    assert len(every) == 12
    assert [line.replace(block(1).hex(), "1").replace(ROOT_HASH.hex(), "0") for line in lines] == [
        "w/0 epoch 1 #1.0: digest of hbm: 0 blocks, as here (x 3, the last in #3.0)",
        "w/0 epoch 1 #1.1: digest of dram: 0 blocks, as here (x 3, the last in #3.1)",
        "w/0 epoch 1 #4.0: stored 1 in hbm (a root)",
        "w/0 epoch 1 #5.0: digest of hbm: 1 blocks, as here (x 2, the last in #6.0)",
        "w/0 epoch 1 #7.0: digest of hbm: 0 blocks, but 1 here, or others",
        "v/0 epoch 1 #1.0: digest of hbm: 0 blocks, as here",
        "v/0 epoch 1 #1.1: digest of dram: 0 blocks, as here",
    ]


def test_events_and_rows_of_the_log_that_cannot_be_read_cost_only_themselves() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    broken = row(2, BlockStored(ROOT_HASH, block(1)))
    broken["events"] = [["stored", deep], ["stored"], ["teleported"], 5, *broken["events"]]
    report, _ = read_log({**row(1), "epoch": "x"}, broken)
    assert held_of_log(report) == [block(1).hex()]
    assert report["counts"]["rejected"] == {
        "malformed_batch": 1,
        "malformed_event": 3,
        "unknown_event": 1,
    }
