"""What the ingest benchmark publishes, and how: runs, coalescing, what is held in the end."""

from typing import NamedTuple

from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.hashing import BlockHasher, Namespace
from kvatlas.worker_hooks.reporting.outbox import COALESCE_BYTES, COALESCE_SECONDS

MODEL, BLOCK_TOKENS, NUM_WORKERS = "m", 16, 8
HASHER = BlockHasher(Namespace(MODEL, BLOCK_TOKENS))
#: of a stream that nobody reads
RAW_STREAM = "RAW"


class Coalescing(NamedTuple):
    """How an outbox puts events together; one byte is one event a message."""

    max_bytes: int = COALESCE_BYTES
    seconds: float = COALESCE_SECONDS


ONE_BY_ONE = Coalescing(1, 0.0)


class Held(NamedTuple):
    """What one worker has published: its last prompt's hashes and what its tier holds."""

    worker: str
    last_chain: bytes
    digest: TierDigest


class Plan(NamedTuple):
    """One run: fresh workers named after it, the same number of events each."""

    name: str
    events: int
    blocks: int

    @property
    def workers(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(NUM_WORKERS)]

    @property
    def num_blocks(self) -> int:
        return self.events * self.blocks
