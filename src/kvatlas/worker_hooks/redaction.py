"""Takes prompts, tenants and sessions out of a recording, so that it still decodes to the same.

Each block's tokens become as many pseudo tokens, drawn from a keyed hash of them: equal blocks stay
equal, so chains, copies and counts stay what they were, and without the key nobody can even test a
guess. Salts, adapters, sessions and every text in a field that is not known to be harmless become
pseudonyms, each text the same one everywhere. The key is forgotten with the Redactor.

Engine hashes, counts, media and topics are kept. An engine that hashes without a secret seed (vLLM
from 0.30) lets whoever has the whole prefix of a block confirm it by its hash.
"""

import hashlib
import secrets
import struct
from typing import Any

import msgspec

from kvatlas.worker_hooks.engines.objects import is_json

#: a byte that is no msgpack: what cannot be read is counted later and gives nothing away
UNREADABLE = b"\xc1"
_TOKEN_KEYS = frozenset(["token_ids", "tokens"])
#: kept as they are, whatever their type
_KEPT_KEYS = frozenset(
    [
        *("type", "block_hashes", "parent_block_hash", "block_size", "medium", "group_idx"),
        *("lora_id", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
        *("ownership", "event_type", "seq_hashes", "parent_hash", "block_hash", "model_name"),
        *("backend_id", "instance_id", "tier", "backend", "key", "chunk_hash", "hash"),
        *("hash_algo", "timestamp", "num_blocks_per_cache_level", "is_eagle"),
    ]
)
#: objects and lists of which the fields are looked at one by one
_OPENED_KEYS = frozenset(["data", "blocks", "cache_level", "events", "entries"])
#: words that only say what stands beside them
_TAGS = frozenset(["lora", "cache_salt", "mm", "prompt_embeds"])
#: positions in an array event that are kept: hashes, parent, block size, lora_id, medium, group...
_STORED_KEPT = frozenset([0, 1, 2, 4, 5, 6, 9, 10, 11])
_STORED_TOKENS = 3


#: what a group's kind may be; other engines have text of a request at its place
_KINDS = frozenset(
    [
        "full_attention",
        "mla_attention",
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "sink_full_attention",
        "encoder_only_attention",
        "cross_attention",
        "unknown",
    ]
)


def _says_nothing(position: int, item: Any) -> bool:
    """Say whether a kept position holds what it holds in vLLM, and nothing of a request."""
    if position in (5, 9, 11):
        return item is None or isinstance(item, int)
    if position == 10:
        return item is None or item in _KINDS
    return not isinstance(item, dict)


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
        events = []
        for event in row["events"]:
            if event[0] == "stored":
                event = [*event[:5], *(None for _ in event[5:])]
            elif event[0] == "namespace" and event[5:] and event[5] is not None:
                event = [*event[:5], self.pseudonym(event[5]), *event[6:]]
            elif event[0] == "up":
                event = [event[0]]  # adapters and addresses
            events.append(event)
        return {**row, "events": events}

    # --- batches ----------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        """Redact an object, a list of objects, or a batch `[ts, events, rank, ...]`."""
        if isinstance(value, dict):
            return self._fields(value)
        is_batch = isinstance(value, list) and len(value) >= 2 and isinstance(value[1], list)
        if is_batch and not isinstance(value[0], dict | list):
            rest = [self._unknown(item) for item in value[2:]]
            return [self._unknown(value[0]), [self._event(one) for one in value[1]], *rest]
        if isinstance(value, list):
            return [self._event(item) for item in value]
        return self._unknown(value)

    def _event(self, event: Any) -> Any:
        if isinstance(event, bytes):  # some wrap each event
            try:
                return msgspec.msgpack.encode(self._event(msgspec.msgpack.decode(event)))
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
                return UNREADABLE
        if isinstance(event, dict):
            return self._fields(event)
        if isinstance(event, list) and event and isinstance(event[0], str):
            return self._array_event(event)
        return self._unknown(event)

    def _fields(self, fields: dict[Any, Any]) -> dict[Any, Any]:
        size = fields.get("block_size")
        size = size if isinstance(size, int) and not isinstance(size, bool) else 0
        redacted = {}
        for key, value in fields.items():
            if key in _TOKEN_KEYS:
                redacted[key] = self.tokens(value, size)
            elif key in _KEPT_KEYS and not isinstance(value, dict):
                redacted[key] = value
            elif key == "extra_keys":
                redacted[key] = self._extra(value)
            elif key in _OPENED_KEYS or key in _KEPT_KEYS:
                redacted[key] = self._opened(value)
            else:
                redacted[key] = self._unknown(value)
        return redacted

    def _opened(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._fields(value)
        if isinstance(value, list):
            # entries of a key alone are the engine's own hashes
            return [self._fields(one) if isinstance(one, dict) else one for one in value]
        return value

    def _array_event(self, event: list[Any]) -> list[Any]:
        if event[0] == "BlockRemoved":
            return [*event[:4], *(self._unknown(item) for item in event[4:])]
        if event[0] != "BlockStored":
            return [event[0], *(self._unknown(item) for item in event[1:])]
        size = event[4] if len(event) > 4 and isinstance(event[4], int) else 0
        redacted = []
        for position, item in enumerate(event):
            if position == _STORED_TOKENS:
                redacted.append(self.tokens(item, size))
            elif position in _STORED_KEPT and _says_nothing(position, item):
                redacted.append(item)
            elif position == 8:
                redacted.append(self._extra(item))
            else:
                redacted.append(self._unknown(item))
        return redacted

    def _extra(self, value: Any) -> Any:
        """Redact extra keys: tags and offsets stay, so that their kind does."""
        if isinstance(value, list):
            is_tagged = len(value) > 1 and isinstance(value[0], str) and value[0] in _TAGS
            head = value[:1] if is_tagged else []
            return [*head, *(self._extra(item) for item in value[len(head) :])]
        return self._unknown(value)

    def _unknown(self, value: Any) -> Any:
        """Redact what nobody has said to be harmless; numbers alone give nothing away."""
        if isinstance(value, str):
            return self.pseudonym(value)
        if isinstance(value, bytes):
            return self._stream(value, len(value))
        if isinstance(value, dict):
            # an object in a field of an older version's place may be what names the salt
            return {key: self._unknown(item) for key, item in value.items()}
        if isinstance(value, list):
            return self.tokens(value, 0) if _is_numbers(value) else [*map(self._unknown, value)]
        return value

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
                key: self._pseudo_token(one, word) if key == "token_id" else self._unknown(one)
                for key, one in token.items()
            }
        return None

    def _stream(self, content: bytes, num_bytes: int) -> bytes:
        return hashlib.shake_256(self._digest(content)).digest(num_bytes)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=32).digest()


def _is_numbers(values: list[Any]) -> bool:
    return len(values) > 0 and all(isinstance(one, int | float) for one in values)
