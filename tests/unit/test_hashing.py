"""Block identity against golden vectors, and against a second computation from primitives.

`pytest tests/unit/test_hashing.py --rewrite` fills in what the code answers now; a difference is a
new major version of the wire (ADR-0002).
"""

import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvatlas.schemas.errors import InvalidBlock
from kvatlas.schemas.hashing import BlockHasher, Extra, HashAlgorithm, Namespace, pack_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "hashing.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]


def hasher_of(case: dict[str, Any]) -> BlockHasher:
    namespace = Namespace(
        case["model"],
        case["block_tokens"],
        HashAlgorithm(case["algorithm"]),
        case["lora"],
        case["cache_salt"],
        case.get("lookahead_tokens", 0),
    )
    return BlockHasher(namespace, bytes.fromhex(case["fleet_key"]))


def extras_of(case: dict[str, Any]) -> list[Extra]:
    return [Extra(**extra) for extra in case["extras"]]


def split(chain: bytes) -> list[str]:
    return [chain[i : i + 16].hex() for i in range(0, len(chain), 16)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_vector(case: dict[str, Any]) -> None:
    hasher = hasher_of(case)
    assert hasher.root.hex() == case["root"]
    assert split(hasher.chain(case["tokens"], extras_of(case))) == case["chain"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_vector_from_primitives(case: dict[str, Any]) -> None:
    """Written from the words of ADR-0002, sharing nothing with the code but the libraries."""

    def h(content: bytes) -> bytes:
        if case["algorithm"] == "xxh3_128":
            return xxhash.xxh3_128(content).digest()
        return hashlib.sha256(content).digest()[:16]

    def field(tag: str, value: bytes) -> bytes:
        return struct.pack("<HI", len(tag), len(value)) + tag.encode() + value

    content = b"kvatlas/1"
    content += field("algorithm", case["algorithm"].encode())
    content += field("model", case["model"].encode())
    content += field("block_tokens", struct.pack("<I", case["block_tokens"]))
    ahead = case.get("lookahead_tokens", 0)
    if ahead:
        content += field("lookahead_tokens", struct.pack("<I", ahead))
    if case["lora"] is not None:
        content += field("lora", case["lora"].encode())
    if case["cache_salt"] is None:
        root = h(content)
    else:
        content += field("salt", case["cache_salt"].encode())
        key = bytes.fromhex(case["fleet_key"])
        root = hmac.new(key, content, hashlib.sha256).digest()[:16]
    assert root.hex() == case["root"]

    parent, chain, size = root, [], case["block_tokens"]
    window = size + ahead
    for start in range(0, len(case["tokens"]) - window + 1, size):
        block = struct.pack(f"<{window}I", *case["tokens"][start : start + window])
        touching = [
            extra
            for extra in case["extras"]
            if extra["offset"] < start + window and extra["offset"] + extra["length"] > start
        ]
        if touching:
            block += b"kvatlas/1"
        for extra in sorted(touching, key=lambda e: (e["offset"], e["kind"], e["id"], e["length"])):
            block += field("kind", extra["kind"].encode())
            block += field("id", extra["id"].encode())
            block += field("at", struct.pack("<q", extra["offset"] - start))
        parent = h(parent + block)
        chain.append(parent.hex())
    assert chain == case["chain"]


def test_no_two_golden_namespaces_share_a_root() -> None:
    """A LoRA, a salt and a model of one name are three things."""
    by_namespace = {
        (
            c["algorithm"],
            c["model"],
            c["block_tokens"],
            c["lora"],
            c["cache_salt"],
            c["fleet_key"],
            c.get("lookahead_tokens", 0),
        ): (c["root"])
        for c in CASES
    }
    assert len(set(by_namespace.values())) == len(by_namespace)


def test_a_chain_can_be_continued_from_any_block() -> None:
    hasher = BlockHasher(Namespace("m", 4))
    extras = [Extra(6, "image", "cat", 9)]
    tokens = list(range(18))
    whole = hasher.chain(tokens, extras)
    head = hasher.chain(tokens[:8], extras)
    tail = hasher.chain(tokens[8:], extras, parent=head[-16:], first_token=8)
    assert head + tail == whole


def test_a_block_is_named_by_what_lies_behind_it_too() -> None:
    hasher = BlockHasher(Namespace("m", 4, lookahead_tokens=2))
    chains = [hasher.chain([*range(8), *behind]) for behind in ([1, 2], [1, 3], [1], [])]
    assert [len(chain) // 16 for chain in chains] == [2, 2, 1, 1]
    assert chains[0][:16] == chains[1][:16] == chains[2]
    assert chains[0][16:] != chains[1][16:]
    assert chains[0][:16] != BlockHasher(Namespace("m", 4)).chain(range(4))


def test_windows_that_are_given_block_by_block_are_those_of_a_prompt() -> None:
    hasher = BlockHasher(Namespace("m", 4, lookahead_tokens=3))
    extras = [Extra(9, "image", "cat", 2)]
    tokens = pack_tokens(range(15))
    ahead = b"".join(tokens[16 * n : 16 * n + 12] for n in (1, 2, 3))
    whole = hasher.chain(tokens, extras)
    assert len(whole) == 3 * 16
    assert hasher.chain_reported(tokens[:48], ahead, extras) == whole
    tail = hasher.chain_reported(tokens[32:48], ahead[24:], extras, whole[16:32], 8)
    assert tail == whole[32:]
    with pytest.raises(InvalidBlock, match="48 bytes of tokens with 24 of lookahead, expected 12"):
        hasher.chain_reported(tokens[:48], ahead[:24])


@pytest.mark.parametrize("ahead", [-1, 1_025])
def test_a_lookahead_has_bounds(ahead: int) -> None:
    with pytest.raises(InvalidBlock, match="lookahead_tokens"):
        Namespace("m", 4, lookahead_tokens=ahead)


def test_a_partial_block_has_no_hash() -> None:
    hasher = BlockHasher(Namespace("m", 4))
    assert hasher.chain([1, 2, 3]) == b""
    assert len(hasher.chain([1, 2, 3, 4, 5])) == 16


def test_lists_and_packed_tokens_are_the_same_prompt() -> None:
    hasher = BlockHasher(Namespace("m", 2))
    tokens = [0, 1, 2**32 - 1, 70_000]
    packed = struct.pack("<4I", *tokens)
    assert pack_tokens(tokens) == packed
    assert hasher.chain(tokens) == hasher.chain(packed) == hasher.chain(memoryview(packed))


def test_a_chain_depends_on_every_token_before() -> None:
    hasher = BlockHasher(Namespace("m", 2))
    ours, theirs = hasher.chain([1, 2, 3, 4]), hasher.chain([9, 2, 3, 4])
    assert ours[:16] != theirs[:16]
    assert ours[16:] != theirs[16:]


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], b"123", [1.5]])
def test_what_is_no_token_is_named(tokens: Any) -> None:
    with pytest.raises(InvalidBlock):
        BlockHasher(Namespace("m", 1)).chain(tokens)


