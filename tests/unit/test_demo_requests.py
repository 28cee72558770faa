"""What the demo plays: traces, built-in sessions, and the yardstick that they are held to."""

import json
from pathlib import Path

import pytest

from kvatlas.demo.one_big_lru import one_big_lru_hit_ratio
from kvatlas.demo.prompts import PlayedRequest, block_tokens
from kvatlas.demo.sessions import generate_requests
from kvatlas.demo.trace import read_trace
from kvatlas.schemas.errors import InvalidTrace

ROW = {"timestamp": 5, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]}


def a_trace(tmp_path: Path, *rows: object) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return file


def test_a_row_has_as_many_prompt_blocks_as_fit_whole(tmp_path: Path) -> None:
    (request,) = read_trace(a_trace(tmp_path, ROW))
    assert request == PlayedRequest(5, (1, 2), 600, 10)
    assert request.num_prompt_blocks == 1
    assert request.prompt() == block_tokens(1) + block_tokens(2)[: 4 * 88]


def test_generated_tokens_fill_blocks_after_the_prompt() -> None:
    assert PlayedRequest(0, (1, 2), 600, 424).num_blocks == 2
    assert PlayedRequest(0, (1, 2), 600, 423).num_blocks == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ({**ROW, "input_length": -1}, "input_length"),
        ({**ROW, "hash_ids": [1]}, "1 hash_ids for 600 tokens, expected 2"),
        ({**ROW, "hash_ids": [1, "2"]}, "hash_ids"),
        ({**ROW, "hash_ids": []}, "hash_ids"),
        ({"timestamp": 5}, "input_length"),
        ({**ROW, "timestamp": None}, "timestamp"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, says: str) -> None:
    file = a_trace(tmp_path, ROW, row)
    with pytest.raises(InvalidTrace) as caught:
        read_trace(file)
    assert (caught.value.file, caught.value.line) == (file, 2)
    assert says in str(caught.value)


def test_an_absent_or_empty_trace_is_named(tmp_path: Path) -> None:
    for file in (tmp_path / "absent", a_trace(tmp_path, "")):
        with pytest.raises(InvalidTrace, match=file.name):
            read_trace(file)


def test_the_limit_ends_reading(tmp_path: Path) -> None:
    assert len(read_trace(a_trace(tmp_path, ROW, ROW, "{"), limit=2)) == 2


def test_sessions_are_seeded_ordered_and_share_heads() -> None:
    requests = generate_requests(300, seed=3)
    assert requests == generate_requests(300, seed=3)
    assert requests != generate_requests(300, seed=4)
    assert [r.arrival_ms for r in requests] == sorted(r.arrival_ms for r in requests)
    assert 10 < len({r.block_ids[0] for r in requests}) <= 24
    assert all(len(r.block_ids) == -(-r.input_tokens // 512) for r in requests)


def test_a_turn_keeps_the_full_blocks_of_the_turn_before() -> None:
    requests = generate_requests(300, seed=0)
    full = [r.block_ids[: r.num_prompt_blocks] for r in requests]
    grown = sum(
        any(b[: len(a)] == a and len(b) > len(a) for b in full[i + 1 :]) for i, a in enumerate(full)
    )
    assert grown > 100


def test_one_big_lru_counts_leading_blocks_only() -> None:
    first = PlayedRequest(0, (1, 2, 3), 3 * 512, 0)
    other_head = PlayedRequest(1, (9, 2, 3), 3 * 512, 0)
    assert one_big_lru_hit_ratio([first, first], 10) == 0.5
    assert one_big_lru_hit_ratio([first, other_head], 10) == 0


def test_one_big_lru_evicts_the_leaf_of_the_oldest_first() -> None:
    first = PlayedRequest(0, (1, 2, 3), 3 * 512, 0)
    second = PlayedRequest(1, (7, 8), 2 * 512, 0)
    assert one_big_lru_hit_ratio([first, second, first], capacity_blocks=4) == 2 / 8


def test_generated_blocks_take_room() -> None:
    first = PlayedRequest(0, (1,), 512, 0)
    for output_tokens, hits in ((0, 1), (512, 0)):
        between = PlayedRequest(1, (2,), 512, output_tokens)
        assert one_big_lru_hit_ratio([first, between, first], 2) == hits / 3
