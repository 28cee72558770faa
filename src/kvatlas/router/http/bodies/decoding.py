"""Bodies of requests to typed values; nothing behind it sees raw bytes.

    body --bodies.py--> field and prompt --checked against the settings--> ScoreRequest

What is wrong is an InvalidRequest that names the field and never repeats tokens or salts.
"""

import re
import sys
from array import array
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvatlas.router.decision.requests import Amount, HashedPrompt, Report, ScoreRequest
from kvatlas.router.http.bodies.bodies import (
    HASH_DIGITS,
    HASH_FIELDS,
    JSON_TYPES,
    MAX_TOKEN,
    MSGPACK_TYPES,
    OCTETS_TYPE,
    SALT_HEADER,
    ExtraBody,
    PackedScoreBody,
    ScoreBody,
    ScoreQuery,
    body_form,
    decode_body,
    read_query,
    read_salt,
    read_score_body,
    unsupported,
)
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge
from kvatlas.schemas.hashing import Extra
from kvatlas.schemas.settings import RouterSettings

MAX_REPORT_BYTES = 64 * 1024
MAX_EXTRA_BYTES_PER_TOKEN = 512


class TokensDetails(Struct, frozen=True):
    """`prompt_tokens_details` of an engine's `usage`."""

    cached_tokens: Amount | None = None


class Usage(Struct, frozen=True):
    """An engine's `usage`, as it stands in its answer; fields that it has beside these are ignored.

    The second names are those of /v1/responses.
    """

    prompt_tokens: Amount | None = None
    completion_tokens: Amount | None = None
    prompt_tokens_details: TokensDetails | None = None
    input_tokens: Amount | None = None
    output_tokens: Amount | None = None
    input_tokens_details: TokensDetails | None = None


class ReportBody(Report, frozen=True):
    """A report as clients send it: with the `usage` of the engine's answer, if they like."""

    usage: Usage | None = None

    def report(self) -> Report:
        """Return the report with what `usage` adds to the fields that are left out."""
        fields = {name: getattr(self, name) for name in Report.__struct_fields__}
        if (usage := self.usage) is not None:
            details = usage.prompt_tokens_details or usage.input_tokens_details
            found = {
                "prompt_tokens": _first(usage.prompt_tokens, usage.input_tokens),
                "output_tokens": _first(usage.completion_tokens, usage.output_tokens),
                "cached_tokens": None if details is None else details.cached_tokens,
            }
            fields |= {name: value for name, value in found.items() if fields[name] is None}
        return Report(**fields)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


#: in the order of HashedPrompt
_BESIDE_HASHES = ("block_tokens", "algorithm", "num_tokens", "lookahead_tokens")
_BESIDE_HASHES_ONLY = "expected beside hashes only"
_PART_OF_HASHES = "is part of the hashes, expected none beside them"
_HASH = re.compile(f"[0-9a-fA-F]{{{HASH_DIGITS}}}")
_report_json = msgspec.json.Decoder(ReportBody)
_report_msgpack = msgspec.msgpack.Decoder(ReportBody)


def decode_score_request(
    body: bytes,
    content_type: str,
    settings: RouterSettings,
    query: bytes = b"",
    salt: bytes | None = None,
) -> ScoreRequest:
    """Return the request in a body, or in octets with the query and the salt's header beside them.

    Raises InvalidRequest and its kinds.
    """
    # of an empty body it is said that it is empty
    form = body_form(content_type) if body or content_type else "json"
    if form == "octets":
        return _octets_request(body, query, salt, settings)
    if query:
        raise InvalidRequest("query", f"put it into the body, expected beside {OCTETS_TYPE} only")
    if salt is not None:  # ignored, it would let tenants share what they believe to be apart
        raise InvalidRequest(SALT_HEADER, "expected cache_salt in the body")
    parsed, field, sent = read_score_body(form, body, settings.max_prompt_tokens)
    if field in HASH_FIELDS:
        return _hashed_request(parsed, field, sent, settings)
    tokens = _packed(sent) if isinstance(sent, list) else sent
    return _tokens_request(parsed, field, tokens, settings)


def decode_report(body: bytes, content_type: str) -> Report:
    """Return the report in a body, an empty one for an empty body; raises InvalidRequest."""
    if not body:
        return Report()
    form = body_form(content_type)
    if form == "octets":
        raise unsupported(content_type, JSON_TYPES[0], MSGPACK_TYPES[0])
    return decode_body(_report_json if form == "json" else _report_msgpack, body).report()


def _tokens_request(
    parsed: ScoreBody | PackedScoreBody, field: str, tokens: bytes, settings: RouterSettings
) -> ScoreRequest:
    _refuse(parsed, _BESIDE_HASHES, _BESIDE_HASHES_ONLY)
    num_tokens = _num_tokens(field, tokens, settings)
    return ScoreRequest(
        parsed.model,
        tokens,
        parsed.lora,
        parsed.cache_salt,
        _extras(parsed.extras, num_tokens) if parsed.extras else (),
        parsed.max_candidates,
        requires_exact=parsed.require == "exact",
    )


