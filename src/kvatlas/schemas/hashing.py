"""Block identity: a chain of 16-byte hashes under a namespace root.

    root       = H over domain-tagged fields (algorithm, model, block size, lookahead, LoRA, salt)
    hash of i  = H(parent 16 B || window of block i as u32 LE || extras of that window)
    window     = the block's own tokens and the `lookahead_tokens` behind it (ADR-0024), mostly 0

The parent of block 0 is the root.

H is XXH3-128 (canonical, big-endian) or SHA-256 cut to 16 bytes. XXH3 resists accidents, SHA-256
attackers; the algorithm is part of the root, so that the two never mix. Only blocks whose window is
full have a hash. Called at the edge (sidecar, bridge) and by the router.
"""

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import xxhash

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidBlock

MAX_BLOCK_TOKENS = 65_536
#: engines look one token ahead, or one for each chained draft module
MAX_LOOKAHEAD_TOKENS = 1_024
_DOMAIN = b"kvatlas/1"
_REUSE_POINT = b"kvatlas/reuse_point/1"

_Buffer = bytes | bytearray | memoryview


class HashAlgorithm(StrEnum):
    """How a fleet names its blocks."""

    xxh3_128 = "xxh3_128"
    sha256_128 = "sha256_128"


class Extra(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Something beside tokens that a span of the prompt stands for, such as an image.

    `offset` and `length` are in tokens of the prompt; `id` identifies the content.
    """

    offset: int
    kind: str
    id: str
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise InvalidBlock(f"extra {self.id!r}: offset {self.offset}, length {self.length}")


class Namespace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who may share KV: equal namespaces and equal tokens give equal hashes.

    `cache_salt` separates tenants. It stays on the machine that computes the root: events carry
    the root only. `lookahead_tokens` are those behind a block that its KV depends on as well.
    """

    model: str
    block_tokens: int
    algorithm: HashAlgorithm = HashAlgorithm.xxh3_128
    lora: str | None = None
    cache_salt: str | None = None
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidBlock(f"block_tokens {self.block_tokens} is not in 1..{MAX_BLOCK_TOKENS}")
        if not 0 <= self.lookahead_tokens <= MAX_LOOKAHEAD_TOKENS:
            problem = f"{self.lookahead_tokens} is not in 0..{MAX_LOOKAHEAD_TOKENS}"
            raise InvalidBlock(f"lookahead_tokens {problem}")

    def root(self, fleet_key: bytes = b"") -> bytes:
        """Return the 16-byte parent of every first block.

        A salted root is always SHA-256, keyed with `fleet_key` where one is set, so that it is no
        dictionary for weak salts.
        """
        fields = [
            (b"algorithm", self.algorithm.encode()),
            (b"model", self.model.encode()),
            (b"block_tokens", struct.pack("<I", self.block_tokens)),
        ]
        if self.lookahead_tokens:  # without it, roots are those of before there was any
            fields.append((b"lookahead_tokens", struct.pack("<I", self.lookahead_tokens)))
        if self.lora is not None:
            fields.append((b"lora", self.lora.encode()))
        if self.cache_salt is None:
            return digest16(self.algorithm, _tagged(fields))
        fields.append((b"salt", self.cache_salt.encode()))
        return hmac.digest(fleet_key, _tagged(fields), "sha256")[:BLOCK_HASH_BYTES]


class BlockHasher:
    """Names the blocks of prompts of one namespace."""

    def __init__(self, namespace: Namespace, fleet_key: bytes = b"") -> None:
        self.namespace = namespace
        self.root = namespace.root(fleet_key)

    def chain(
        self,
        tokens: _Buffer | Sequence[int],
        extras: Iterable[Extra] = (),
        parent: bytes | None = None,
        first_token: int = 0,
    ) -> bytes:
        """Return the packed hashes of the blocks of `tokens` that have a full window.

        A partial tail has no hash, nor has a block whose lookahead is not among the tokens yet.
        `tokens` are a list of ids or packed u32 LE. `parent` continues a chain; then `first_token`
        is the prompt position of tokens[0], to which extras refer. Raises InvalidBlock.
        """
        packed = pack_tokens(tokens)
        block_bytes = 4 * self.namespace.block_tokens
        window_bytes = block_bytes + 4 * self.namespace.lookahead_tokens
        starts = range(0, len(packed) - window_bytes + 1, block_bytes)
        windows = [packed[start : start + window_bytes] for start in starts]
        return self._chain_windows(windows, extras, parent, first_token)

    def chain_reported(
        self,
        tokens: bytes,
        lookahead: bytes,
        extras: Iterable[Extra] = (),
        parent: bytes | None = None,
        first_token: int = 0,
    ) -> bytes:
        """Return the packed hashes of whole blocks whose lookahead is given block by block.

        `tokens` and `lookahead` are packed u32 LE: for each block `block_tokens` of the one and
        `lookahead_tokens` of the other. Equal to `chain` of a prompt with these windows. Raises
        InvalidBlock for lengths that do not belong together.
        """
        ahead_bytes = 4 * self.namespace.lookahead_tokens
        if not ahead_bytes and not lookahead:
            return self.chain(tokens, extras, parent, first_token)
        block_bytes = 4 * self.namespace.block_tokens
        num_blocks, rest = divmod(len(tokens), block_bytes)
        if rest or len(lookahead) != num_blocks * ahead_bytes:
            problem = f"{len(tokens)} bytes of tokens with {len(lookahead)} of lookahead"
            raise InvalidBlock(f"{problem}, expected {ahead_bytes} for each {block_bytes}")
        windows = [
            tokens[block_bytes * n : block_bytes * (n + 1)]
            + lookahead[ahead_bytes * n : ahead_bytes * (n + 1)]
            for n in range(num_blocks)
        ]
        return self._chain_windows(windows, extras, parent, first_token)

    def _chain_windows(
        self,
        windows: list[bytes],
        extras: Iterable[Extra],
        parent: bytes | None,
        first_token: int,
    ) -> bytes:
        """Hash a chain of windows, each with its extras; `windows` is used up."""
        tagged = _extras_by_block(extras, len(windows), self.namespace, first_token)
        for block, encoded in tagged.items():
            windows[block] += encoded
        return chain_blocks(self.namespace.algorithm, parent or self.root, windows)


def chain_blocks(algorithm: HashAlgorithm, parent: bytes, blocks: Iterable[bytes]) -> bytes:
    """Return the packed hashes of a chain of block contents below `parent`."""
    if len(parent) != BLOCK_HASH_BYTES:
        raise InvalidBlock(f"a parent of {len(parent)} bytes, expected {BLOCK_HASH_BYTES}")
    hashes = []
    if algorithm is HashAlgorithm.xxh3_128:
        digest = xxhash.xxh3_128_digest
        for block in blocks:
            hashes.append(parent := digest(parent + block))
    else:
        for block in blocks:
            hashes.append(parent := hashlib.sha256(parent + block).digest()[:BLOCK_HASH_BYTES])
    return b"".join(hashes)


def reuse_point(block_hash: bytes) -> bytes:
    """Return the name under which a worker holds the fact that reuse may end with the block.

    A block of no prompt: its hash has a domain of its own (ADR-0006).
    """
    return xxhash.xxh3_128_digest(_REUSE_POINT + block_hash)


def pack_tokens(tokens: _Buffer | Sequence[int]) -> bytes:
    """Return token ids as u32 LE; bytes-like input is taken as packed already."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        packed = bytes(tokens)
        if len(packed) % 4:
            raise InvalidBlock(f"{len(packed)} bytes of packed tokens, expected a multiple of 4")
        return packed
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidBlock(f"token ids have to be integers in 0..{2**32 - 1}: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def digest16(algorithm: HashAlgorithm, content: bytes) -> bytes:
    """Return the 16-byte hash of one content."""
    if algorithm is HashAlgorithm.xxh3_128:
        return xxhash.xxh3_128_digest(content)
    return hashlib.sha256(content).digest()[:BLOCK_HASH_BYTES]


def _tagged(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode fields so that no two lists of fields give equal bytes: both lengths stand first."""
    parts = [_DOMAIN]
    for tag, value in fields:
        parts += [struct.pack("<HI", len(tag), len(value)), tag, value]
    return b"".join(parts)


def _extras_by_block(
    extras: Iterable[Extra], num_blocks: int, namespace: Namespace, first_token: int
) -> dict[int, bytes]:
    """Encode each extra into every block whose window it touches, at its offset in that block."""
    block_tokens, lookahead_tokens = namespace.block_tokens, namespace.lookahead_tokens
    tagged: dict[int, list[tuple[bytes, bytes]]] = {}
    for extra in sorted(extras):
        start = extra.offset - first_token
        first = max((start - lookahead_tokens) // block_tokens, 0)
        last = (start + extra.length - 1) // block_tokens
        for block in range(first, min(last + 1, num_blocks)):
            position = struct.pack("<q", start - block * block_tokens)
            fields = [(b"kind", extra.kind.encode()), (b"id", extra.id.encode())]
            tagged.setdefault(block, []).extend([*fields, (b"at", position)])
    return {block: _tagged(fields) for block, fields in tagged.items()}