@pytest.mark.parametrize("block_tokens", [0, -1, 65_537])
def test_a_block_size_out_of_range_is_named(block_tokens: int) -> None:
    with pytest.raises(InvalidBlock, match="block_tokens"):
        Namespace("m", block_tokens)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0)])
def test_an_extra_without_a_place_is_named(offset: int, length: int) -> None:
    with pytest.raises(InvalidBlock, match="cat"):
        Extra(offset, "image", "cat", length)


def test_the_golden_file_is_fresh(request: pytest.FixtureRequest) -> None:
    """With --rewrite: fill in roots and chains."""
    if request.config.getoption("--rewrite"):
        for case in CASES:
            hasher = hasher_of(case)
            case["root"] = hasher.root.hex()
            case["chain"] = split(hasher.chain(case["tokens"], extras_of(case)))
        content = json.loads(GOLDEN.read_text()) | {"cases": CASES}
        GOLDEN.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    assert {case["algorithm"] for case in CASES} == set(HashAlgorithm)


def test_the_primitives_are_the_published_ones() -> None:
    """Reference values: xxHash's own test of an empty input (seed 0), and FIPS 180-4's "abc"."""
    assert xxhash.xxh3_128(b"").hexdigest() == "99aa06d3014798d86001c324468d497f"
    assert hashlib.sha256(b"abc").hexdigest().startswith("ba7816bf8f01cfea414140de5dae2223")
