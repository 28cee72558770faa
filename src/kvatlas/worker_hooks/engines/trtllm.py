"""TensorRT-LLM, which has two formats.

Streaming: vLLM's batches in msgpack with `mm_keys` besides. Pull API: JSON, one object or a list.

    {"event_id", "window_size", "attention_dp_rank", "layer_group_id", "data": {"type": ...}}
    created   num_blocks_per_cache_level
    stored    parent_hash, blocks: [{block_hash, tokens: [{token_id, token_extra_id}], cache_level}]
    removed   block_hashes                     from whatever level
    updated   block_hash, cache_level {old_value, new_value}

Level 0 is the GPU, 1 the host. Partial blocks are told as well; only full ones have identity.
"""

from typing import Any

import msgspec

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import Decoded, Rejected, unread_fields
from kvatlas.worker_hooks.engines.objects import (
    BadValue,
    decode_any,
    engine_hash,
    engine_hashes,
    event_objects,
    integer,
    is_json,
    packed_tokens,
)
from kvatlas.worker_hooks.engines.vllm import VllmAdapter
from kvatlas.worker_hooks.raw_events import (
    EngineHash,
    RawEvent,
    RawGroupSeen,
    RawRemoved,
    RawStored,
)

_TIERS = {0: Tier.hbm, 1: Tier.dram}
#: fields that are read or change nothing about what a block is, by the object that they are of;
#: any other makes the instance doubtful
_FIELDS = frozenset(
    ["event_id", "data", "window_size", "attention_dp_rank", "layer_group_id", "hash_algo"]
)
_DATA_FIELDS = frozenset(
    [
        *("type", "num_blocks_per_cache_level", "parent_hash", "blocks", "block_hashes"),
        *("block_hash", "cache_level", "priority", "hash_algo", "layer_group_id"),
    ]
)
_BLOCK_FIELDS = frozenset(
    [
        *("type", "block_hash", "tokens", "cache_level", "priority", "mm_keys", "lora_id"),
        *("cache_salt", "cache_salt_id"),
    ]
)
_TOKEN_FIELDS = frozenset(["type", "token_id", "token_extra_id"])
_MAX_GROUP = 2**31


class _Block:
    """A block of a store, as it was told."""

    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise BadValue("malformed", "a block that is no object")
        self.hash = engine_hash(fields.get("block_hash"))
        level = integer(fields, "cache_level", 0)
        self.tier = _TIERS.get(0 if level is None else level, Tier.other)
        tokens = fields.get("tokens") or []
        if not isinstance(tokens, list):
            raise BadValue("malformed", "tokens are no list")
        self.num_tokens = len(tokens)
        self.tokens, self.problem = b"", ("", "")
        try:
            self.tokens = _tokens(tokens, fields)
        except BadValue as error:
            self.problem = (error.kind, str(error))