def _num_tokens(field: str, tokens: bytes, settings: RouterSettings) -> int:
    """Return the number of tokens of a prompt that is as long as it may be."""
    if not tokens:
        raise InvalidRequest(field, "an empty prompt")
    if len(tokens) % 4:
        raise InvalidRequest(field, f"{len(tokens)} bytes, expected a multiple of 4")
    _check_length(field, len(tokens) // 4, settings)
    return len(tokens) // 4


def _check_length(field: str, num_tokens: int, settings: RouterSettings) -> None:
    if num_tokens > settings.max_prompt_tokens:
        limit = settings.max_prompt_tokens
        raise PromptTooLarge(field, f"{num_tokens} tokens, the limit is {limit}")


def _octets_request(
    tokens: bytes, query: bytes, salt: bytes | None, settings: RouterSettings
) -> ScoreRequest:
    asked = read_query(query)
    if asked.prompt == "block_hashes":
        if salt is not None:
            raise InvalidRequest(SALT_HEADER, _PART_OF_HASHES)
        return _by_hashes(asked, "body", tokens, settings)
    _refuse(asked, _BESIDE_HASHES, _BESIDE_HASHES_ONLY)
    _num_tokens("body", tokens, settings)
    return ScoreRequest(
        asked.model,
        tokens,
        asked.lora,
        None if salt is None else read_salt(salt),
        max_candidates=asked.max_candidates,
        requires_exact=asked.require == "exact",
    )


def _hashed_request(
    parsed: ScoreBody | PackedScoreBody,
    field: str,
    sent: list[str] | bytes,
    settings: RouterSettings,
) -> ScoreRequest:
    _refuse(parsed, ("cache_salt", "extras"), _PART_OF_HASHES)
    hashes = sent if isinstance(sent, bytes) else _unhexed(field, sent)
    return _by_hashes(parsed, field, hashes, settings)


def _by_hashes(
    parsed: ScoreBody | PackedScoreBody | ScoreQuery,
    field: str,
    hashes: bytes,
    settings: RouterSettings,
) -> ScoreRequest:
    """Return the request of a prompt by its packed hashes, of the named field."""
    if len(hashes) % BLOCK_HASH_BYTES:
        problem = f"{len(hashes)} bytes, expected a multiple of {BLOCK_HASH_BYTES}"
        raise InvalidRequest(field, problem)
    if not hashes and parsed.num_tokens is None:
        raise InvalidRequest(field, "an empty prompt; one shorter than a block has num_tokens")
    hashed = HashedPrompt(hashes, *(getattr(parsed, name) for name in _BESIDE_HASHES))
    # Of unknown blocks it is known that each has a token.
    least_tokens = hashed.num_blocks * (parsed.block_tokens or 1)
    _check_length(field, least_tokens, settings)
    _check_length("num_tokens", parsed.num_tokens or 0, settings)
    return ScoreRequest(
        parsed.model,
        b"",
        parsed.lora,
        max_candidates=parsed.max_candidates,
        hashed=hashed,
        requires_exact=parsed.require == "exact",
    )


def _unhexed(field: str, digits: Sequence[str]) -> bytes:
    """Return hashes of 32 hex digits each as one."""
    joined = "".join(digits)
    try:
        hashes = bytes.fromhex(joined)
    except ValueError:
        hashes = b""
    # fromhex passes over spaces
    if len(joined) != 2 * len(hashes) or any(len(each) != HASH_DIGITS for each in digits):
        at = next(at for at, each in enumerate(digits) if not _HASH.fullmatch(each))
        raise InvalidRequest(f"{field}[{at}]", f"expected {HASH_DIGITS} hex digits")
    return hashes


def _refuse(
    parsed: ScoreBody | PackedScoreBody | ScoreQuery, names: Sequence[str], problem: str
) -> None:
    for name in names:
        if getattr(parsed, name) not in (None, []):
            raise InvalidRequest(name, problem)


def _packed(token_ids: Sequence[int]) -> bytes:
    try:
        ids = array("I", token_ids)
    except OverflowError:
        at = next(at for at, token in enumerate(token_ids) if not 0 <= token <= MAX_TOKEN)
        raise InvalidRequest(f"token_ids[{at}]", f"expected 0..{MAX_TOKEN}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _extras(extras: list[ExtraBody], num_tokens: int) -> tuple[Extra, ...]:
    num_spanned = num_hashed = 0
    for at, extra in enumerate(extras):
        if extra.offset + extra.length > num_tokens:
            raise InvalidRequest(
                f"extras[{at}]",
                f"ends at token {extra.offset + extra.length} of a prompt of {num_tokens}",
            )
        num_spanned += extra.length
        num_hashed += extra.length * (len(extra.kind) + len(extra.id))
    # Each extra is hashed into every block that it spans: without a bound a small body costs much.
    if num_hashed > MAX_EXTRA_BYTES_PER_TOKEN * num_tokens:
        raise InvalidRequest("extras", "kinds and ids are too long for the spans that they cover")
    if num_spanned > num_tokens:
        raise InvalidRequest("extras", f"span {num_spanned} tokens of a prompt of {num_tokens}")
    return tuple(Extra(extra.offset, extra.kind, extra.id, extra.length) for extra in extras)
