"""What beside tokens names a block of vLLM: adapter, salt, images, embeddings.

`extra_keys` has an entry a block, nil or a list. The engine hashes its elements with their kind but
publishes them bare, in the order adapter, images, salt, embeddings; an open change would add the
kind. A salt stands at the first block of a prompt only. Where hashes cover tokens behind a block, a
block's entry has what its whole window touches, so an image may begin behind the block.
"""

from typing import Any, NamedTuple

from kvatlas.schemas.hashing import Extra
from kvatlas.worker_hooks.engines.objects import BadValue, text

#: where the event's tokens are said to begin when offsets matter, so that an image which began
#: before them has an offset as well
FIRST_TOKEN = 2**32
_MAX_OFFSET = 2**31


class Identity(NamedTuple):
    """What an event's blocks are of, beside their tokens."""

    lora: str | None = None
    cache_salt: str | None = None
    extras: tuple[Extra, ...] = ()


class _Spans:
    """Images by (id, offset), each reaching to the end of the last block that names it.

    One that begins in the lookahead of the last block is a token long: no other block names it.
    """

    def __init__(self, block_tokens: int, lookahead_tokens: int) -> None:
        self._block_tokens, self._lookahead_tokens = block_tokens, lookahead_tokens
        self._ends: dict[tuple[str, str, int], int] = {}

    @property
    def has_lookahead(self) -> bool:
        return self._lookahead_tokens > 0

    def add(self, block: int, kind: str, identifier: str, offset_in_block: int) -> None:
        if offset_in_block >= self._block_tokens + self._lookahead_tokens:
            raise BadValue("unknown_extra", f"an offset of {offset_in_block} is behind its block")
        start = FIRST_TOKEN + block * self._block_tokens + offset_in_block
        end = FIRST_TOKEN + (block + 1) * self._block_tokens
        self._ends[kind, identifier, start] = max(end, start + 1)

    def extras(self) -> tuple[Extra, ...]:
        return tuple(
            Extra(start, kind, identifier, end - start)
            for (kind, identifier, start), end in self._ends.items()
        )


def identity_of(
    values: dict[str, Any], num_blocks: int, block_tokens: int, lookahead_tokens: int = 0
) -> Identity:
    """Return the identity of a store's blocks; raises BadValue where it cannot be known."""
    lora = text(values, "lora_name")
    if lora is None and values.get("lora_id") is not None:
        raise BadValue("unnamed_lora", "an adapter without a name")
    keys = values.get("extra_keys")
    if keys is None:
        return Identity(lora)
    if not isinstance(keys, list) or len(keys) != num_blocks:
        raise BadValue("unknown_extra", f"extra_keys has not one entry for each of {num_blocks}")
    is_root = values.get("parent_block_hash") is None
    spans = _Spans(block_tokens, lookahead_tokens)
    salt: str | None = None
    for block, entry in enumerate(keys):
        left = _without_lora(entry, lora)
        for element in left:
            found = _read_element(block, element, spans)
            if found is None:
                continue
            if block or not is_root or salt is not None:
                raise BadValue("unknown_extra", f"text in block {block} that is no salt")
            salt = found
    return Identity(lora, salt, spans.extras())


def _without_lora(entry: Any, lora: str | None) -> list[Any]:
    """Return a block's elements but the adapter's name, which stands first."""
    if entry is None:
        return []
    if not isinstance(entry, list):
        raise BadValue("unknown_extra", "an entry of extra_keys is a list")
    if lora is not None and entry and entry[0] in (lora, ["lora", lora]):
        return entry[1:]
    return entry


def _read_element(block: int, element: Any, spans: _Spans) -> str | None:
    """Return a salt; add anything else to the spans."""
    match element:
        case str() | ["cache_salt", str()]:
            return element if isinstance(element, str) else element[1]
        case [str(identifier), int(offset)] | ["mm", str(identifier), int(offset)] if (
            -_MAX_OFFSET < offset < _MAX_OFFSET
        ):
            spans.add(block, "mm", identifier, offset)
        case bytes() | ["prompt_embeds", bytes()] if spans.has_lookahead:
            # it is a digest of the whole window, of which no prompt's extras say the parts
            raise BadValue("unknown_extra", "prompt embeddings under lookahead hashes")
        case bytes() | ["prompt_embeds", bytes()]:
            content = element if isinstance(element, bytes) else element[1]
            spans.add(block, "prompt_embeds", content.hex(), 0)
        case _:
            reason = f"an extra key of a kind that nobody knows: {type(element).__name__}"
            raise BadValue("unknown_extra", reason)
    return None
