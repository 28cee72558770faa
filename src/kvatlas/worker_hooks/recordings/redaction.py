"""Takes prompts, tenants and sessions out of a recording, so that it still decodes to the same.

Each block's tokens become as many pseudo tokens, drawn from a keyed hash of them: equal blocks stay
equal, so chains, copies and counts stay what they were, and without the key nobody can even test a
guess. Salts, adapters, sessions and every text, name of a field included, that is not known to be
harmless become pseudonyms, each text the same one everywhere; a number nobody knows becomes 1, or
0 where it was. The key is forgotten with the Redactor.

Engine hashes, counts, media, topics and names of models and workers are kept. An engine that hashes
without a secret seed (vLLM from 0.30) lets whoever has the whole prefix of a block confirm it by
its hash.
"""

import hashlib
import re
import secrets
import struct
from typing import Any

import msgspec

from kvatlas.schemas.ids import NUM_TIERS
from kvatlas.worker_hooks.engines.media import tier_of
from kvatlas.worker_hooks.engines.objects import is_json

#: a byte that is no msgpack: what cannot be read is counted later and gives nothing away
UNREADABLE = b"\xc1"
_TOKEN_KEYS = frozenset(["token_ids", "tokens"])
#: lists of tokens that lie behind blocks, one a block
_LOOKAHEAD_KEYS = frozenset(["lookahead_token_ids"])
#: the engine's own hashes, in lists and one by one
_HASHES_KEYS = frozenset(["block_hashes", "seq_hashes", "entries"])
_HASH_KEYS = frozenset(
    ["parent_block_hash", "parent_hash", "block_hash", "key", "chunk_hash", "hash"]
)
_NUMBER_KEYS = frozenset(
    [
        *("block_size", "group_idx", "lora_id", "kv_cache_spec_sliding_window", "timestamp", "ts"),
        *("event_id", "seq", "incarnation", "base_block_idx", "dp_rank", "window_size"),
        *("attention_dp_rank", "layer_group_id", "cache_level", "old_value", "new_value"),
        *("is_eagle", "shared", "priority"),
    ]
)
#: words from a vocabulary; another one is nobody's
_WORD_KEYS = frozenset(
    ["type", "event_type", "medium", "tier", "kv_cache_spec_kind", "locality", "ownership"]
)
#: who speaks, as topics say it as well
_NAME_KEYS = frozenset(["model_name", "backend_id", "instance_id", "backend"])
#: objects and lists of which the fields are looked at one by one
_OPENED_KEYS = frozenset(["data", "blocks", "cache_level", "events"])
_EXTRA_KEYS = frozenset(["extra_keys", "mm_keys"])
_LEVELS_KEYS = frozenset(["num_blocks_per_cache_level"])
#: fields of which the name is kept and nothing else
_EMPTIED_KEYS = frozenset(
    [
        *("lora_name", "cache_salt", "cache_salt_id", "session_id", "metadata", "hash_algo"),
        *("additional_salt", "tenant_id", "token_id", "token_extra_id"),
    ]
)
#: how a field is redacted -> the fields; what is in none is a field that nobody knows
_KEYS_OF_KIND = {
    "hashes": _HASHES_KEYS,
    "hash": _HASH_KEYS,
    "number": _NUMBER_KEYS,
    "levels": _LEVELS_KEYS,
    "word": _WORD_KEYS,
    "name": _NAME_KEYS,
    "extra": _EXTRA_KEYS,
    "lookahead": _LOOKAHEAD_KEYS,
}
_KNOWN_KEYS = _EMPTIED_KEYS.union(_TOKEN_KEYS, _OPENED_KEYS, *_KEYS_OF_KIND.values())
#: words that only say what stands beside them
_TAGS = frozenset(["lora", "cache_salt", "mm", "prompt_embeds"])
_WORDS = frozenset(
    [
        *("BlockStored", "BlockRemoved", "AllBlocksCleared"),
        *("stored", "removed", "cleared", "created", "updated"),
        *("store", "delete", "access", "config", "l1", "l2", "local"),
        # what a KV group may be
        *("full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba"),
        *("chunked_local_attention", "sink_full_attention", "encoder_only_attention"),
        *("cross_attention", "unknown"),
    ]
)
_STORED_TOKENS = 3
#: position in an array event -> how the field that vLLM has there is redacted; other engines have
#: text of a request at some of them
_STORED = {1: "hashes", 2: "hash", 4: "number", 5: "number", 6: "word", 8: "extra", 9: "number",
           10: "word", 11: "number", 12: "word", 13: "word", 15: "lookahead"}  # fmt: skip
