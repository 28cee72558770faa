"""Blocks whose bytes follow from their number, so that any process can check them."""

import hashlib
import random


def a_hash(number: int) -> bytes:
    """Return the hash of a block."""
    return hashlib.sha256(b"block %d" % number).digest()[:16]


def a_chain(*numbers: int) -> bytes:
    """Return packed hashes."""
    return b"".join(map(a_hash, numbers))


def a_block(number: int, num_bytes: int) -> bytes:
    """Return the bytes of a block."""
    return random.Random(number).randbytes(num_bytes)
