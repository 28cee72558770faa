"""What may stand in a request for a score or route, and reading it; requests.py checks the rest.

    JSON     {"model", "token_ids": [ids] | "token_ids_b64": base64 of u32 LE, ...}
    msgpack  {"model", "token_ids": [ids] | "tokens": u32 LE, ...}
    both     "lora"?, "cache_salt"?, "extras"?: [{kind, id, offset, length}], "max_candidates"?,
             "require"?: "exact"
    octets   u32 LE, ?model=&lora=&max_candidates=&require=, x-kvatlas-cache-salt: of a header

or, instead of tokens, salt and extras, the hashes of the prompt's full blocks, 16 bytes each:

    JSON     "block_hashes": [32 hex digits] | "block_hashes_b64": base64
    msgpack  "block_hashes": packed
    both     "block_tokens"?, "algorithm"?, "lookahead_tokens"?, "num_tokens"?

What is wrong is an InvalidRequest that names the field and never repeats tokens or salts.
"""

import re
from collections.abc import Collection
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from kvatlas.indexer import prompt_kernel
from kvatlas.router.wrong_fields import at_field
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidRequest, UnsupportedContentType
from kvatlas.schemas.hashing import MAX_BLOCK_TOKENS, MAX_LOOKAHEAD_TOKENS, HashAlgorithm
from kvatlas.schemas.known_names import MAX_NAME_CHARS

JSON_TYPES = ("application/json",)
MSGPACK_TYPES = ("application/x-msgpack", "application/msgpack", "application/vnd.msgpack")
OCTETS_TYPE = "application/octet-stream"
#: where a salt stands beside octets: URLs are logged on their way
SALT_HEADER = "x-kvatlas-cache-salt"
HASH_DIGITS = 2 * BLOCK_HASH_BYTES
MAX_EXTRAS = 1024
MAX_TOKEN = 2**32 - 1

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Salt = Annotated[str, Meta(max_length=4096)]
Position = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
Length = Annotated[int, Meta(ge=1, le=MAX_TOKEN)]
NumCandidates = Annotated[int, Meta(ge=1, le=1024)]
BlockTokens = Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
#: with `exact`, only workers of this trust are candidates
Require = Literal["exact"]
LookaheadTokens = Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD_TOKENS)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_TOKEN)]
_HEX_HASHES = "the chained hashes of the prompt's full blocks, 32 hex digits each"
_PACKED_HASHES = "the same, 16 bytes each"


class ExtraBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Something beside tokens that a span of the prompt stands for."""

    kind: Name
    id: Name
    offset: Position
    length: Length


class ScoreBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt as JSON, and who may serve it."""

    PROMPT_FIELDS: ClassVar = ("token_ids", "token_ids_b64", "block_hashes", "block_hashes_b64")

    model: Name
    token_ids: list[int] | None = None
    token_ids_b64: bytes | None = None
    block_hashes: Annotated[list[str], Meta(description=_HEX_HASHES)] | None = None
    block_hashes_b64: Annotated[bytes, Meta(description=_PACKED_HASHES)] | None = None
    block_tokens: BlockTokens | None = None
    algorithm: HashAlgorithm | None = None
    lookahead_tokens: LookaheadTokens | None = None
    num_tokens: NumTokens | None = None
    lora: Name | None = None
    cache_salt: Salt | None = None
    extras: Annotated[list[ExtraBody], Meta(max_length=MAX_EXTRAS)] = []
    max_candidates: NumCandidates | None = None
    require: Require | None = None


class PackedScoreBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The same as msgpack."""

    PROMPT_FIELDS: ClassVar = ("token_ids", "tokens", "block_hashes")

    model: Name
    token_ids: list[int] | None = None
    tokens: bytes | None = None
    block_hashes: Annotated[bytes, Meta(description=_PACKED_HASHES)] | None = None
    block_tokens: BlockTokens | None = None
    algorithm: HashAlgorithm | None = None
    lookahead_tokens: LookaheadTokens | None = None
    num_tokens: NumTokens | None = None
    lora: Name | None = None
    cache_salt: Salt | None = None
    extras: Annotated[list[ExtraBody], Meta(max_length=MAX_EXTRAS)] = []
    max_candidates: NumCandidates | None = None
    require: Require | None = None


class ScoreQuery(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What stands in the query beside a prompt as octets."""

    model: Name
    lora: Name | None = None
    max_candidates: NumCandidates | None = None
    require: Require | None = None


Form = Literal["json", "msgpack", "octets"]
#: the fields of either body that may hold hashes
HASH_FIELDS = ("block_hashes", "block_hashes_b64")

_Body = TypeVar("_Body")
_score_json = msgspec.json.Decoder(ScoreBody)
_score_msgpack = msgspec.msgpack.Decoder(PackedScoreBody)


