"""vLLM's own hash of a prompt's first block, recomputed from outside. Pure.

    NONE_HASH = f(seed)     hash of block 0 = f((NONE_HASH, tokens, None))

`f` is SHA-256 over a pickle (`sha256`) or over canonical CBOR (`sha256_cbor`). Events carry the
digest, or its last 8 bytes as an integer.
"""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

from msgspec import Struct

#: of vLLM 0.30 and newer, unless PYTHONHASHSEED is set
FIXED_SEED = "vllm-none-hash"


class MatchedHash(Struct, frozen=True):
    """The seed that gives the hash; None: none of the known ones, or `missing` says why not."""

    seed: str | None = None
    missing: str = ""


def matched_hash(
    algorithm: str, engine_hash: int | bytes, tokens: tuple[int, ...], python_hash_seed: str | None
) -> MatchedHash:
    """Return which seed the engine hashes with, of those that engines share."""
    hashed = _function(algorithm)
    if hashed is None:
        hint = ": pip install cbor2" if algorithm == "sha256_cbor" else ""
        return MatchedHash(missing=f"{algorithm} cannot be recomputed here{hint}")
    for seed in (FIXED_SEED, python_hash_seed):
        if seed is None:
            continue
        digest = hashed((hashed(seed), tokens, None))
        if engine_hash in (digest, int.from_bytes(digest[-8:], "big")):
            return MatchedHash(seed)
    return MatchedHash()


def _function(algorithm: str) -> Callable[[Any], bytes] | None:
    if algorithm == "sha256":
        return lambda value: hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest()
    if algorithm == "sha256_cbor":
        try:
            import cbor2
        except ModuleNotFoundError:
            return None
        return lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
    return None
