"""The compiled twins of hashing and of lists in JSON against the plain ones."""

import json
import random
import string
from array import array

import pytest
import xxhash

from kvatlas.indexer import prompt_kernel
from kvatlas.schemas.hashing import BlockHasher, Namespace

SEEDED = random.Random(5)


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels() -> None:
    prompt_kernel.warm()


@pytest.mark.parametrize(
    "block_tokens", [*range(1, 70), 124, 125, 127, 128, 188, 252, 253, 256, 512, 1024, 4096]
)
def test_chains_are_those_of_xxhash(block_tokens: int) -> None:
    """Every branch of XXH3 and its edges: 128, 240 and 1,024 bytes of parent and tokens."""
    tokens = array("I", (SEEDED.getrandbits(32) for _ in range(3 * block_tokens + 1))).tobytes()
    hasher = BlockHasher(Namespace("m", block_tokens))
    assert prompt_kernel.hash_chain(hasher.root, tokens, block_tokens) == hasher.chain(tokens)


@pytest.mark.parametrize("ahead", [1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("block_tokens", [1, 4, 16, 28, 56, 57, 1024])
def test_chains_with_a_lookahead_are_those_of_xxhash(block_tokens: int, ahead: int) -> None:
    """It moves a window over the edges of XXH3's branches."""
    num_tokens = 3 * block_tokens + ahead
    tokens = array("I", (SEEDED.getrandbits(32) for _ in range(num_tokens))).tobytes()
    hasher = BlockHasher(Namespace("m", block_tokens, lookahead_tokens=ahead))
    chain = prompt_kernel.hash_chain(hasher.root, tokens, block_tokens, ahead)
    assert chain == hasher.chain(tokens)
    assert len(chain) == 3 * 16


def test_a_chain_of_nothing_is_empty() -> None:
    assert prompt_kernel.hash_chain(bytes(16), bytes(60), 16) == b""


def test_the_first_block_is_xxh3_128() -> None:
    tokens = array("I", range(16)).tobytes()
    parent = bytes(range(16))
    expected = xxhash.xxh3_128_digest(parent + tokens)
    assert prompt_kernel.hash_chain(parent, tokens, 16) == expected


@pytest.mark.parametrize(
    "text",
    ["[0]", "[4294967295]", "[1,2,3]", "[ 1,\t2,\r\n 3]", json.dumps(list(range(0, 10**6, 997)))],
)
def test_token_lists_are_read(text: str) -> None:
    expected = array("I", json.loads(text)).tobytes()
    assert prompt_kernel.read_token_list(text.encode()) == (expected, len(text))


def test_a_list_is_read_where_it_stands() -> None:
    text = b'{"a":[12,3],"b":[4]}'
    assert prompt_kernel.read_token_list(text, 5) == (array("I", [12, 3]).tobytes(), 11)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[]",
        "[ ]",
        "[,]",
        "[1,]",
        "[,1]",
        "[1 2]",
        "[1 ,2]",
        "[00000000001]",
        "[137438953473]",
        "[1",
        "[1,",
        "[1,2}",
        "[01]",
        "[00]",
        "[1;2]",
        "[\x00]",
        "[-1]",
        "[4294967296]",
        "[99999999999999999999999]",
        "[1.5]",
        "[1e3]",
        '["1"]',
        "[true]",
        "[null]",
        "[[1]]",
        "[1,[2]]",
        '[{"a":1}]',
    ],
)
def test_anything_else_is_left_to_others(text: str) -> None:
    assert prompt_kernel.read_token_list(text.encode()) is None


DIGITS = [SEEDED.randbytes(16).hex() for _ in range(5)]


@pytest.mark.parametrize("padding", range(8))
@pytest.mark.parametrize("behind", ["", "}", ',"model":"m"}'])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_hash_lists_are_read_where_they_stand(padding: int, behind: str, count: int) -> None:
    """Words of eight digits begin anywhere, and behind the last there may be nothing."""
    listed = json.dumps(DIGITS[:count], separators=(",", ":"))
    text = " " * padding + listed + behind
    expected = bytes.fromhex("".join(DIGITS[:count])), padding + len(listed)
    assert prompt_kernel.read_hash_list(text.encode(), padding) == expected


@pytest.mark.parametrize("gap", [", ", ",\n    ", ",\t\r\n"])
def test_space_may_stand_behind_a_comma(gap: str) -> None:
    text = "[" + gap.join(f'"{each.upper()}"' for each in DIGITS) + "]"
    expected = bytes.fromhex("".join(DIGITS)), len(text)
    assert prompt_kernel.read_hash_list(text.encode(), 0) == expected


@pytest.mark.parametrize("at", [*range(32), 63])
def test_every_digit_counts_and_is_checked(at: int) -> None:
    """Each byte at each place of a hash: a list with any that is no digit is left to others."""
    hashes = "".join(DIGITS[:2])
    for byte in range(256):
        read = b"".join([hashes[:at].encode(), bytes([byte]), hashes[at + 1 :].encode()])
        text = b'["' + read[:32] + b'","' + read[32:] + b'"]'
        is_digit = chr(byte) in string.hexdigits
        expected = (bytes.fromhex(read.decode()), len(text)) if is_digit else None
        assert prompt_kernel.read_hash_list(text, 0) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        "[ ]",
        '["{0}"',
        '["{0}',
        '["{0}",]',
        '["{0}" ]',
        '[ "{0}"]',
        '["{0}" ,"{1}"]',
        '["{0}""{1}"]',
        '["{0}";"{1}"]',
        '["{0}",{1}]',
        '["{0}","{1}]',
        '["{0}","{1}0"]',
        '["{0}0","{1}"]',
        '["{0}",1]',
        '["{0}",["{1}"]]',
        "[1]",
    ],
)
def test_other_lists_of_hashes_are_left_to_others(text: str) -> None:
    for behind in ("", "}" * 40):
        listed = text.format(*DIGITS).encode() + behind.encode()
        assert prompt_kernel.read_hash_list(listed, 0) is None


def test_a_hash_that_is_cut_off_anywhere_is_left_to_others() -> None:
    whole = json.dumps(DIGITS[:2], separators=(",", ":")).encode()
    for size in range(len(whole)):
        assert prompt_kernel.read_hash_list(whole[:size], 0) is None
