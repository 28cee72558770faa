"""What the doctor has found out, and how it is read from what engines answer. Pure.

An engine that says nothing about something leaves it None: not known is not wrong.
"""

import re
from enum import StrEnum

import msgspec
from msgspec import Struct

from kvatlas.schemas.hashing import MAX_BLOCK_TOKENS

#: of a number that an engine says; longer ones are none
MAX_DIGITS = 12
#: of what is shown of such a number
_MAX_SHOWN = 24
#: what a decoder says to an answer that it cannot read, whatever is in it
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class EngineKind(StrEnum):
    """Whose flags to name."""

    vllm = "vllm"
    sglang = "sglang"
    other = "other"


class ProbedFacts(Struct, frozen=True, kw_only=True):
    """What an engine says of itself over HTTP."""

    kind: EngineKind = EngineKind.other
    version: str = ""
    #: names that requests may use, without those of adapters
    models: tuple[str, ...] = ()
    #: LoRA adapter -> model
    adapters: dict[str, str] = {}
    #: tokens of the blocks that its events name
    block_tokens: int | None = None
    #: what it says instead of a size that a block may have
    odd_block_tokens: str = ""
    prefix_caching: bool | None = None
    #: how it names blocks in its own events
    hash_algorithm: str | None = None


class Probe(Struct, frozen=True):
    """One prompt: what the router said of the worker beforehand, and what the engine then did.

    `reported_tokens` is None where the engine does not say how much it had cached, `refused` why it
    took no such request at all.
    """

    prompt_tokens: int
    predicted_tokens: int
    reported_tokens: int | None
    refused: str = ""


class Arrival(Struct, frozen=True):
    """Whether a prompt that the engine has just computed came to be known to the router."""

    waited_seconds: float
    #: of the computed prompt, tokens in full blocks
    expected_tokens: int
    matched_tokens: int
    #: the worker's digests changed: some event has arrived
    has_changed: bool


class Texts(Struct, frozen=True):
    """The same text as token ids of the engine and of the local tokenizer."""

    engine: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    #: why there is nothing to compare
    missing: str = ""


class SeenHash(Struct, frozen=True):
    """The engine's own name of a prompt's first block, as its events tell it."""

    engine_hash: int | bytes | None
    tokens: tuple[int, ...] = ()
    missing: str = ""


class _Model(Struct, frozen=True):
    id: str
    parent: str | None = None


class _Models(Struct, frozen=True):
    data: tuple[_Model, ...]


class _ServerInfo(Struct, frozen=True):
    """The part of SGLang's /server_info that matters here."""

    version: str = ""
    page_size: msgspec.Raw = msgspec.Raw(b"")
    disable_radix_cache: bool | None = None


def engine_facts(
    models: bytes, metrics: str, server_info: bytes = b"", version: str = ""
) -> ProbedFacts:
    """Return what /v1/models, /metrics and, of SGLang, /server_info say.

    Raises one of `UNREADABLE` when the first is no list of models.
    """
    cards = msgspec.json.decode(models, type=_Models).data
    base = tuple(card.id for card in cards if card.parent is None)
    adapters = {card.id: card.parent for card in cards if card.parent is not None}
    if "vllm:" in metrics:
        return _vllm_facts(_labels(metrics, "vllm:cache_config_info"), base, adapters, version)
    if "sglang:" in metrics or server_info:
        return _sglang_facts(server_info, base, adapters)
    return ProbedFacts(models=base, adapters=adapters, version=version)


def _vllm_facts(
    labels: dict[str, str], models: tuple[str, ...], adapters: dict[str, str], version: str
) -> ProbedFacts:
    #: of several KV groups, blocks are named by the finest unit
    size = labels.get("hash_block_size", "")
    if not size.isdecimal():
        size = labels.get("block_size", "")
    caching = labels.get("enable_prefix_caching")
    block_tokens, odd = _block_tokens(size)
    return ProbedFacts(
        kind=EngineKind.vllm,
        version=version,
        models=models,
        adapters=adapters,
        block_tokens=block_tokens,
        odd_block_tokens=odd,
        prefix_caching=None if caching is None else caching == "True",
        hash_algorithm=labels.get("prefix_caching_hash_algo"),
    )


def _sglang_facts(
    server_info: bytes, models: tuple[str, ...], adapters: dict[str, str]
) -> ProbedFacts:
    try:
        info = msgspec.json.decode(server_info or b"{}", type=_ServerInfo)
    except UNREADABLE:
        info = _ServerInfo()
    disabled = info.disable_radix_cache
    block_tokens, odd = _block_tokens(bytes(info.page_size).decode(errors="replace"))
    return ProbedFacts(
        kind=EngineKind.sglang,
        version=info.version,
        models=models,
        adapters=adapters,
        block_tokens=block_tokens,
        odd_block_tokens=odd,
        prefix_caching=None if disabled is None else not disabled,
    )


def _block_tokens(said: str) -> tuple[int | None, str]:
    """Return the size that a text says, or what it says instead; nothing and None say nothing."""
    if said in ("", "None", "null"):
        return None, ""
    if said.isdecimal() and len(said) <= MAX_DIGITS and 1 <= int(said) <= MAX_BLOCK_TOKENS:
        return int(said), ""
    return None, said if len(said) <= _MAX_SHOWN else f"{said[:_MAX_SHOWN]}... ({len(said)} long)"


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _labels(metrics: str, name: str) -> dict[str, str]:
    """Return the labels of a metric's first sample; none if it has no sample."""
    for line in metrics.splitlines():
        if line.startswith(name + "{"):
            return dict(_LABEL.findall(line))
    return {}
