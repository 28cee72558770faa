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

    `tokens` are u32 LE, a full block for each hash. `parent` is that of the first block, None at
    the beginning of a prompt. `extras` refer to positions of the prompt, in which tokens[0] is at
    `first_token`. LoRA and salt matter without a parent only: a chain stays in its namespace.
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


RawEvent = RawStored | RawRemoved | RawCleared | RawListed | RawLost

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RawEvent] = msgspec.msgpack.Decoder(RawEvent)


def encode_raw(event: RawEvent) -> bytes:
    """Return the record of an event; raises TypeError or OverflowError for foreign values."""
    return _encoder.encode(event)


def decode_raw(record: bytes) -> RawEvent:
    """Return the event of a record, or raise MalformedEvent."""
    try:
        return _decoder.decode(record)
    except (msgspec.DecodeError, InvalidBlock) as error:
        raise MalformedEvent(str(error)) from error
