"""What a worker is: the description in WorkerUp, and which KV may be exchanged with whom."""

import re
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.hashing import MAX_LOOKAHEAD_TOKENS, HashAlgorithm, Namespace, digest16
from kvatlas.schemas.ids import Name, Tier


class NamespaceDescriptor(Struct, frozen=True, array_like=True):
    """How a worker cuts and names blocks. Candidates with equal descriptors share one chain."""

    block_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    algorithm: HashAlgorithm = HashAlgorithm.xxh3_128
    #: behind a block, that its name covers too (ADR-0024); since wire 102, readers before it take 0
    #: and find nothing, because the roots differ
    lookahead_tokens: Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD_TOKENS)] = 0

    def namespace(self, model: str, lora: str | None, cache_salt: str | None) -> Namespace:
        """Return the namespace of a request at such a worker."""
        return Namespace(
            model, self.block_tokens, self.algorithm, lora, cache_salt, self.lookahead_tokens
        )

    def __str__(self) -> str:
        """Return it for messages: `16 tokens, xxh3_128, lookahead 1`."""
        ahead = f", lookahead {self.lookahead_tokens}" if self.lookahead_tokens else ""
        return f"{self.block_tokens} tokens, {self.algorithm}{ahead}"


class TierCapacity(Struct, frozen=True, array_like=True):
    """How many blocks fit into a tier."""

    tier: Tier
    num_blocks: int


class WorkerRole(StrEnum):
    """What a worker does of a request."""

    both = "both"
    prefill = "prefill"
    decode = "decode"


#: trailing blocks of a match that an engine does not reuse; EAGLE-like drafting costs one
MAX_UNREUSABLE_BLOCKS = 1_024
UnreusableBlocks = Annotated[int, Meta(ge=0, le=MAX_UNREUSABLE_BLOCKS)]
#: every reader keeps what each instance says of itself, and answers with it: more is refused
MAX_MODELS, MAX_ADAPTERS = 256, 4_096
Address = Annotated[str, Meta(max_length=2_048)]
Word = Annotated[str, Meta(max_length=256)]
_FEW = Meta(max_length=64)


class WorkerInfo(Struct, frozen=True, array_like=True):
    """What WorkerUp says of an instance.

    `models` are the names that requests may use; the first is the model of the namespace.
    `adapters` maps a LoRA adapter's name to its base model. `groups` are the KV groups that
    full-prefix reuse needs. `kv_fingerprint` is 16 bytes: equal hashes mean equal KV only where it
    is equal, and an empty one means that nothing may be pulled. With `ends_at_reuse_points` a match
    counts up to its last reuse point only (ADR-0006). `p2p_address` (host:port) is where the
    engine's own transfer tier listens, which other engines can be told to pull from.
    `leasable_tiers` are those whose blocks peers can have; who does not say lends every tier.
    `num_unreusable_trailing_blocks` of what it holds of a prompt are computed again: a match counts
    that many blocks less (ADR-0024).
    """

    base_url: Address
    models: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_MODELS)]
    descriptor: NamespaceDescriptor
    kv_fingerprint: Annotated[bytes, _FEW] = b""
    tiers: Annotated[tuple[TierCapacity, ...], _FEW] = ()
    adapters: Annotated[dict[Name, Name], Meta(max_length=MAX_ADAPTERS)] = {}
    groups: Annotated[tuple[int, ...], Meta(max_length=1_024)] = (0,)
    role: WorkerRole = WorkerRole.both
    sidecar: Address = ""
    versions: Annotated[dict[Word, Word], _FEW] = {}
    ends_at_reuse_points: bool = False
    p2p_address: Address = ""
    leasable_tiers: Annotated[tuple[Tier, ...], _FEW] = tuple(Tier)
    num_unreusable_trailing_blocks: UnreusableBlocks = 0

    @property
    def model(self) -> str:
        """The model that names the worker's namespaces."""
        return self.models[0]


class KvLayout(Struct, frozen=True):
    """Everything that decides whether the KV bytes of equal tokens are equal."""

    weights_revision: str
    kv_dtype: str
    layout: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_bytes: int
    quantisation: str = "none"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_backend: str = "default"
    lora_digest: str = ""

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are equal for workers which may exchange KV."""
        content = b"kvatlas/kv_fingerprint/1" + msgspec.msgpack.encode(self)
        return digest16(HashAlgorithm.sha256_128, content)


_HOST_AND_PORT = re.compile(r"(.+):([0-9]{1,5})")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the parts of `host:port` (an IPv6 host in brackets), None for anything else."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or not 1 <= int(found[2]) <= 65_535:
        return None
    return found[1], int(found[2])


class Trust(StrEnum):
    """How far the index may be believed about an instance."""

    exact = "exact"
    catching_up = "catching_up"
    degraded = "degraded"
    stale = "stale"
    gone = "gone"
