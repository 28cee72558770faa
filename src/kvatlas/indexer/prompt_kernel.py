"""Fast code for prompts: token ids and hashes out of JSON text, and the hashes of blocks.

    [17, 4, 128000]    --read_token_list-->  u32 tokens  --hash_chain-->  16 bytes a block
    ["00ff..", "..."]  --read_hash_list-->   16 bytes a block

`hash_chain` is XXH3-128 (github.com/Cyan4973/xxHash, seed 0, default secret) for contents of whole
u32 words, 20 bytes or more: a parent and the tokens of a block. Equal to schemas.hashing, which is
the judge, and several times as fast, since a prompt is one call.

Words are uint64 or uint32.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel.arithmetic import swapped, times
from kvatlas.indexer.index.kernel.compiling import IS_COMPILED, compiled
from kvatlas.indexer.index.kernel.handles import words_in
from kvatlas.indexer.index.kernel.layout import BYTES, LOW_HALF, ONE, SHIFT_32, ZERO

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
#: the u64 at each byte offset of the secret
SECRET = np.array(
    [int.from_bytes(_SECRET_BYTES[at : at + 8], "little") for at in range(185)], np.uint64
)
PRIME32_1, PRIME32_2, PRIME32_3 = (
    np.uint64(prime) for prime in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
)
PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME64_5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
AVALANCHE = np.uint64(0x165667919E3779F9)
SHIFT_37, SHIFT_47 = np.uint64(37), np.uint64(47)
MAX_TOKEN = np.uint64(2**32 - 1)
TEN = np.uint64(10)
#: more than 11 digits, so that what is cut off was too long before
ELEVEN_DIGITS = np.uint64(2**37 - 1)
PARENT_WORDS = 4
#: where a list ends that is longer than it may be
TOO_LONG = -1
#: of a hash in a list: its 32 digits, two quotes, and what ends it
HASH_ITEM_BYTES = 35
ITEM_BYTES = np.uint64(HASH_ITEM_BYTES)
THREE, FOUR, SIX, SEVEN, EIGHT, SIXTEEN, SIXTY_FOUR = (
    np.uint64(number) for number in (3, 4, 6, 7, 8, 16, 64)
)
#: the same byte eight times: masks, and what lifts a byte of at least `0`, `:`, `a`, `g` to 0x80
ONES, LOW_NIBBLES, SMALL_LETTER, HIGH_BITS, UP_FROM_0, UP_FROM_COLON, UP_FROM_A, UP_FROM_G = (
    np.uint64(0x0101_0101_0101_0101 * byte)
    for byte in (0x01, 0x0F, 0x20, 0x80, 0x50, 0x46, 0x1F, 0x19)
)
EVEN_BYTES, EVEN_PAIRS = np.uint64(0x00FF_00FF_00FF_00FF), np.uint64(0x0000_FFFF_0000_FFFF)
#: whether the kernels are worth calling: as plain Python they are slower than their judge
IS_FAST = IS_COMPILED and sys.byteorder == "little"


# --- arithmetic modulo 2**64, about which numpy's scalars would warn -----------------------

if not IS_COMPILED:

    def plus(a: Any, b: Any) -> Any:
        """Add."""
        return np.uint64(int(a) + int(b) & 0xFFFF_FFFF_FFFF_FFFF)

    def minus(a: Any) -> Any:
        """Negate."""
        return np.uint64(-int(a) & 0xFFFF_FFFF_FFFF_FFFF)
else:

    @compiled()
    def plus(a: Any, b: Any) -> Any:
        """Add."""
        return a + b

    @compiled()
    def minus(a: Any) -> Any:
        """Negate."""
        return ZERO - a


@compiled()
def folded_product(a: Any, b: Any) -> Any:
    """Return the low XOR the high half of the 128-bit product."""
    a_low, a_high, b_low, b_high = a & LOW_HALF, a >> SHIFT_32, b & LOW_HALF, b >> SHIFT_32
    low_low = times(a_low, b_low)
    high_low = times(a_high, b_low)
    low_high = times(a_low, b_high)
    cross = (low_low >> SHIFT_32) + (high_low & LOW_HALF) + low_high
    high = (high_low >> SHIFT_32) + (cross >> SHIFT_32) + times(a_high, b_high)
    return high ^ ((cross << SHIFT_32) | (low_low & LOW_HALF))


@compiled()
def avalanche(word: Any) -> Any:
    """Spread a word over all its bits."""
    word ^= word >> SHIFT_37
    word = times(word, AVALANCHE)
    return word ^ (word >> SHIFT_32)


# --- XXH3-128 -----------------------------------------------------------------------------


@compiled()
def word_at(content: U32, at: int) -> Any:
    """Return the u64 that begins at a u32."""
    return np.uint64(content[at]) | (np.uint64(content[at + 1]) << SHIFT_32)


@compiled()
def mix16(content: U32, at: int, secret: int) -> Any:
    """Mix 16 bytes of content with 16 of the secret."""
    return folded_product(
        word_at(content, at) ^ SECRET[secret], word_at(content, at + 2) ^ SECRET[secret + 8]
    )


@compiled()
def mix32_low(low: Any, content: U32, one: int, other: int, secret: int) -> Any:
    """Mix 16 bytes at each of two places into the low half."""
    return plus(low, mix16(content, one, secret)) ^ plus(
        word_at(content, other), word_at(content, other + 2)
    )


@compiled()
def xxh3_128(content: U32, length: int) -> tuple[Any, Any]:
    """Return (low, high) of the hash of the first `length` u32 words, five or more."""
    num_bytes = np.uint64(4 * length)
    if length > 60:
        return long_xxh3_128(content, length)
    low, high = times(num_bytes, PRIME64_1), ZERO
    if length <= 32:
        for i in range((length - 1) // 8, -1, -1):
            one, other, secret = 4 * i, length - 4 * i - 4, 32 * i
            low = mix32_low(low, content, one, other, secret)
            high = mix32_low(high, content, other, one, secret + 16)
    else:
        for i in range(4):
            low = mix32_low(low, content, 8 * i, 8 * i + 4, 32 * i)
            high = mix32_low(high, content, 8 * i + 4, 8 * i, 32 * i + 16)
        low, high = avalanche(low), avalanche(high)
        for i in range(4, length // 8):
            low = mix32_low(low, content, 8 * i, 8 * i + 4, 32 * i - 125)
            high = mix32_low(high, content, 8 * i + 4, 8 * i, 32 * i - 109)
        low = mix32_low(low, content, length - 4, length - 8, 103)
        high = mix32_low(high, content, length - 8, length - 4, 119)
    sum_of = plus(plus(times(low, PRIME64_1), times(high, PRIME64_4)), times(num_bytes, PRIME64_2))
    return avalanche(plus(low, high)), minus(avalanche(sum_of))


@compiled()
def accumulate(lanes: U64, content: U32, at: int, secret: int) -> None:
    """Take a stripe of 64 bytes into the lanes."""
    for i in range(8):
        word = word_at(content, at + 2 * i)
        key = word ^ SECRET[secret + 8 * i]
        lanes[i ^ 1] = plus(lanes[i ^ 1], word)
        lanes[i] = plus(lanes[i], times(key & LOW_HALF, key >> SHIFT_32))


@compiled()
def merged(lanes: U64, secret: int, start: Any) -> Any:
    """Return one word of all lanes."""
    for i in range(4):
        start = plus(
            start,
            folded_product(
                lanes[2 * i] ^ SECRET[secret + 16 * i],
                lanes[2 * i + 1] ^ SECRET[secret + 16 * i + 8],
            ),
        )
    return avalanche(start)


@compiled()
def long_xxh3_128(content: U32, length: int) -> tuple[Any, Any]:
    """Return (low, high) for more than 240 bytes: stripes of 64, scrambled after each 16."""
    num_bytes = np.uint64(4 * length)
    lanes = np.empty(8, np.uint64)
    lanes[0], lanes[1], lanes[2], lanes[3] = PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3
    lanes[4], lanes[5], lanes[6], lanes[7] = PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1
    for stripe in range((4 * length - 1) // 64):
        accumulate(lanes, content, 16 * stripe, 8 * (stripe % 16))
        if stripe % 16 == 15:
            for i in range(8):
                lane = lanes[i]
                lanes[i] = times((lane ^ (lane >> SHIFT_47)) ^ SECRET[128 + 8 * i], PRIME32_1)
    accumulate(lanes, content, length - 16, 121)
    return (
        merged(lanes, 11, times(num_bytes, PRIME64_1)),
        merged(lanes, 117, ~times(num_bytes, PRIME64_2)),
    )


# --- what Python calls --------------------------------------------------------------------


@compiled()
def hash_blocks(
    tokens: U32, block_tokens: int, window_tokens: int, parent: U64, hashes: U64
) -> None:
    """Fill `hashes`, two words a block, with the chain of the tokens' blocks.

    A block's hash covers `window_tokens` from its beginning on, all of which are there.
    """
    content = np.empty(PARENT_WORDS + window_tokens, np.uint32)
    first, second = parent[0], parent[1]
    for block in range(hashes.size // 2):
        content[0], content[1] = np.uint32(first & LOW_HALF), np.uint32(first >> SHIFT_32)
        content[2], content[3] = np.uint32(second & LOW_HALF), np.uint32(second >> SHIFT_32)
        for i in range(window_tokens):
            content[PARENT_WORDS + i] = tokens[block * block_tokens + i]
        low, high = xxh3_128(content, PARENT_WORDS + window_tokens)
        first, second = swapped(high), swapped(low)
        hashes[2 * block], hashes[2 * block + 1] = first, second


@compiled()
def read_tokens(text: U8, tokens: U32) -> tuple[int, int]:
    """Read the JSON array of u32 that the text begins with; return how many, and where its `]` is.

    Zero for anything else, and for space behind a number, which nobody writes; TOO_LONG for more
    than `tokens` has room for.
    """
    count, digits, value = 0, 0, ZERO
    for at in range(1, text.size):
        byte = text[at]
        if 48 <= byte <= 57:
            value = (value * TEN + np.uint64(byte - np.uint8(48))) & ELEVEN_DIGITS
            digits += 1
        elif byte in (44, 93):  # , ]
            has_leading_zero = digits > 1 and text[np.uint64(at - digits)] == 48
            if digits == 0 or digits > 10 or value > MAX_TOKEN or has_leading_zero:
                break
            if count == tokens.size:
                return TOO_LONG, 0
            tokens[np.uint64(count)] = np.uint32(value)
            count += 1
            if byte == 93:
                return count, at
            digits, value = 0, ZERO
        elif digits > 0 or byte not in (32, 9, 10, 13):
            break
    return 0, 0


# --- hex digits, eight at once in a word, the first of them in its lowest byte -------------


@compiled()
def eight_at(text: bytes, words: U64, at: Any) -> Any:
    """Return the eight bytes that begin at a byte of the text; `words` is the same text."""
    word, shift = at >> THREE, (at & SEVEN) << THREE
    if word + ONE >= np.uint64(words.size):
        eight = ZERO
        for i in range(8):
            eight |= np.uint64(text[at + np.uint64(i)]) << np.uint64(8 * i)
        return eight
    if shift == ZERO:
        return words[word]
    return (words[word] >> shift) | (words[word + ONE] << (SIXTY_FOUR - shift))


@compiled()
def digits_among(eight: Any) -> Any:
    """Return the high bit of each byte that is a hex digit."""
    low = eight & ~HIGH_BITS
    small = low | SMALL_LETTER
    is_digit = (low + UP_FROM_0) & ~(low + UP_FROM_COLON)
    is_letter = (small + UP_FROM_A) & ~(small + UP_FROM_G)
    return (is_digit | is_letter) & ~eight & HIGH_BITS


@compiled()
def four_of(eight: Any) -> Any:
    """Return the four bytes that eight hex digits stand for."""
    letters = (eight >> SIX) & ONES
    values = (eight & LOW_NIBBLES) + (letters << THREE) + letters
    pairs = ((values << FOUR) | (values >> EIGHT)) & EVEN_BYTES
    pairs = (pairs | (pairs >> EIGHT)) & EVEN_PAIRS
    return (pairs | (pairs >> SIXTEEN)) & LOW_HALF


@compiled()
def unhexed(digits: U64, parts: U32) -> Any:
    """Fill `parts`, four bytes each, with what hex digits stand for; return whether all are such.

    No branch in it, so that it goes over several words at once.
    """
    odd = ZERO
    for i in range(np.uint64(parts.size)):
        odd |= digits_among(digits[i]) ^ HIGH_BITS
        parts[i] = np.uint32(four_of(digits[i]))
    return odd == ZERO


@compiled()
def read_hashes(text: bytes, begin: int, parts: U32) -> tuple[Any, Any]:
    """Read the JSON array of hashes that begins at a byte; return how many parts, where its `]` is.

    A part is four bytes. Zero for anything but strings of 32 hex digits, and for space other than
    behind a comma; TOO_LONG for more than `parts` has room for.
    """
    words, size = words_in(text), np.uint64(len(text))
    digits = np.empty(parts.size, np.uint64)
    at, count = np.uint64(begin) + ONE, ZERO
    while at + ITEM_BYTES <= size and text[at] == 34:  # "
        at += ONE
        if count + FOUR > np.uint64(parts.size):
            return np.int64(TOO_LONG), np.int64(0)
        for _ in range(4):
            digits[count] = eight_at(text, words, at)
            at += EIGHT
            count += ONE
        if text[at] != 34:
            break
        at += ONE
        if text[at] == 93:  # ]
            if not unhexed(digits, parts[:count]):
                break
            return np.int64(count), np.int64(at)
        if text[at] != 44:  # ,
            break
        at += ONE
        while at < size and text[at] in (32, 9, 10, 13):
            at += ONE
    return np.int64(0), np.int64(0)


_SIGNATURES: list[tuple[Any, str]] = [
    (
        hash_blocks,
        "void(Array(uint32, 1, 'C', readonly=True), int64, int64, "
        "Array(uint64, 1, 'C', readonly=True), uint64[::1])",
    ),
    (
        read_tokens,
        "UniTuple(int64, 2)(Array(uint8, 1, 'C', readonly=True), uint32[::1])",
    ),
    (read_hashes, f"UniTuple(int64, 2)({BYTES}, int64, uint32[::1])"),
]


def warm() -> None:
    """Compile the kernels, or load them from the on-disk cache. Later calls cost nothing."""
    while _SIGNATURES and IS_COMPILED:
        dispatcher, signature = _SIGNATURES.pop()
        dispatcher.compile(signature)
        dispatcher.disable_compile()


def hash_chain(parent: bytes, tokens: bytes, block_tokens: int, lookahead_tokens: int = 0) -> bytes:
    """Return the packed XXH3-128 hashes of the blocks of packed tokens below a parent.

    A block has one if its own tokens and the `lookahead_tokens` behind it are there.
    """
    num_blocks = max(len(tokens) // 4 - lookahead_tokens, 0) // block_tokens
    hashes = np.empty(2 * num_blocks, np.uint64)
    hash_blocks(
        np.frombuffer(tokens, np.uint32),
        block_tokens,
        block_tokens + lookahead_tokens,
        np.frombuffer(parent, np.uint64),
        hashes,
    )
    return hashes.tobytes()


def read_token_list(
    text: bytes, begin: int = 0, max_tokens: int | None = None
) -> tuple[bytes, int] | None:
    """Return the JSON array of token ids that begins at a `[` as packed u32, and where it ends.

    None if it is empty, no valid JSON, has anything but u32 in it, or space behind a number. The
    end is TOO_LONG for more than `max_tokens`, of which it is not read to its end.
    """
    room = (len(text) - begin) // 2 + 1
    tokens = np.empty(room if max_tokens is None else min(room, max_tokens), np.uint32)
    count, end = read_tokens(np.frombuffer(text, np.uint8)[begin:], tokens)
    if count == TOO_LONG:
        return b"", TOO_LONG
    return (tokens[:count].tobytes(), begin + end + 1) if count else None


def read_hash_list(
    text: bytes, begin: int, max_hashes: int | None = None
) -> tuple[bytes, int] | None:
    """Return the JSON array of hashes that begins at a `[`, packed, and where it ends.

    None if it is empty, has anything but strings of 32 hex digits, or space other than behind a
    comma. The end is TOO_LONG for more than `max_hashes`.
    """
    room = (len(text) - begin) // HASH_ITEM_BYTES
    parts = np.empty(4 * (room if max_hashes is None else min(room, max_hashes)), np.uint32)
    count, end = read_hashes(text, begin, parts)
    if count == TOO_LONG:
        return b"", TOO_LONG
    return (parts[:count].tobytes(), end + 1) if count else None
