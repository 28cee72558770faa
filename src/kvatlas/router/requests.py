"""Bodies of requests to typed values; nothing behind it sees raw bytes.

    JSON     {"model", "token_ids": [ids] | "token_ids_b64": base64 of u32 LE, ...}
    msgpack  {"model", "token_ids": [ids] | "tokens": u32 LE, ...}
    both     "lora"?, "cache_salt"?, "extras"?: [{kind, id, offset, length}], "max_candidates"?
    octets   u32 LE, ?model=&lora=&max_candidates=, x-kvatlas-cache-salt: of a header

or, instead of tokens, salt and extras, the hashes of the prompt's full blocks, 16 bytes each:

    JSON     "block_hashes": [32 hex digits] | "block_hashes_b64": base64
    msgpack  "block_hashes": packed
    both     "block_tokens"?, "algorithm"?, "num_tokens"?

What is wrong is an InvalidRequest that names the field and never repeats tokens or salts.
"""

import re
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from kvatlas.indexer import prompt_kernel
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge, UnsupportedContentType
from kvatlas.schemas.hashing import MAX_BLOCK_TOKENS, Extra, HashAlgorithm
from kvatlas.schemas.settings import RouterSettings

JSON_TYPES = ("application/json",)
MSGPACK_TYPES = ("application/x-msgpack", "application/msgpack", "application/vnd.msgpack")
OCTETS_TYPE = "application/octet-stream"
#: where a salt stands beside octets: URLs are logged on their way
SALT_HEADER = "x-kvatlas-cache-salt"
HASH_DIGITS = 2 * BLOCK_HASH_BYTES
MAX_REPORT_BYTES = 64 * 1024
MAX_EXTRAS = 1024
MAX_EXTRA_BYTES_PER_TOKEN = 512
MAX_TOKEN = 2**32 - 1

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Salt = Annotated[str, Meta(max_length=4096)]
Position = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
Length = Annotated[int, Meta(ge=1, le=MAX_TOKEN)]
NumCandidates = Annotated[int, Meta(ge=1, le=1024)]
BlockTokens = Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_TOKEN)]
_HEX_HASHES = "the chained hashes of the prompt's full blocks, 32 hex digits each"
_PACKED_HASHES = "the same, 16 bytes each"
Milliseconds = Annotated[float, Meta(ge=0, le=1e10)]
Amount = Annotated[int, Meta(ge=0, le=2**53)]


class HashedPrompt(Struct, frozen=True):
    """A prompt by the packed hashes of its full blocks, which LoRA and salt are part of.

    What is None follows from the workers that serve the model: `block_tokens` and `algorithm` if
    all cut and name blocks alike, `num_tokens` as that of the blocks.
    """

    hashes: bytes
    block_tokens: int | None = None
    algorithm: HashAlgorithm | None = None
    num_tokens: int | None = None

    @property
    def num_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.hashes) // BLOCK_HASH_BYTES

    def __repr__(self) -> str:
        """Show what may stand in a log: no hashes, which may be of a salted prompt."""
        return f"HashedPrompt(num_blocks={self.num_blocks})"


class ScoreRequest(Struct, frozen=True):
    """A prompt, and who may serve it. `tokens` are packed u32 LE, empty where `hashed` is given."""

    model: str
    tokens: bytes
    lora: str | None = None
    cache_salt: str | None = None
    extras: tuple[Extra, ...] = ()
    max_candidates: int | None = None
    hashed: HashedPrompt | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were sent."""
        return len(self.tokens) // 4

    def __repr__(self) -> str:
        """Show what may stand in a log: neither tokens nor salt."""
        prompt = self.hashed or f"num_tokens={self.num_tokens}"
        return f"ScoreRequest(model={self.model!r}, {prompt})"


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
    num_tokens: NumTokens | None = None
    lora: Name | None = None
    cache_salt: Salt | None = None
    extras: Annotated[list[ExtraBody], Meta(max_length=MAX_EXTRAS)] = []
    max_candidates: NumCandidates | None = None


class PackedScoreBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The same as msgpack."""

    PROMPT_FIELDS: ClassVar = ("token_ids", "tokens", "block_hashes")

    model: Name
    token_ids: list[int] | None = None
    tokens: bytes | None = None
    block_hashes: Annotated[bytes, Meta(description=_PACKED_HASHES)] | None = None
    block_tokens: BlockTokens | None = None
    algorithm: HashAlgorithm | None = None
    num_tokens: NumTokens | None = None
    lora: Name | None = None
    cache_salt: Salt | None = None
    extras: Annotated[list[ExtraBody], Meta(max_length=MAX_EXTRAS)] = []
    max_candidates: NumCandidates | None = None


