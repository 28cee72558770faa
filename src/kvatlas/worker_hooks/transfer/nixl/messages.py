"""What a sidecar and its transfer process say to each other, over a socket of whole messages."""

from typing import TypeAlias

import msgspec
from msgspec import Struct

from kvatlas.schemas.settings import NixlSettings as NixlSettings
from kvatlas.worker_hooks.transfer.transport import ReadStatus

#: larger than any message
MAX_MESSAGE_BYTES = 1 << 18


class _Message(Struct, frozen=True, array_like=True):
    pass


# --- to the transfer process -----------------------------------------------------------------


class Read(_Message, frozen=True, array_like=True, tag=1):
    """Read the rows to the places; answered by Ended."""

    number: int
    agent: str
    metadata: bytes
    metadata_version: int
    rows: tuple[tuple[int, int, int], ...]
    places: tuple[int, ...]
    seconds: float


class Connect(_Message, frozen=True, array_like=True, tag=2):
    """Get to know a source; answered by Ended."""

    number: int
    agent: str
    metadata: bytes
    metadata_version: int


class ExpectReads(_Message, frozen=True, array_like=True, tag=3):
    """Be quick for so long."""

    seconds: float


class Ping(_Message, frozen=True, array_like=True, tag=4):
    """Answer with Pong: a process that hangs does not."""

    number: int


# --- from the transfer process ---------------------------------------------------------------


class Hello(_Message, frozen=True, array_like=True, tag=11):
    """The agents are there; the pool lies at `address`."""

    agent: str
    metadata: bytes
    address: int


class Broken(_Message, frozen=True, array_like=True, tag=12):
    """The agents cannot be made."""

    problem: str


class Ended(_Message, frozen=True, array_like=True, tag=13):
    """A command is answered; unless `is_over`, its places are in quarantine until Freed."""

    number: int
    status: ReadStatus
    detail: str = ""
    seconds: float = 0.0
    is_over: bool = True


class Freed(_Message, frozen=True, array_like=True, tag=14):
    """The places of a read that had ended are at rest."""

    number: int


class Recycled(_Message, frozen=True, array_like=True, tag=15):
    """The reading agent was made again."""


class Pong(_Message, frozen=True, array_like=True, tag=16):
    """The answer to a Ping."""

    number: int


ToProcess: TypeAlias = Read | Connect | ExpectReads | Ping
FromProcess: TypeAlias = Hello | Broken | Ended | Freed | Recycled | Pong

encode_message = msgspec.msgpack.Encoder().encode
to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
