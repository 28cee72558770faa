"""The KV of a block, as a pure function of its hash, so that anybody can tell right bytes."""

import hashlib


def kv_bytes(block_hash: bytes, num_bytes: int) -> bytes:
    """Return what the engine computes for a block: SHAKE-128 of its 16-byte hash."""
    return hashlib.shake_128(block_hash).digest(num_bytes)


def engine_hash(block_hash: bytes) -> int:
    """Return the handle that the reference engine has for a block, foreign to everybody else."""
    return int.from_bytes(hashlib.sha256(b"reference engine" + block_hash).digest()[-8:], "big")