@lru_cache(maxsize=64)
def body_form(content_type: str) -> Form:
    """Return the form that a content type names, JSON for none; raises UnsupportedContentType."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in JSON_TYPES or not media_type:
        return "json"
    if media_type in MSGPACK_TYPES:
        return "msgpack"
    if media_type == OCTETS_TYPE:
        return "octets"
    raise unsupported(JSON_TYPES[0], MSGPACK_TYPES[0], OCTETS_TYPE)


def unsupported(*known: str) -> UnsupportedContentType:
    """Return the error of a content type that is none of these."""
    return UnsupportedContentType("content-type", f"expected one of {', '.join(known)}")


def read_score_body(form: Form, body: bytes) -> tuple[ScoreBody | PackedScoreBody, str, Any]:
    """Return a body of JSON or msgpack, the field that has its prompt, and what that has.

    A list of JSON may be packed already. Raises InvalidRequest.
    """
    if form == "msgpack":
        packed_body = decode_body(_score_msgpack, body)
        return packed_body, *_prompt(packed_body)
    if quick := _read_quickly(body):
        return quick
    parsed = decode_body(_score_json, body)
    return parsed, *_prompt(parsed)


@lru_cache(maxsize=256)  # no salt is in it, and a fleet has few models
def read_query(query: bytes) -> ScoreQuery:
    """Return what a query says; raises InvalidRequest."""
    try:
        pairs = parse_qsl(query.decode("ascii"), True, True, errors="strict", max_num_fields=8)
    except ValueError:
        raise InvalidRequest("query", "expected name=value&..., percent-encoded") from None
    asked = dict(pairs)
    if len(asked) < len(pairs):
        raise InvalidRequest("query", "a name stands there twice")
    if "cache_salt" in asked:
        raise InvalidRequest("cache_salt", f"not in a URL, expected in the header {SALT_HEADER}")
    try:
        return msgspec.convert(asked, ScoreQuery, strict=False)
    except msgspec.ValidationError as error:
        raise at_field(str(error), ScoreQuery) from None


def refuse_unknown(query: bytes, known: Collection[str]) -> None:
    """Raise InvalidRequest if a query has a name that a route does not know, or one twice."""
    names = [name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)]
    for name in names:
        if name not in known:
            instead = f"known are {', '.join(sorted(known))}" if known else "none is known here"
            raise InvalidRequest(name[:MAX_NAME_CHARS] or "query", f"unknown in a query; {instead}")
        if names.count(name) > 1:
            raise InvalidRequest("query", f"{name} stands there twice")


def read_salt(raw: bytes) -> str:
    """Return the salt of a header; raises InvalidRequest."""
    try:
        return msgspec.convert(raw.decode(), Salt)
    except (UnicodeDecodeError, msgspec.ValidationError):
        raise InvalidRequest(SALT_HEADER, "expected UTF-8 of at most 4096 characters") from None


def decode_body(
    decoder: "msgspec.json.Decoder[_Body] | msgspec.msgpack.Decoder[_Body]", body: bytes
) -> _Body:
    """Return what a body says; raises InvalidRequest with the field that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise at_field(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        if body.strip():
            raise InvalidRequest("body", str(error)) from None
        form = "JSON" if isinstance(decoder, msgspec.json.Decoder) else "msgpack"
        raise InvalidRequest("body", f"an empty body, expected a {form} object") from None
    except RecursionError:
        raise InvalidRequest("body", "nested too deeply") from None


_LISTS = re.compile(rb'"(token_ids|block_hashes)"[ \t\r\n]*:[ \t\r\n]*$')
_READERS = {
    "token_ids": prompt_kernel.read_token_list,
    "block_hashes": prompt_kernel.read_hash_list,
}
_prompts_of = attrgetter(*ScoreBody.PROMPT_FIELDS)
_NO_PROMPT = (None,) * len(ScoreBody.PROMPT_FIELDS)
#: how far before a list its name is looked for
_NAME_BYTES = 64


def _read_quickly(body: bytes) -> tuple[ScoreBody, str, bytes] | None:
    """Return a body, its prompt's field and what that has, packed, without an object for each item.

    The list is cut out and read by itself, a null stands in its place. None unless it is the first
    list in the body, has token ids or hashes only, and the rest is a valid body that names no other
    prompt, nor this one again.
    """
    begin = body.find(b"[")
    name = _LISTS.search(body[max(begin - _NAME_BYTES, 0) : begin]) if begin > 0 else None
    if name is None:
        return None
    field = name[1].decode()
    read_list = _READERS[field]
    read = read_list(body, begin) if prompt_kernel.IS_FAST else None
    if read is None:
        return None
    packed, end = read
    rest = body[:begin] + b"null" + body[end:]
    if rest.count(b'"%b"' % name[1]) > 1:
        return None
    try:
        parsed = _score_json.decode(rest)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (parsed, field, packed) if _prompts_of(parsed) == _NO_PROMPT else None


def _prompt(parsed: ScoreBody | PackedScoreBody) -> tuple[str, Any]:
    """Return the field that has the prompt, and what it has."""
    fields = parsed.PROMPT_FIELDS
    sent = [name for name in fields if getattr(parsed, name) is not None]
    if not sent:
        raise InvalidRequest("token_ids", f"expected {' or '.join(fields)}")
    if len(sent) > 1:
        raise InvalidRequest(sent[1], f"stands beside {sent[0]}, expected one of them")
    return sent[0], getattr(parsed, sent[0])
