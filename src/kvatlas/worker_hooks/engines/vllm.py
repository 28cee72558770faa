"""vLLM's KV events, 0.10 to 0.33: arrays up to 0.22, maps from 0.24.

    BlockStored       hashes of consecutive blocks of one request, with their tokens
    BlockRemoved      one per copy of a block
    AllBlocksCleared  of the engine's own memory, whatever lies elsewhere stays

Versions before 0.18 do not say the salt: blocks of salted prompts look like plain ones there, under
hashes of their own. From 0.33 on a block's hash may cover tokens behind the block, which the event
then has as `lookahead_token_ids`, a list a block (ADR-0024). A group's kind and window are told
ahead of its first store, as `RawGroupSeen`.
"""

from typing import Any

from kvatlas.schemas.hashing import MAX_LOOKAHEAD_TOKENS
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import UNKNOWN_FIELD, Decoded
from kvatlas.worker_hooks.engines.media import tier_of
from kvatlas.worker_hooks.engines.msgpack_batches import Fields, Said, decode_batch
from kvatlas.worker_hooks.engines.objects import (
    BadValue,
    engine_hash,
    engine_hashes,
    integer,
    packed_tokens,
    text,
)
from kvatlas.worker_hooks.engines.vllm_extras import FIRST_TOKEN, Identity, identity_of
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawGroupSeen,
    RawRemoved,
    RawStored,
    RawStoredAhead,
)

FIELDS_OF = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
        "lookahead_token_ids",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}
#: fields of other producers of this format that are not read and change nothing about what a block
#: is; one that is in neither list makes the instance doubtful
HARMLESS_FIELDS = frozenset(["event_id", "priority", "timestamp"])
#: more are not told apart; an engine has a handful
MAX_GROUPS = 64


class VllmAdapter:
    """See `EngineAdapter`. `block_tokens` is for stores that do not say how long a block is."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self._block_tokens = block_tokens or 0
        self._told: dict[int, RawGroupSeen] = {}

    def decode(self, payload: bytes) -> Decoded:
        return decode_batch(payload, FIELDS_OF, self._read, HARMLESS_FIELDS)

    def _read(self, event: Fields) -> Said:
        if event.values.get("block_hashes") == []:
            return  # a window that moved on without a block of its own says nothing
        match event.tag:
            case "BlockStored":
                yield from self._stored(event.values)
            case "BlockRemoved":
                tier, *problems = tier_in(event.values)
                group = small_integer(event.values, "group_idx")
                removed = RawRemoved(engine_hashes(event.values.get("block_hashes")), tier, group)
                yield from problems
                yield removed
            case _:
                yield RawCleared(Tier.hbm)

    def _stored(self, values: dict[str, Any]) -> Said:
        """Read all fields before anything is said: a broken event says nothing."""
        hashes = engine_hashes(values.get("block_hashes"))
        above = values.get("parent_block_hash")
        parent = None if above is None else engine_hash(above)
        group = small_integer(values, "group_idx")
        said_tokens = small_integer(values, "block_size")
        block_tokens = said_tokens or self._block_tokens
        seen = _group_seen(values, group, said_tokens or self._known_tokens(group))
        tier, *problems = tier_in(values)
        if not isinstance(values.get("lookahead_token_ids") or [], list):
            # at its place in an array stands another field than the one that we know
            del values["lookahead_token_ids"]
            problems.append(BadValue(UNKNOWN_FIELD, "BlockStored.lookahead_token_ids"))
        tokens, lookahead, identity = b"", b"", Identity()
        try:
            tokens = tokens_in(values, len(hashes), block_tokens)
            lookahead = lookahead_in(values, len(hashes)) if tokens else b""
            lookahead_tokens = len(lookahead) // 4 // len(hashes)
            identity = identity_of(values, len(hashes), block_tokens, lookahead_tokens)
        except BadValue as problem:
            # without its tokens it holds the blocks and says nothing of what they are
            problems.append(problem)
            tokens = lookahead = b""
        if seen is not None and self._is_news(seen):
            self._told[group] = seen
            yield seen
        yield from problems
        fields = (
            *(hashes, parent, tokens, tier, identity.lora, identity.cache_salt),
            *(identity.extras, FIRST_TOKEN if identity.extras else 0, group),
        )
        yield RawStoredAhead(*fields, lookahead) if lookahead else RawStored(*fields)

    def _known_tokens(self, group: int) -> int:
        """Return how long a group's blocks are where a store without tokens does not say it."""
        told = self._told.get(group)
        return self._block_tokens if told is None else told.block_tokens

    def _is_news(self, seen: RawGroupSeen) -> bool:
        told = self._told.get(seen.group)
        return len(self._told) < MAX_GROUPS if told is None else told != seen


def tokens_in(values: dict[str, Any], num_blocks: int, block_tokens: int) -> bytes:
    """Return a store's tokens, empty where it has none; BadValue unless they are whole blocks."""
    token_ids = values.get("token_ids")
    if not token_ids:
        return b""
    tokens = packed_tokens(token_ids)
    if len(tokens) != 4 * num_blocks * block_tokens:
        reason = f"{len(token_ids)} tokens for {num_blocks} blocks of {block_tokens}"
        raise BadValue("token_count", reason)
    return tokens


def lookahead_in(values: dict[str, Any], num_blocks: int) -> bytes:
    """Return the tokens behind each block that its hash covers; empty where it covers none.

    BadValue unless there are equally many for each block: a window that is not full names nothing.
    """
    lists = values.get("lookahead_token_ids")
    if lists is None:
        return b""
    if not all(isinstance(each, list) for each in lists):
        raise BadValue("malformed", "lookahead_token_ids is no list of lists")
    if len(lists) != num_blocks or len(set(map(len, lists))) != 1:
        sizes = sorted(set(map(len, lists)))[:4]
        reason = f"lookahead of {len(lists)} blocks, {sizes} tokens each, for {num_blocks} blocks"
        raise BadValue("lookahead", reason)
    if len(lists[0]) > MAX_LOOKAHEAD_TOKENS:
        raise BadValue("lookahead", f"{len(lists[0])} tokens behind a block")
    return packed_tokens([token for each in lists for token in each])


def tier_in(values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the tier, and behind it the problem of a medium that nobody knows."""
    medium = text(values, "medium")
    tier = tier_of(medium, text(values, "locality"))
    if tier is None:
        return Tier.other, BadValue("unknown_medium", f"medium {medium!r:.40}")
    return (tier,)


def small_integer(values: dict[str, Any], key: str) -> int:
    """Return a number that may be missing or nil, then 0; BadValue for anything else."""
    value = integer(values, key) or 0
    if not 0 <= value < 2**31:
        raise BadValue("malformed", f"{key} is out of range")
    return value


def _group_seen(values: dict[str, Any], group: int, block_tokens: int) -> RawGroupSeen | None:
    """Return what the event says of its group.

    A version that numbers groups without saying their kind leaves us to expect the most of each;
    an event without a number is of an engine that has one group.
    """
    if values.get("group_idx") is None:
        return None
    kind = text(values, "kv_cache_spec_kind") or "unknown"
    window = small_integer(values, "kv_cache_spec_sliding_window")
    return RawGroupSeen(group, kind, window, block_tokens)
