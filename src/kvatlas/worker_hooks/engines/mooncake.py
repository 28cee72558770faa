"""Envelopes of Mooncake RFC #1527, in msgpack or JSON: one map, or a list of them.

    event_id, timestamp, event_type stored|removed|cleared, model_name, block_size,
    additional_salt, lora_name, tenant_id, backend_id, medium, dp_rank,
    seq_hashes, base_block_idx, parent_hash, token_ids

Tenants share nothing: the tenant's name is part of the salt (`tenant_salt`).
"""

from typing import Any

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import Decoded, Rejected, unread_fields
from kvatlas.worker_hooks.engines.media import tier_of
from kvatlas.worker_hooks.engines.objects import (
    BadValue,
    decode_any,
    engine_hash,
    engine_hashes,
    event_objects,
    integer,
    packed_tokens,
    text,
)
from kvatlas.worker_hooks.raw_events import RawCleared, RawEvent, RawRemoved, RawStored

#: fields that are read or change nothing about what a block is; any other makes the instance
#: doubtful
_FIELDS = frozenset(
    [
        *("event_id", "timestamp", "event_type", "model_name", "block_size", "additional_salt"),
        *("lora_name", "tenant_id", "backend_id", "instance_id", "medium", "dp_rank"),
        *("seq_hashes", "base_block_idx", "parent_hash", "token_ids"),
    ]
)
#: who names no tenant is this one
DEFAULT_TENANT = "default"


def tenant_salt(tenant: str | None, salt: str | None) -> str | None:
    """Return the salt that keeps a tenant's blocks apart; the default tenant adds nothing."""
    if tenant in (None, DEFAULT_TENANT):
        return salt
    return f"\0tenant\0{tenant}\0{salt or ''}"


class MooncakeAdapter:
    """Reads the events of one backend."""

    def decode(self, payload: bytes) -> Decoded:
        objects = event_objects(decode_any(payload))
        if not any(isinstance(fields, dict) for fields in objects):
            raise MalformedBatch("no event of Mooncake's envelope")
        events: list[tuple[int, RawEvent]] = []
        rejected: list[Rejected] = []
        rank: int | None = None
        for position, fields in enumerate(objects):
            try:
                if not isinstance(fields, dict):
                    raise BadValue("malformed", "an event that is no map")
                own_rank = _rank(fields)
                if rank is not None and own_rank not in (None, rank):
                    raise BadValue("mixed_ranks", f"rank {own_rank} in a batch of rank {rank}")
                event = _event(position, fields, rejected)
                rank = own_rank if rank is None else rank
                events.append((position, event))
            except BadValue as error:
                rejected.append(Rejected(position, error.kind, str(error)))
        return Decoded([e for _, e in events], rejected, rank, tuple(p for p, _ in events))


def _rank(fields: dict[Any, Any]) -> int | None:
    rank = integer(fields, "dp_rank")
    if rank is not None and not 0 <= rank < 2**32:
        raise BadValue("malformed", "dp_rank outside 32 bits")
    return rank


def _event(position: int, fields: dict[Any, Any], rejected: list[Rejected]) -> RawEvent:
    kind = fields.get("event_type")
    if kind not in ("stored", "removed", "cleared"):
        raise BadValue("unknown_event", f"event type {kind!r:.40}")
    if kind == "cleared" and text(fields, "medium") is None:
        return RawCleared(Tier.hbm)
    tier = _tier(position, fields, rejected)
    if kind == "cleared":
        event: RawEvent = RawCleared(tier)
    elif kind == "removed":
        event = RawRemoved(engine_hashes(fields.get("seq_hashes")), tier)
    else:
        event = _stored(position, fields, tier, rejected)
    rejected += unread_fields(position, str(kind), fields, _FIELDS)
    return event


def _stored(
    position: int, fields: dict[Any, Any], tier: Tier, rejected: list[Rejected]
) -> RawStored:
    hashes = engine_hashes(fields.get("seq_hashes"))
    parent_value = fields.get("parent_hash")
    # 0 is no hash of a chain but the want of one
    parent = None if parent_value in (None, 0) else engine_hash(parent_value)
    base = integer(fields, "base_block_idx", 0) or 0
    block_size = integer(fields, "block_size", 0) or 0
    try:
        tokens = packed_tokens(fields.get("token_ids"))
        if tokens and len(tokens) != 4 * len(hashes) * block_size:
            raise BadValue(
                "token_count",
                f"{len(tokens) // 4} tokens for {len(hashes)} blocks of {block_size}",
            )
        if tokens and parent is None and base:
            # taken as the beginning of a prompt it would be a prefix that nobody holds
            raise BadValue("no_parent", f"block {base} of a prompt without the one before it")
    except BadValue as error:
        rejected.append(Rejected(position, error.kind, str(error)))
        tokens = b""
    return RawStored(
        hashes,
        parent,
        tokens,
        tier,
        text(fields, "lora_name"),
        tenant_salt(text(fields, "tenant_id"), text(fields, "additional_salt")),
    )


def _tier(position: int, fields: dict[Any, Any], rejected: list[Rejected]) -> Tier:
    medium = text(fields, "medium")
    tier = tier_of(medium)
    if tier is None:
        rejected.append(Rejected(position, "unknown_medium", f"medium {medium!r:.40}"))
        return Tier.other
    return tier
