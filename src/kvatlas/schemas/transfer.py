"""What a puller and an owner of blocks say to each other about leases.

Request and reply on `kv.lease.<worker>.<rank>`, one msgpack array a message: `[tag, v, ...]`. A
reader ignores trailing fields and refuses a newer major `v` by its number.

  LeaseRequest --> LeaseGranted | LeaseMissing
  LeaseRelease --> LeaseReleased
"""

from enum import StrEnum
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import MalformedBatch, UnsupportedVersion

TRANSFER_VERSION = 1
FINGERPRINT_BYTES = 16
CHECKSUM_BYTES = 8
#: what one request may ask for; an owner's own limit is lower
MAX_LEASE_BLOCKS = 4096

_U64 = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=512)]


class MissingReason(StrEnum):
    """Why an owner grants no lease, or none for the rest of the blocks."""

    not_held = "not_held"
    #: the owner's KV is of another model, layout or precision
    incompatible = "incompatible"
    #: too many leases now; a later try may succeed
    busy = "busy"
    #: the request names another incarnation of the owner
    wrong_epoch = "wrong_epoch"
    #: more blocks than one lease may have
    too_large = "too_large"
    #: owner and requester share no transport
    no_transport = "no_transport"
    #: the owner's transport starts, or starts again; a later try may succeed
    not_ready = "not_ready"
    #: the request cannot be read, or is of a newer version
    malformed = "malformed"


class _Message(Struct, frozen=True, kw_only=True, array_like=True):
    v: Annotated[int, Meta(ge=1)] = TRANSFER_VERSION


class LeaseRequest(_Message, frozen=True, kw_only=True, array_like=True, tag="lease"):
    """Asks to keep the leading held blocks of `hashes` from eviction for `ttl_ms`."""

    fingerprint: Annotated[bytes, Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
    hashes: Annotated[bytes, Meta(min_length=1, max_length=MAX_LEASE_BLOCKS * BLOCK_HASH_BYTES)]
    ttl_ms: Annotated[int, Meta(ge=1, le=3_600_000)]
    requester: _Text
    #: what the requester can read with, best first
    transports: Annotated[tuple[_Text, ...], Meta(max_length=16)]
    #: the owner's epoch that is meant; 0 is any
    epoch: _U64 = 0
    #: `metadata_version` of the owner's metadata that the requester has; 0 is none
    known_metadata: _U64 = 0

    def __post_init__(self) -> None:
        if len(self.hashes) % BLOCK_HASH_BYTES:
            raise ValueError(f"{len(self.hashes)} bytes are no whole number of block hashes")


class LeaseGranted(_Message, frozen=True, kw_only=True, array_like=True, tag="granted"):
    """The first `missing_from` blocks stay where `rows` say until the lease ends."""

    lease_id: _U64
    epoch: _U64
    #: counted by the owner from its answer; a requester counts from its request
    expires_in_ms: Annotated[int, Meta(ge=0)]
    transport: _Text
    agent: _Text
    #: what the transport needs to reach the agent; empty when `known_metadata` was right
    metadata: bytes
    #: XXH3-64 of the metadata
    metadata_version: _U64
    #: (address, length, device) of each block
    rows: tuple[tuple[_U64, _U64, _U64], ...]
    #: XXH3-64 of each block, u64 little-endian
    checksums: bytes
    #: number of blocks granted = index of the first that is not
    missing_from: Annotated[int, Meta(ge=1)]
    #: why the rest is not granted; empty when all are
    missing_reason: _Text = ""

    def __post_init__(self) -> None:
        if not len(self.rows) == self.missing_from == len(self.checksums) / CHECKSUM_BYTES:
            raise ValueError(
                f"{self.missing_from} blocks granted with {len(self.rows)} rows"
                f" and {len(self.checksums)} bytes of checksums"
            )


class LeaseMissing(_Message, frozen=True, kw_only=True, array_like=True, tag="missing"):
    """No block is granted; `reason` is a MissingReason, or a newer word to treat like not_held."""

    reason: _Text
    detail: _Text = ""


class LeaseRelease(_Message, frozen=True, kw_only=True, array_like=True, tag="release"):
    """The requester has read what it wanted."""

    lease_id: _U64


class LeaseReleased(_Message, frozen=True, kw_only=True, array_like=True, tag="released"):
    """The lease is over; `was_held` is false when it already was."""

    lease_id: _U64
    was_held: bool


class SourceAnnounced(_Message, frozen=True, kw_only=True, array_like=True, tag="source"):
    """How to reach an owner's memory, put under a key so that peers can connect ahead of need."""

    epoch: _U64
    transport: _Text
    agent: _Text
    metadata: bytes
    metadata_version: _U64


TransferRequest: TypeAlias = LeaseRequest | LeaseRelease
TransferAnswer: TypeAlias = LeaseGranted | LeaseMissing | LeaseReleased

_M = TypeVar("_M", bound=_Message)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[TransferRequest] = msgspec.msgpack.Decoder(TransferRequest)
_announcements = msgspec.msgpack.Decoder(SourceAnnounced)
_answers: msgspec.msgpack.Decoder[TransferAnswer] = msgspec.msgpack.Decoder(TransferAnswer)


def encode_transfer(message: TransferRequest | TransferAnswer | SourceAnnounced) -> bytes:
    """Return the bytes of one message."""
    return _encoder.encode(message)


def decode_transfer_request(payload: bytes) -> TransferRequest:
    """Return what a requester says, or raise MalformedBatch or UnsupportedVersion."""
    return _decode(_requests, payload)


def decode_transfer_answer(payload: bytes) -> TransferAnswer:
    """Return what an owner says, or raise MalformedBatch or UnsupportedVersion."""
    return _decode(_answers, payload)


def decode_source_announced(payload: bytes) -> SourceAnnounced:
    """Return an announcement, or raise MalformedBatch or UnsupportedVersion."""
    return _decode(_announcements, payload)


def _decode(decoder: "msgspec.msgpack.Decoder[_M]", payload: bytes) -> _M:
    try:
        message = decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        version = _version_of(payload)
        if version > TRANSFER_VERSION:
            raise UnsupportedVersion(version, TRANSFER_VERSION) from error
        raise MalformedBatch(f"no transfer message: {error}") from error
    if message.v > TRANSFER_VERSION:
        raise UnsupportedVersion(message.v, TRANSFER_VERSION)
    return message


def _version_of(payload: bytes) -> int:
    """Return the version in a payload whose shape is not ours; 0 when there is none."""
    try:
        raw: Any = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return 0
    match raw:
        case [str(), int(version), *_]:
            return version
    return 0
