"""What an engine says, as it travels through the ring: msgpack arrays, tag first.

An engine hash is whatever handle the engine has for a block; nothing is read into it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.errors import InvalidBlock, MalformedEvent
from kvatlas.schemas.hashing import Extra
from kvatlas.schemas.ids import Tier

EngineHash = int | bytes
#: beyond it no prompt reaches, and offsets in blocks still fit their encoding
_Position = Annotated[int, Meta(ge=0, le=2**40)]


class RawStored(Struct, frozen=True, array_like=True, tag="stored", gc=False):
    """The engine holds blocks of one chain now.

    `tokens` are u32 LE, a full block for each hash; empty where the engine names blocks by its
    hashes alone: these are what the engine has told of them before, or will. `parent` is that of
    the first block, None at the beginning of a prompt. `extras` refer to positions of the prompt,
    in which tokens[0] is at `first_token`. LoRA and salt matter without a parent only: a chain
    stays in its namespace.
    """

    engine_hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: bytes
    tier: Tier = Tier.hbm
    lora: str | None = None
    cache_salt: str | None = None
    extras: tuple[Extra, ...] = ()
    first_token: _Position = 0
    group: int = 0

    @property
    def lookahead(self) -> bytes:
        """The tokens behind each block that its hash covers; see RawStoredAhead."""
        return b""


class RawStoredAhead(RawStored, frozen=True, array_like=True, tag="stored_ahead", gc=False):
    """The same of an engine whose hashes cover tokens behind a block (ADR-0024).

    `ahead` has, for each block in turn, equally many of these as u32 LE.
    """

    ahead: bytes = b""

    @property
    def lookahead(self) -> bytes:
        return self.ahead


class RawRemoved(Struct, frozen=True, array_like=True, tag="removed", gc=False):
    """The engine no longer holds blocks in a tier."""

    engine_hashes: tuple[EngineHash, ...]
    tier: Tier = Tier.hbm
    group: int = 0


class RawCleared(Struct, frozen=True, array_like=True, tag="cleared", gc=False):
    """A tier is empty now; every tier if None."""

    tier: Tier | None = None


class RawListed(Struct, frozen=True, array_like=True, tag="listed", gc=False):
    """Since it was asked, the engine has told everything that it holds, if `complete`."""

    complete: bool


class RawLost(Struct, frozen=True, array_like=True, tag="lost", gc=False):
    """So many events never arrived. A listing follows if `listing_follows`."""

    num_events: int
    listing_follows: bool


class RawGroupSeen(Struct, frozen=True, array_like=True, tag="group", gc=False):
    """What a KV group is for; told before the first block of it, again when it changes.

    `kind` is the engine's word, such as `full_attention` or `sliding_window`. A window is in
    tokens; 0 where the kind has none.
    """

    group: int
    kind: str
    window_tokens: int = 0
    block_tokens: int = 0


class RawRestarted(Struct, frozen=True, array_like=True, tag="restarted", gc=False):
    """The engine began anew: it holds nothing, and what follows is of another incarnation."""

    reason: str


class RawDoubted(Struct, frozen=True, array_like=True, tag="doubted", gc=False):
    """Whoever listens to the engine has missed something for good; an empty reason takes it back.

    Until then what is told counts, but not as exact.
    """

    reason: str


class RawForgotten(Struct, frozen=True, array_like=True, tag="forgotten", gc=False):
    """What was held when the last doubt began and was not stored since is held no longer."""


class RawHeld(Struct, frozen=True, array_like=True, tag="held", gc=False):
    """How many (hash, group) pairs the engine's own block map has in `tier`, right now."""

    num_pairs: int
    tier: Tier = Tier.hbm


class RawEngineBatch(Struct, frozen=True, array_like=True, tag="engine", gc=False):
    """A batch in the engine's own format, as the adapter of that name reads it."""

    engine: str
    payload: bytes


RawEvent = (
    RawStored
    | RawStoredAhead
    | RawRemoved
    | RawCleared
    | RawListed
    | RawLost
    | RawGroupSeen
    | RawRestarted
    | RawDoubted
    | RawForgotten
    | RawHeld
    | RawEngineBatch
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RawEvent] = msgspec.msgpack.Decoder(RawEvent)


def encode_raw(event: RawEvent) -> bytes:
    """Return the record of an event; raises TypeError or OverflowError for foreign values."""
    return _encoder.encode(event)


def decode_raw(record: bytes) -> RawEvent:
    """Return the event of a record, or raise MalformedEvent."""
    try:
        return _decoder.decode(record)
    except (msgspec.DecodeError, RecursionError, InvalidBlock) as error:
        raise MalformedEvent(str(error)) from error