_REMOVED = {1: "hashes", 2: "word", 3: "number", 4: "word", 5: "word"}
#: bytes of a digest; random ones are hardly ever all ASCII
_DIGEST_SIZES = frozenset([8, 16, 20, 28, 32, 48, 64])
_HEX_DIGEST = re.compile(r"(0x)?[0-9A-Fa-f]{8,128}")
_NAME = re.compile(r"[\w.:/@+-]{1,256}")
#: events of our own log -> how many of their leading fields hold no text of a request
_OWN_KEPT = {"stored": 5, "removed": 4, "cleared": 2, "down": 2, "namespace": 8, "resync": 3}
_OWN_KEPT |= {"doubted": 2, "inventory": 7, "digest": 4}
#: of a namespace: the adapter
_OWN_LORA = 5
#: an image begins so far from its block at most
_MAX_OFFSET = 2**31


class Redactor:
    """Redacts the batches of one recording."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)

    def payload(self, payload: bytes) -> bytes:
        """Return a batch with nothing of a prompt in it; unreadable ones become `UNREADABLE`."""
        try:
            if is_json(payload):
                return msgspec.json.encode(self._value(msgspec.json.decode(payload)))
            return msgspec.msgpack.encode(self._value(msgspec.msgpack.decode(payload)))
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            return UNREADABLE

    def pseudonym(self, text: str) -> str:
        """Return what stands for a text; an empty one stays empty."""
        return f"redacted-{self._digest(text.encode())[:6].hex()}" if text else text

    def tokens(self, values: Any, block_tokens: int) -> Any:
        """Return pseudo tokens, drawn a block at a time; what is no token id stays wrong."""
        if not isinstance(values, list):
            return None if values is None else 0
        size = block_tokens if block_tokens > 0 else max(len(values), 1)
        blocks = [values[start : start + size] for start in range(0, len(values), size)]
        return [token for block in blocks for token in self._pseudo_block(block)]

    def own_batch(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of our own log without its tokens, adapters under pseudonyms."""
        return {**row, "events": [self._own_event(event) for event in row["events"]]}

    # --- batches ----------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        """Redact an object, a list of objects, or a batch `[ts, events, rank, ...]`."""
        if isinstance(value, dict):
            return self._fields(value)
        is_batch = isinstance(value, list) and len(value) >= 2 and isinstance(value[1], list)
        if is_batch and not isinstance(value[0], dict | list):
            rank = [self._number(item) for item in value[2:3]]
            rest = [*rank, *map(self._unknown, value[3:])]
            return [self._number(value[0]), [self._event(one) for one in value[1]], *rest]
        if isinstance(value, list):
            return [self._event(item) for item in value]
        return self._unknown(value)

    def _event(self, event: Any) -> Any:
        if isinstance(event, bytes):  # some wrap each event
            try:
                return msgspec.msgpack.encode(self._event(msgspec.msgpack.decode(event)))
            except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
                return UNREADABLE
        if isinstance(event, dict):
            return self._fields(event)
        if isinstance(event, list) and event and isinstance(event[0], str):
            return self._array_event(event)
        return self._unknown(event)

    def _array_event(self, event: list[Any]) -> list[Any]:
        kinds = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(event[0], {})
        redacted = [self._word(event[0])]
        for position, item in enumerate(event[1:], 1):
            if kinds is _STORED and position == _STORED_TOKENS:
                redacted.append(self.tokens(item, _size(event[4] if len(event) > 4 else None)))
            else:
                redacted.append(self._of_kind(kinds.get(position, ""), item))
        return redacted

    def _fields(self, fields: dict[Any, Any]) -> dict[Any, Any]:
        size = _size(fields.get("block_size"))
        return {
            self._field_name(key): self.tokens(value, size)
            if key in _TOKEN_KEYS
            else self._of_kind(_kind_of(key, value), value)
            for key, value in fields.items()
        }

    def _of_kind(self, kind: str, value: Any) -> Any:
        match kind:
            case "hashes" if isinstance(value, list):
                return [self._hash(one) for one in value]
            case "hash" | "hashes":
                return self._hash(value)
            case "number":
                return self._number(value)
            case "word":
                return self._word(value)
            case "name":
                is_name = isinstance(value, str) and _NAME.fullmatch(value)
                return value if is_name else self._unknown(value)
            case "opened":
                return self._opened(value)
            case "levels" if isinstance(value, list):
                return [self._number(one) for one in value[:NUM_TIERS]]
            case "lookahead" if isinstance(value, list):
                return [self.tokens(each, 0) for each in value]
            case "extra":
                return self._extra(value)
            case _:
                return self._unknown(value)

    def _field_name(self, key: Any) -> Any:
        """Return a field's name if it is one that engines use, else what stands for it."""
        if isinstance(key, str):
            return key if key in _KNOWN_KEYS else self.pseudonym(key)
        return self.pseudonym(repr(key))

    def _hash(self, value: Any) -> Any:
        if isinstance(value, int):
            return value
        if isinstance(value, bytes):
            is_digest = len(value) in _DIGEST_SIZES and not value.isascii()
            return value if is_digest else self._stream(value, len(value))
        if isinstance(value, str):
            return value if _HEX_DIGEST.fullmatch(value) else self.pseudonym(value)
        return self._fields(value) if isinstance(value, dict) else self._unknown(value)

    def _number(self, value: Any) -> Any:
        return value if isinstance(value, int | float | None) else self._unknown(value)

    def _word(self, value: Any) -> Any:
        is_word = isinstance(value, str) and (value in _WORDS or tier_of(value) is not None)
        return value if is_word else self._unknown(value)

    def _opened(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._fields(value)
        return [self._event(one) for one in value] if isinstance(value, list) else value

    def _extra(self, value: Any) -> Any:
        """Redact extra keys: tags and offsets stay, so that their kind does."""
        if not isinstance(value, list):
            return self._unknown(value)
        match value:
            case [str(tag), _, *_] if tag in _TAGS:
                return [tag, *self._with_offset(value[1:])]
            case _:
                return self._with_offset(value)

    def _with_offset(self, values: list[Any]) -> list[Any]:
        match values:
            case [str(identifier), int(offset)] if abs(offset) < _MAX_OFFSET:
                return [self.pseudonym(identifier), offset]
            case _:
                return [self._extra(item) for item in values]

    def _unknown(self, value: Any) -> Any:
        """Redact what nobody has said to be harmless; what it was is told, and nothing of it."""
        if isinstance(value, str):
            return self.pseudonym(value)
        if isinstance(value, bytes):
            return self._stream(value, len(value))
        if isinstance(value, dict):
            # an object in a field of an older version's place may be what names the salt
            return {self._field_name(key): self._unknown(item) for key, item in value.items()}
        if isinstance(value, list):
            return [*map(self._unknown, value)]
        if isinstance(value, bool | None):
            return value
        return type(value)(bool(value)) if isinstance(value, int | float) else None

    def _own_event(self, event: list[Any]) -> list[Any]:
        kept = _OWN_KEPT.get(event[0], 1)  # of `up` nothing: it has adapters and addresses
        redacted = event[:kept]
        if event[0] == "namespace" and len(event) > _OWN_LORA and event[_OWN_LORA] is not None:
            redacted[_OWN_LORA] = self.pseudonym(event[_OWN_LORA])
        if event[0] == "stored":
            redacted += [None for _ in event[kept:]]
        return redacted

    # --- keyed hash -------------------------------------------------------------------------

    def _pseudo_block(self, block: list[Any]) -> list[Any]:
        words = struct.iter_unpack("<I", self._stream(repr(block).encode(), 4 * len(block)))
        return [self._pseudo_token(one, word) for one, (word,) in zip(block, words, strict=True)]

    def _pseudo_token(self, token: Any, word: int) -> Any:
        """Return a token of the same kind, so that a reader rejects what it rejected before."""
        if isinstance(token, bool) or token is None:
            return token
        if isinstance(token, int):
            return word if 0 <= token < 2**32 else -1
        if isinstance(token, str):
            return f"{word:08x}"
        if isinstance(token, list):
            return [self._pseudo_token(one, word ^ at) for at, one in enumerate(token)]
        if isinstance(token, dict):
            return {
                self._field_name(key): self._pseudo_token(one, word)
                if key == "token_id"
                else self._unknown(one)
                for key, one in token.items()
            }
        return None

    def _stream(self, content: bytes, num_bytes: int) -> bytes:
        return hashlib.shake_256(self._digest(content)).digest(num_bytes)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=32).digest()


def _size(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _kind_of(key: Any, value: Any) -> str:
    """Return how a field is redacted; "" is for what nobody knows."""
    if not isinstance(key, str) or key in _EMPTIED_KEYS:
        return ""
    if key in _OPENED_KEYS and isinstance(value, dict | list):
        return "opened"
    return next((kind for kind, keys in _KEYS_OF_KIND.items() if key in keys), "")