class TrtllmAdapter:
    """Reads one rank's events, or the whole answer of the pull API.

    Without `block_tokens` the longest block seen so far is taken as a full one.
    """

    def __init__(self, block_tokens: int | None = None) -> None:
        self._streamed = VllmAdapter()
        self._block_tokens, self._is_given = block_tokens or 0, block_tokens is not None
        #: window -> group, in the order seen
        self._groups: dict[int | None, int] = {}
        self._told_groups: dict[int, RawGroupSeen] = {}
        self._has_host_level = False

    def decode(self, payload: bytes) -> Decoded:
        try:
            return self._pulled(payload) if is_json(payload) else self._without_mm_keys(payload)
        except RecursionError as error:
            raise MalformedBatch("nested too deeply") from error

    # --- streaming --------------------------------------------------------------------------

    def _without_mm_keys(self, payload: bytes) -> Decoded:
        """Read vLLM's format; blocks with images in them keep their residency only.

        Where in a block an image begins is not told, and without it nobody can name the block.
        """
        if b"mm_keys" not in payload:
            return self._streamed.decode(payload)
        batch = decode_any(payload)
        rejected = []
        if isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[1], list):
            for position, event in enumerate(batch[1]):
                if isinstance(event, dict) and _has_any(event.pop("mm_keys", None)):
                    event["token_ids"] = []
                    rejected.append(Rejected(position, "unknown_extra", "multimodal keys"))
        decoded = self._streamed.decode(msgspec.msgpack.encode(batch))
        together = sorted([*decoded.rejected, *rejected], key=lambda one: one.position)
        return decoded._replace(rejected=together)

    # --- pull API ---------------------------------------------------------------------------

    def _pulled(self, payload: bytes) -> Decoded:
        objects = event_objects(decode_any(payload))
        if objects and not any(isinstance(fields, dict) for fields in objects):
            raise MalformedBatch("no event of TensorRT-LLM")
        self._learn(objects)
        events: list[tuple[int, RawEvent]] = []
        rejected: list[Rejected] = []
        rank: int | None = None
        for position, fields in enumerate(objects):
            try:
                if not isinstance(fields, dict):
                    raise BadValue("malformed", "an event that is no object")
                own_rank = integer(fields, "attention_dp_rank")
                if own_rank is not None and not 0 <= own_rank < 2**32:
                    raise BadValue("malformed", "a rank outside 32 bits")
                if rank is not None and own_rank not in (None, rank):
                    raise BadValue("mixed_ranks", f"rank {own_rank} in an answer of rank {rank}")
                told = self._event(position, fields, rejected)
                rank = own_rank if rank is None else rank
                events += [(position, event) for event in told]
            except BadValue as error:
                rejected.append(Rejected(position, error.kind, str(error)))
        return Decoded([e for _, e in events], rejected, rank, tuple(p for p, _ in events))

    def _event(
        self, position: int, fields: dict[Any, Any], rejected: list[Rejected]
    ) -> list[RawEvent]:
        data = fields.get("data")
        if not isinstance(data, dict):
            raise BadValue("malformed", "an event without data")
        group = self._group(fields)
        match data.get("type"):
            case "created":
                self._note_levels(data)
                told: list[RawEvent] = []
            case "stored":
                told = self._stored(position, data, group, rejected)
            case "removed":
                # no level is told: it left the one that it was in
                hashes = engine_hashes(data.get("block_hashes"))
                tiers = [Tier.hbm, Tier.dram] if self._has_host_level else [Tier.hbm]
                told = [RawRemoved(hashes, tier, group) for tier in tiers]
            case "updated":
                told = self._updated(data, group)
            case kind:
                raise BadValue("unknown_event", f"event type {kind!r:.40}")
        rejected += _unread(position, fields, data)
        return [*self._group_news(), *told]

    def _stored(
        self, position: int, data: dict[Any, Any], group: int, rejected: list[Rejected]
    ) -> list[RawEvent]:
        if not isinstance(data.get("blocks"), list):
            raise BadValue("malformed", "a store without blocks")
        parent_value = data.get("parent_hash")
        parent = None if parent_value is None else engine_hash(parent_value)
        told: list[RawEvent] = []
        run: list[_Block] = []
        has_tokens = True
        for fields in data["blocks"]:
            block = _Block(fields)
            if 0 < block.num_tokens < self._block_tokens:
                reason = f"{block.num_tokens} tokens of {self._block_tokens}"
                rejected.append(Rejected(position, "partial_block", reason))
                break  # nothing follows a block that is not full
            if block.problem[0]:
                rejected.append(Rejected(position, *block.problem))
            if run and block.tier is not run[0].tier:
                told.append(self._run(run, parent, group, has_tokens))
                parent, run = run[-1].hash, []
            # what follows a block of unknown content has no name either
            has_tokens = has_tokens and bool(block.tokens)
            if block.tier is Tier.other:
                rejected.append(Rejected(position, "unknown_medium", "an unknown cache level"))
            self._has_host_level |= block.tier is Tier.dram
            run.append(block)
        return [*told, self._run(run, parent, group, has_tokens)] if run else told

    def _run(
        self, run: list[_Block], parent: EngineHash | None, group: int, has_tokens: bool
    ) -> RawStored:
        tokens = b"".join(block.tokens for block in run) if has_tokens else b""
        hashes = tuple(block.hash for block in run)
        return RawStored(hashes, parent, tokens, run[0].tier, group=group)

    def _updated(self, data: dict[Any, Any], group: int) -> list[RawEvent]:
        levels = data.get("cache_level")
        if levels is None:
            return []  # another priority
        if not isinstance(levels, dict):
            raise BadValue("malformed", "cache_level is no object")
        handle = (engine_hash(data.get("block_hash")),)
        old, new = (
            _TIERS.get(integer(levels, key, -1) or 0, Tier.other)
            for key in ("old_value", "new_value")
        )
        if old is new:
            return []
        self._has_host_level |= Tier.dram in (old, new)
        # first the new place: between the two the block would be forgotten
        return [RawStored(handle, None, b"", new, group=group), RawRemoved(handle, old, group)]

    def _group(self, fields: dict[Any, Any]) -> int:
        """Return the group: a layer group by its number, windows in the order seen."""
        layers = integer(fields, "layer_group_id")
        if layers is not None:
            if not 0 <= layers < _MAX_GROUP:
                raise BadValue("malformed", "layer_group_id out of range")
            return layers
        window = integer(fields, "window_size")
        return self._groups.setdefault(window, len(self._groups))

    def _group_news(self) -> list[RawEvent]:
        """Say what the windows are for once there are several: the widest sees all of a prompt."""
        windows = [window for window in self._groups if window is not None]
        told: list[RawEvent] = []
        for window, group in self._groups.items() if len(windows) > 1 else ():
            is_full = window is None or window == max(windows)
            seen = RawGroupSeen(
                group,
                "full_attention" if is_full else "sliding_window",
                0 if is_full or window is None else window,
                self._block_tokens,
            )
            if self._told_groups.get(group) != seen:
                self._told_groups[group] = seen
                told.append(seen)
        return told

    def _note_levels(self, data: dict[Any, Any]) -> None:
        levels = data.get("num_blocks_per_cache_level")
        if isinstance(levels, list) and len(levels) > 1:
            self._has_host_level |= bool(levels[1])

    def _learn(self, objects: list[Any]) -> None:
        if self._is_given:
            return
        for fields in objects:
            data = fields.get("data") if isinstance(fields, dict) else None
            blocks = data.get("blocks") if isinstance(data, dict) else None
            for block in blocks if isinstance(blocks, list) else ():
                tokens = block.get("tokens") if isinstance(block, dict) else None
                if isinstance(tokens, list):
                    self._block_tokens = max(self._block_tokens, len(tokens))


