"""What the router decides and why: the question put to a policy, candidates, plans, decisions.

A decision carries its whole question, so that any policy can be run again on it. Decisions travel
as msgpack maps; readers ignore fields that they do not know.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.errors import MalformedBatch, UnsupportedVersion
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Name, Rank

#: major * 100 + minor, as of the wire of events
DECISION_VERSION = 100


class PullStep(Struct, frozen=True):
    """Pull `num_blocks` blocks of the chain, from block `first_block` on, from one worker.

    `fallbacks` hold at least the first of these blocks too, best first; ask them when the worker
    is away or lacks the blocks.
    """

    worker: Name
    rank: Rank
    first_block: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    num_blocks: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    fallbacks: tuple[InstanceId, ...] = ()


class Plan(Struct, frozen=True):
    """How the chosen worker gets the KV of a prompt.

    Reuse the first `reuse_blocks`, pull what `pulls` say, compute the rest (`compute_tokens`,
    partial last block included; at least one, since an engine computes the last token itself).
    """

    block_tokens: int
    reuse_blocks: int
    pulls: tuple[PullStep, ...]
    compute_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt."""
        moved = self.reuse_blocks + sum(step.num_blocks for step in self.pulls)
        return moved * self.block_tokens + self.compute_tokens


class Candidate(Struct, frozen=True, array_like=True, gc=False):
    """An instance that may serve a request, as a policy sees it. Blocks are leading blocks."""

    worker: str
    rank: int
    trust: Trust
    #: position in Decision.groups: candidates of a group cut and name blocks alike
    group: int
    block_tokens: int
    #: equal numbers may exchange KV; 0 with nobody
    kv_class: int
    #: blocks by best tier, as the index knows them
    held: tuple[int, int, int, int, int]
    #: further blocks that earlier decisions are about to bring
    predicted_blocks: int
    in_flight: int
    queued_ms: float
    #: decayed sum of the work given to it
    work_ms: float
    compute_ms_per_token: float
    pull_ms_per_token: float

    @property
    def instance(self) -> InstanceId:
        """The instance meant."""
        return InstanceId(self.worker, self.rank)


class Question(Struct, frozen=True):
    """All that a policy may look at, beside its settings: equal questions get equal choices."""

    prompt_tokens: int
    #: number of decisions about this model before
    turn: int
    #: breaks ties
    seed: int
    candidates: tuple[Candidate, ...]


class CandidateScore(Struct, frozen=True):
    """One worker that might serve the request, with every term of its cost."""

    worker: str
    rank: int
    base_url: str
    trust: Trust
    match_tokens: int
    match_tokens_by_tier: dict[str, int]
    cost_ms: float
    #: name of the term -> its part of cost_ms; the terms add up to the cost
    terms: dict[str, float]
    #: tokens beyond the match that earlier decisions are about to bring
    predicted_tokens: int = 0
    #: time to first token as predicted, without the terms that only steer
    expected_ttft_ms: float = 0.0
    #: why its trust is less than the worker's own: `namespace_muted: ...`, empty where it is not
    trust_reason: str = ""


class ChainGroup(Struct, frozen=True):
    """The chain of a prompt as some candidates name it; empty for salted prompts."""

    model: str
    block_tokens: int
    algorithm: str
    lora: str | None = None
    salted: bool = False
    chain: bytes = b""
    lookahead_tokens: int = 0


class Decision(Struct, frozen=True):
    """A request's fate and everything needed to argue about it later.

    `stream_sequence` is that of the index that was asked. `candidates` are the cheapest few of
    `num_candidates`. `question` and `settings` are the policy's input: the policy run again on them
    chooses the same; `is_question_complete` says whether all candidates are in it (a large fleet's
    are cut to the cheapest).
    """

    v: int
    id: str
    ts_ns: int
    stream_sequence: int
    policy: str
    model: str
    prompt_tokens: int
    chosen: CandidateScore
    candidates: tuple[CandidateScore, ...]
    num_candidates: int
    plan: Plan
    reasons: tuple[str, ...]
    settings: dict[str, str | int | float]
    question: Question
    is_question_complete: bool = True
    groups: tuple[ChainGroup, ...] = ()
    #: position in `groups` of the chosen candidate's
    chosen_group: int = 0
    index_age_ms: float = 0.0
    #: fields that this record lacks, since the broker takes no message so large: `groups.chain`,
    #: and where that is not enough `groups`, `candidates` and `question.candidates`
    left_out: tuple[str, ...] = ()

    @property
    def chain(self) -> bytes:
        """The packed hashes that the chosen candidate was asked for.

        Empty for salted prompts, and where they are left out.
        """
        return self.groups[self.chosen_group].chain if self.groups else b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Decision)


def encode_decision(decision: Decision) -> bytes:
    """Return the payload of one message of the decisions stream."""
    return _encoder.encode(decision)


def decode_decision(payload: bytes) -> Decision:
    """Return the decision in a payload; raises MalformedBatch or UnsupportedVersion."""
    try:
        version = msgspec.msgpack.decode(payload, type=_Version).v
        if version // 100 > DECISION_VERSION // 100:
            raise UnsupportedVersion(version, DECISION_VERSION)
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedBatch(str(error)) from error


class _Version(Struct):
    v: int
