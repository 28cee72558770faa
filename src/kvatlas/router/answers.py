"""What the router answers over HTTP, as JSON."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import CandidateScore, Plan

_encode = msgspec.json.Encoder().encode


def encoded(answer: Struct | dict[str, Any]) -> bytes:
    """Return an answer's body: JSON that ends its line, so that a prompt stands below it."""
    return _encode(answer) + b"\n"


class IndexAge(Struct, frozen=True):
    """How far the index behind an answer may be believed.

    `stream_sequence` is the last message folded in. `index_age_ms` is the time since the index was
    known to be up to date: near zero while `connected`, and rising while the broker is away.
    """

    stream_sequence: int
    index_age_ms: float
    connected: bool


class ScoreAnswer(Struct, frozen=True):
    """The candidates of a prompt, the cheapest first; nothing is decided by asking."""

    model: str
    prompt_tokens: int
    policy: str
    chosen: InstanceId
    candidates: tuple[CandidateScore, ...]
    num_candidates: int
    stream_sequence: int
    index_age_ms: float
    connected: bool


class KvatlasParams(Struct, frozen=True):
    """The decision that a request follows, and how its prompt's KV gets to the worker."""

    decision_id: str
    plan: Plan


class RemoteKvSource(Struct, frozen=True):
    """The peer that vLLM's P2P tier asks for the blocks that it lacks, under an id of its own."""

    kv_request_id: str
    remote_host: str
    remote_port: int


class KvTransferParams(Struct, frozen=True, omit_defaults=True):
    """`remote_kv_source` is left out where nothing is pulled, or not between such tiers."""

    kvatlas: KvatlasParams
    remote_kv_source: RemoteKvSource | None = None


class RouteAnswer(Struct, frozen=True):
    """Where a request goes and how its prompt's KV gets there.

    Forward the request to `base_url` with `kv_transfer_params` in its body, then report its end to
    /v1/requests/{decision_id}/done.
    """

    decision_id: str
    worker: str
    rank: int
    base_url: str
    trust: Trust
    match_tokens: int
    match_tokens_by_tier: dict[str, int]
    predicted_tokens: int
    prompt_tokens: int
    expected_ttft_ms: float
    plan: Plan
    kv_transfer_params: KvTransferParams
    candidates: tuple[CandidateScore, ...]
    num_candidates: int
    reasons: tuple[str, ...]
    policy: str
    stream_sequence: int
    index_age_ms: float
    connected: bool


class ReportAnswer(Struct, frozen=True):
    """`applied` is False when the request no longer counted: reported before, or expired."""

    decision_id: str
    applied: bool


class LoadAnswer(Struct, frozen=True):
    """Load of an instance as far as this router gave it, and what it learnt of its speed."""

    in_flight: int
    queued_ms: float
    work_ms: float
    prefill_tokens_per_second: float
    pull_tokens_per_second: float


class DigestAnswer(Struct, frozen=True):
    """What a tier holds: blocks, and the XOR of their mixed keys as 16 hex digits."""

    count: int
    xor: str


class ReplacedAnswer(Struct, frozen=True):
    """An epoch that another process took the name from though it had not gone."""

    epoch: int
    base_url: str
    last_event_age_ms: float


class WorkerAnswer(Struct, frozen=True):
    """One instance: what it is, what it holds, how far it is believed."""

    worker: str
    rank: int
    epoch: int
    seq: int
    trust: Trust
    trust_reasons: tuple[str, ...]
    num_blocks: int
    blocks_by_tier: dict[str, int]
    digests: dict[str, DigestAnswer]
    base_url: str
    models: tuple[str, ...]
    adapters: dict[str, str]
    block_tokens: Annotated[int, Meta(description="0 while the instance has not introduced itself")]
    hash_algorithm: str
    role: str
    last_event_age_ms: float
    load: LoadAnswer | None
    #: the process that this one took the name from; two that claim one name show up here in turn
    replaced: ReplacedAnswer | None = None
    #: root in hex of each namespace of which it holds more than it says -> why; `trust` is about
    #: all others
    muted_namespaces: dict[str, str] = {}
    #: behind a block, that its name covers too
    lookahead_tokens: int = 0
    #: of a match, those at its end that the engine computes again
    num_unreusable_trailing_blocks: int = 0
    #: workers of the same model that name blocks otherwise, and how: nothing of theirs is shared
    names_differ: tuple[str, ...] = ()


class WorkersAnswer(Struct, frozen=True):
    """All instances, those that are gone for a while included, by name."""

    workers: tuple[WorkerAnswer, ...]
    stream_sequence: int
    index_age_ms: float
    connected: bool
