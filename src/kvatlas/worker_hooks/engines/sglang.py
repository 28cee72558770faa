"""SGLang's KV events, 0.4 to 0.5: arrays up to 0.5.18, maps from 0.5.20.

Its hashes are signed 64-bit integers, the first bytes of a digest that salt and adapter went into
before. Versions up to 0.5.18 do not say the salt: blocks of a salted prompt look like plain ones
there, under hashes of their own. The last page of a prompt may be shorter than the others; it has
no name and is not held.
"""

from typing import Any

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import Decoded
from kvatlas.worker_hooks.engines.msgpack_batches import Fields, Said, decode_batch
from kvatlas.worker_hooks.engines.objects import BadValue, engine_hash, engine_hashes, text
from kvatlas.worker_hooks.engines.vllm import small_integer, tier_in, tokens_in
from kvatlas.worker_hooks.raw_events import RawCleared, RawRemoved, RawStored

FIELDS_OF = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        #: a map with the salt in some versions of the array, where vLLM has the adapter's name
        "metadata",
        "cache_salt",
        "session_id",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
#: fields that change nothing about what a block is; one that is in neither list makes the instance
#: doubtful
HARMLESS_FIELDS = frozenset(["event_id", "locality", "priority", "timestamp"])


class SglangAdapter:
    """See `EngineAdapter`. Without `block_tokens` the longest page so far is a whole one."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self._page_tokens, self._is_given = block_tokens or 0, block_tokens is not None

    def decode(self, payload: bytes) -> Decoded:
        return decode_batch(payload, FIELDS_OF, self._read, HARMLESS_FIELDS)

    def _read(self, event: Fields) -> Said:
        match event.tag:
            case "BlockStored":
                yield from self._stored(event.values)
            case "BlockRemoved":
                tier, *problems = tier_in(event.values)
                removed = RawRemoved(engine_hashes(event.values.get("block_hashes")), tier)
                yield from problems
                yield removed
            case _:
                yield RawCleared(Tier.hbm)

    def _stored(self, values: dict[str, Any]) -> Said:
        hashes = engine_hashes(values.get("block_hashes"))
        above = values.get("parent_block_hash")
        parent = None if above is None else engine_hash(above)
        page_tokens = small_integer(values, "block_size")
        tier, *problems = tier_in(values)
        self._learn(page_tokens, len(hashes), values.get("token_ids"))
        if 0 < page_tokens < self._page_tokens:
            raise BadValue("partial_block", f"a page of {page_tokens} tokens")
        tokens, salt, lora = b"", None, None
        try:
            tokens = tokens_in(values, len(hashes), page_tokens)
            salt, lora = _salt(values), text(values, "lora_name")
            if lora is None and values.get("lora_id") is not None:
                raise BadValue("unnamed_lora", "an adapter without a name")
        except BadValue as problem:
            problems.append(problem)
            tokens = b""
        yield from problems
        yield RawStored(hashes, parent, tokens, tier, lora, salt)

    def _learn(self, page_tokens: int, num_pages: int, token_ids: Any) -> None:
        """Believe a page's length if its tokens bear it out: one lie would end all others."""
        is_borne_out = isinstance(token_ids, list) and len(token_ids) == num_pages * page_tokens
        if not self._is_given and is_borne_out:
            self._page_tokens = max(self._page_tokens, page_tokens)


def _salt(values: dict[str, Any]) -> str | None:
    metadata = values.get("metadata")
    if metadata is None:
        return text(values, "cache_salt")
    if not isinstance(metadata, dict):
        raise BadValue("unknown_extra", f"metadata of type {type(metadata).__name__}")
    return text(metadata, "cache_salt") or text(values, "cache_salt")