class ScoreQuery(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What stands in the query beside a prompt as octets."""

    model: Name
    lora: Name | None = None
    max_candidates: NumCandidates | None = None


class Report(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a routed request, or of its prefill; what is left out is unknown.

    `prefill_ms` is computing time without waiting, `ttft_ms` all since the decision.
    """

    ttft_ms: Milliseconds | None = None
    prefill_ms: Milliseconds | None = None
    computed_tokens: Amount | None = None
    local_blocks: Amount | None = None
    pulled_blocks: Amount | None = None
    pull_ms: Milliseconds | None = None
    output_tokens: Amount | None = None
    failed: bool = False


#: the fields of either body that may hold hashes
HASH_FIELDS = ("block_hashes", "block_hashes_b64")
_HASH = re.compile(f"[0-9a-fA-F]{{{HASH_DIGITS}}}")

_Body = TypeVar("_Body")
_score_json = msgspec.json.Decoder(ScoreBody)
_score_msgpack = msgspec.msgpack.Decoder(PackedScoreBody)
_report_json = msgspec.json.Decoder(Report)
_report_msgpack = msgspec.msgpack.Decoder(Report)


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
    form = _form(content_type)
    if form == "octets":
        return _octets_request(body, query, salt, settings)
    if query:
        raise InvalidRequest("query", f"expected none, other than beside {OCTETS_TYPE}")
    if salt is not None:  # ignored, it would let tenants share what they believe to be apart
        raise InvalidRequest(SALT_HEADER, "expected cache_salt in the body")
    parsed: ScoreBody | PackedScoreBody
    if form == "msgpack":
        parsed = _decode(_score_msgpack, body)
    elif quick := _read_quickly(body):
        parsed, field, packed = quick
        make = _hashed_request if field in HASH_FIELDS else _tokens_request
        return make(parsed, field, packed, settings)
    else:
        parsed = _decode(_score_json, body)
    field, sent = _prompt(parsed)
    if field in HASH_FIELDS:
        return _hashed_request(parsed, field, sent, settings)
    tokens = _packed(sent) if isinstance(sent, list) else sent
    return _tokens_request(parsed, field, tokens, settings)


def decode_report(body: bytes, content_type: str) -> Report:
    """Return the report in a body, an empty one for an empty body; raises InvalidRequest."""
    if not body:
        return Report()
    form = _form(content_type)
    if form == "octets":
        raise _unsupported(JSON_TYPES[0], MSGPACK_TYPES[0])
    return _decode(_report_json if form == "json" else _report_msgpack, body)


_LISTS = re.compile(rb'"(token_ids|block_hashes)"[ \t\r\n]*:[ \t\r\n]*$')
#: how far before a list its name is looked for
_NAME_BYTES = 64


def _read_quickly(body: bytes) -> tuple[ScoreBody, str, bytes] | None:
    """Return a body, its prompt's field and what that has, packed, without an object for each item.

    The list is cut out and read by itself, a null stands in its place. None unless it is the first
    list in the body, has token ids or hashes only, and the rest is a valid body with no other
    prompt.
    """
    begin = body.find(b"[")
    name = _LISTS.search(body[max(begin - _NAME_BYTES, 0) : begin]) if begin > 0 else None
    if name is None:
        return None
    field = name[1].decode()
    if field in HASH_FIELDS:
        read = prompt_kernel.read_hash_list(body, begin)
    else:
        read = prompt_kernel.read_token_list(body, begin) if prompt_kernel.IS_FAST else None
    if read is None:
        return None
    packed, end = read
    try:
        parsed = _score_json.decode(body[:begin] + b"null" + body[end:])
    except (msgspec.DecodeError, RecursionError):
        return None
    if any(getattr(parsed, name) is not None for name in ScoreBody.PROMPT_FIELDS):
        return None
    return parsed, field, packed


def _form(content_type: str) -> Literal["json", "msgpack", "octets"]:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in JSON_TYPES or not media_type:
        return "json"
    if media_type in MSGPACK_TYPES:
        return "msgpack"
    if media_type == OCTETS_TYPE:
        return "octets"
    raise _unsupported(JSON_TYPES[0], MSGPACK_TYPES[0], OCTETS_TYPE)


def _unsupported(*known: str) -> UnsupportedContentType:
    return UnsupportedContentType("content-type", f"expected one of {', '.join(known)}")


def _decode(
    decoder: "msgspec.json.Decoder[_Body] | msgspec.msgpack.Decoder[_Body]", body: bytes
) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _at_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest("body", str(error)) from None
    except RecursionError:
        raise InvalidRequest("body", "nested too deeply") from None


_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAMED = re.compile(r"^Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)


def _at_field(message: str) -> InvalidRequest:
    """Return a validator's message with its field: `token_ids[3]: expected int, got str`."""
    path = _PATH.search(message)
    problem = message[: path.start()] if path else message
    parts = [path[1]] if path and path[1] else []
    if named := _NAMED.match(problem):
        parts.append(named[1][:64])
        problem = "unknown field" if "unknown" in problem else "required field is missing"
    return InvalidRequest(".".join(parts) or "body", problem[:1].lower() + problem[1:])


def _prompt(parsed: ScoreBody | PackedScoreBody) -> tuple[str, Any]:
    """Return the field that has the prompt, and what it has."""
    fields = parsed.PROMPT_FIELDS
    sent = [name for name in fields if getattr(parsed, name) is not None]
    if not sent:
        raise InvalidRequest("token_ids", f"expected {' or '.join(fields)}")
    if len(sent) > 1:
        raise InvalidRequest(sent[1], f"stands beside {sent[0]}, expected one of them")
    return sent[0], getattr(parsed, sent[0])


def _tokens_request(
    parsed: ScoreBody | PackedScoreBody, field: str, tokens: bytes, settings: RouterSettings
) -> ScoreRequest:
    _refuse(parsed, ("block_tokens", "algorithm", "num_tokens"), "expected beside hashes only")
    num_tokens = _num_tokens(field, tokens, settings)
    return ScoreRequest(
        parsed.model,
        tokens,
        parsed.lora,
        parsed.cache_salt,
        _extras(parsed.extras, num_tokens) if parsed.extras else (),
        parsed.max_candidates,
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
    asked = _query(query)
    _num_tokens("body", tokens, settings)
    return ScoreRequest(
        asked.model,
        tokens,
        asked.lora,
        None if salt is None else _salt(salt),
        max_candidates=asked.max_candidates,
    )


@lru_cache(maxsize=256)
def _query(query: bytes) -> ScoreQuery:
    """Return what a query says. Cached: there is no salt in it, and a fleet has few models."""
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
        raise _at_field(str(error)) from None


def _salt(raw: bytes) -> str:
    try:
        return msgspec.convert(raw.decode(), Salt)
    except (UnicodeDecodeError, msgspec.ValidationError):
        raise InvalidRequest(SALT_HEADER, "expected UTF-8 of at most 4096 characters") from None


def _hashed_request(
    parsed: ScoreBody | PackedScoreBody,
    field: str,
    sent: list[str] | bytes,
    settings: RouterSettings,
) -> ScoreRequest:
    _refuse(parsed, ("cache_salt", "extras"), "is part of the hashes, expected none beside them")
    hashes = sent if isinstance(sent, bytes) else _unhexed(field, sent)
    if len(hashes) % BLOCK_HASH_BYTES:
        problem = f"{len(hashes)} bytes, expected a multiple of {BLOCK_HASH_BYTES}"
        raise InvalidRequest(field, problem)
    if not hashes and parsed.num_tokens is None:
        raise InvalidRequest(field, "an empty prompt; one shorter than a block has num_tokens")
    hashed = HashedPrompt(hashes, parsed.block_tokens, parsed.algorithm, parsed.num_tokens)
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


def _refuse(parsed: ScoreBody | PackedScoreBody, names: Sequence[str], problem: str) -> None:
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
