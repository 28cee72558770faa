"""Short ways to say what an engine reports; a block's tokens follow from its engine hash."""

from array import array

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.worker_hooks.raw_events import RawRemoved, RawStored

BLOCK_TOKENS = 4
MODEL = "m"
DESCRIPTOR = NamespaceDescriptor(BLOCK_TOKENS)


def tokens_of(*names: int) -> bytes:
    """Return the tokens of the blocks with these names."""
    return array("I", [name * 10 + i for name in names for i in range(BLOCK_TOKENS)]).tobytes()


def stored(*names: int, parent: int | None = None, **rest: object) -> RawStored:
    """Say that a chain of blocks is held; the engine's hash of a block is its name."""
    return RawStored(names, parent, tokens_of(*names), **rest)  # type: ignore[arg-type]


def by_hash(*names: int, **rest: object) -> RawStored:
    """Say that blocks are held without saying what they are."""
    return RawStored(names, None, b"", **rest)  # type: ignore[arg-type]


def removed(*names: int, **rest: object) -> RawRemoved:
    """Say that blocks are gone."""
    return RawRemoved(names, **rest)  # type: ignore[arg-type]


def chain_of(*names: int, salt: str | None = None) -> list[bytes]:
    """Return the block hashes of a prompt that consists of these blocks."""
    packed = BlockHasher(DESCRIPTOR.namespace(MODEL, None, salt)).chain(tokens_of(*names))
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]
