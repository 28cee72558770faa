"""Digests against golden vectors and a second computation; `--rewrite` fills the vectors in."""

import json
import operator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.indexer.index.packed_digest import digest_of_packed
from kvatlas.schemas.digest import TierDigest, digest_of, index_key, mix64, split_hashes

GOLDEN = Path(__file__).parents[1] / "golden" / "digest.json"
VECTORS: dict[str, Any] = json.loads(GOLDEN.read_text())

hash16 = st.binary(min_size=16, max_size=16)


@pytest.mark.parametrize("block", VECTORS["blocks"], ids=lambda block: block["hash"][16:])
def test_golden_block(block: dict[str, str]) -> None:
    key = index_key(bytes.fromhex(block["hash"]))
    assert (f"{key:016x}", f"{mix64(key):016x}") == (block["key"], block["mixed"])


@pytest.mark.parametrize("block", VECTORS["blocks"], ids=lambda block: block["hash"][16:])
def test_golden_block_from_primitives(block: dict[str, str]) -> None:
    key = int(block["hash"][16:], 16) or 1
    mixed = key
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    assert (f"{key:016x}", f"{mixed:016x}") == (block["key"], block["mixed"])


@pytest.mark.parametrize("blocks", VECTORS["sets"], ids=lambda blocks: blocks["name"])
def test_golden_set(blocks: dict[str, Any]) -> None:
    hashes = [bytes.fromhex(each) for each in blocks["hashes"]]
    expected = TierDigest(blocks["count"], int(blocks["xor"], 16))
    assert digest_of(hashes) == digest_of_packed(b"".join(hashes)) == expected
    keys = [int(each[16:], 16) or 1 for each in blocks["hashes"]]
    assert expected == (len(keys), reduce(operator.xor, map(mix64, keys), 0))


@given(st.lists(hash16))
def test_packed_digests_are_the_plain_ones(hashes: list[bytes]) -> None:
    assert digest_of_packed(b"".join(hashes)) == digest_of(hashes)


@given(st.lists(hash16, unique_by=index_key), st.randoms())
def test_a_digest_knows_no_order(hashes: list[bytes], random: Any) -> None:
    shuffled = list(hashes)
    random.shuffle(shuffled)
    assert digest_of(shuffled) == digest_of(hashes)


@given(st.lists(hash16, max_size=20))
def test_packed_hashes_split_into_themselves(hashes: list[bytes]) -> None:
    assert list(split_hashes(b"".join(hashes))) == hashes


def test_the_golden_file_is_fresh(request: pytest.FixtureRequest) -> None:
    """With --rewrite: fill in keys and digests."""
    if request.config.getoption("--rewrite"):
        for block in VECTORS["blocks"]:
            key = index_key(bytes.fromhex(block["hash"]))
            block |= {"key": f"{key:016x}", "mixed": f"{mix64(key):016x}"}
        for blocks in VECTORS["sets"]:
            count, xor = digest_of(map(bytes.fromhex, blocks["hashes"]))
            blocks |= {"count": count, "xor": f"{xor:016x}"}
        GOLDEN.write_text(json.dumps(VECTORS, indent=1) + "\n")
    assert len(VECTORS["blocks"]) >= 8