def _unread(position: int, fields: dict[Any, Any], data: dict[Any, Any]) -> list[Rejected]:
    """Return the rejections of fields that nobody reads, each once however many blocks have it."""
    kind = str(data.get("type"))
    found = unread_fields(position, "event", fields, _FIELDS)
    found += unread_fields(position, kind, data, _DATA_FIELDS)
    blocks = data.get("blocks")
    beyond: dict[Any, Any] = {}
    tokens_beyond: dict[Any, Any] = {}
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, dict):
            continue
        _note(beyond, block, _BLOCK_FIELDS)
        tokens = block.get("tokens")
        for token in tokens if isinstance(tokens, list) else ():
            if isinstance(token, dict):
                _note(tokens_beyond, token, _TOKEN_FIELDS)
    found += unread_fields(position, "block", beyond, _BLOCK_FIELDS)
    return found + unread_fields(position, "token", tokens_beyond, _TOKEN_FIELDS)


def _note(beyond: dict[Any, Any], fields: dict[Any, Any], read: frozenset[str]) -> None:
    """Note fields that are not read; one with a value in any object has one."""
    for name in fields.keys() - read:
        if beyond.get(name) is None:
            beyond[name] = fields[name]


def _tokens(tokens: list[Any], fields: dict[Any, Any]) -> bytes:
    """Return a block's tokens where they are all that makes it what it is; raises BadValue."""
    if _has_any(fields.get("mm_keys")):
        raise BadValue("unknown_extra", "multimodal keys")
    if fields.get("lora_id") is not None:
        raise BadValue("unnamed_lora", "an adapter without a name")
    if fields.get("cache_salt") or fields.get("cache_salt_id"):
        raise BadValue("unknown_extra", "a salted block")
    ids = []
    for token in tokens:
        if isinstance(token, dict):
            if token.get("token_extra_id"):
                raise BadValue("unknown_extra", "tokens of an embedding table")
            token = token.get("token_id")
        ids.append(token)
    return packed_tokens(ids)


def _has_any(keys: Any) -> bool:
    """Return whether any block has multimodal keys."""
    return any(map(_has_any, keys)) if isinstance(keys, list) else bool(keys)
