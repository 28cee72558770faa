"""What routers tell one another, so that each sees the load that all of them give.

    Routed --> Prefilled --> Done        of one request, by whichever router was told
    Joined  a router has started: tell it what is under way      Alive  a router still runs

Announced on core NATS: what is lost is missed, not waited for, and ends with the same time-outs as
a request that is never reported. The envelope is [version, router, signal].
"""

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.router.decision.requests import Report
from kvatlas.schemas.errors import MalformedSignal
from kvatlas.schemas.routing import Plan

SIGNALS_VERSION = 1
#: hex digits of a router's id, and of the time that stands before it in a decision's id
ID_DIGITS, TIME_DIGITS = 8, 12
#: characters; decisions' ids of ours are far shorter
MAX_DECISION_ID = 128
#: bytes of a chain that travel: a longer prompt is predicted up to here
MAX_CHAIN_BYTES = 16 * 1024
MAX_SIGNAL_BYTES = 64 * 1024
#: of tokens and blocks in a plan
MAX_NUMBER = 100_000_000


class Joined(Struct, frozen=True, array_like=True, tag="joined"):
    """A router has started and knows of no request."""


class StateRequested(Struct, frozen=True, array_like=True, tag="asked"):
    """A router has not heard of another for a while, which shall tell what is under way."""

    router: Annotated[str, Meta(max_length=64)]


class Alive(Struct, frozen=True, array_like=True, tag="alive"):
    """A router runs."""


class Routed(Struct, frozen=True, array_like=True, tag="routed"):
    """A request was sent to an instance."""

    decision_id: Annotated[str, Meta(max_length=MAX_DECISION_ID)]
    model: str
    worker: str
    rank: int
    epoch: int
    plan: Plan
    transfer_ms: Annotated[float, Meta(ge=0, le=1e12)]
    chain: bytes


class Prefilled(Struct, frozen=True, array_like=True, tag="prefilled"):
    """A request's prefill has ended."""

    decision_id: str
    report: Report


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """A request has ended."""

    decision_id: str
    report: Report


Signal = Joined | StateRequested | Alive | Routed | Prefilled | Done


class Envelope(Struct, frozen=True, array_like=True):
    """Who says it."""

    v: int
    router: Annotated[str, Meta(min_length=1, max_length=64)]
    signal: Signal


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_signal(router: str, signal: Signal) -> bytes:
    """Return a signal as it travels."""
    return _encode(Envelope(SIGNALS_VERSION, router, signal))


def decode_signal(payload: bytes) -> Envelope:
    """Return what was announced. Raises MalformedSignal."""
    if len(payload) > MAX_SIGNAL_BYTES:
        raise MalformedSignal(f"{len(payload)} bytes, the limit is {MAX_SIGNAL_BYTES}")
    try:
        envelope = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedSignal(str(error)) from None
    if isinstance(envelope.signal, Routed) and not _is_sane(envelope.signal.plan):
        raise MalformedSignal("a plan of impossible numbers")
    if envelope.v != SIGNALS_VERSION:
        raise MalformedSignal(f"version {envelope.v}, expected {SIGNALS_VERSION}")
    return envelope


def _is_sane(plan: Plan) -> bool:
    numbers = [plan.reuse_blocks, plan.compute_tokens, *(step.num_blocks for step in plan.pulls)]
    return 0 < plan.block_tokens <= MAX_NUMBER and all(0 <= each <= MAX_NUMBER for each in numbers)


def new_router_id() -> str:
    """Return an id that no other router has; decisions carry it, so that their router is found."""
    return secrets.token_hex(ID_DIGITS // 2)


def router_of(decision_id: str) -> str:
    """Return the id of the router whose decision has this id; of another id, nobody's."""
    return decision_id[TIME_DIGITS : TIME_DIGITS + ID_DIGITS]
