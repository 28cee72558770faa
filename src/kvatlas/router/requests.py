"""Bodies of requests to typed values; nothing behind it sees raw bytes.

    JSON     {"model", "token_ids": [ids] | "token_ids_b64": base64 of u32 LE, ...}
    msgpack  {"model", "token_ids": [ids] | "tokens": u32 LE, ...}
    both     "lora"?, "cache_salt"?, "extras"?: [{kind, id, offset, length}], "max_candidates"?

What is wrong is an InvalidRequest that names the field and never repeats tokens or salts.
"""

import re
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvatlas.indexer import prompt_kernel
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge, UnsupportedContentType
from kvatlas.schemas.hashing import Extra
from kvatlas.schemas.settings import RouterSettings

JSON_TYPES = ("application/json",)
MSGPACK_TYPES = ("application/x-msgpack", "application/msgpack", "application/vnd.msgpack")
MAX_REPORT_BYTES = 64 * 1024
MAX_EXTRAS = 1024
MAX_EXTRA_BYTES_PER_TOKEN = 512
MAX_TOKEN = 2**32 - 1

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Salt = Annotated[str, Meta(max_length=4096)]
Position = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
Length = Annotated[int, Meta(ge=1, le=MAX_TOKEN)]
NumCandidates = Annotated[int, Meta(ge=1, le=1024)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e10)]
Amount = Annotated[int, Meta(ge=0, le=2**53)]


class ScoreRequest(Struct, frozen=True):
    """A prompt, and who may serve it. `tokens` are packed u32 LE."""

    model: str
    tokens: bytes
    lora: str | None = None
    cache_salt: str | None = None
    extras: tuple[Extra, ...] = ()
    max_candidates: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.tokens) // 4

    def __repr__(self) -> str:
        """Show what may stand in a log: neither tokens nor salt."""
        return f"ScoreRequest(model={self.model!r}, num_tokens={self.num_tokens})"


class ExtraBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Something beside tokens that a span of the prompt stands for."""

    kind: Name
    id: Name
    offset: Position
    length: Length


class ScoreBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt as JSON, and who may serve it."""

    model: Name
    token_ids: list[int] | None = None
    token_ids_b64: bytes | None = None
    lora: Name | None = None
    cache_salt: Salt | None = None
    extras: Annotated[list[ExtraBody], Meta(max_length=MAX_EXTRAS)] = []
    max_candidates: NumCandidates | None = None


class PackedScoreBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The same as msgpack."""

    model: Name
    token_ids: list[int] | None = None
    tokens: bytes | None = None
    lora: Name | None = None
    cache_salt: Salt | None = None
    extras: Annotated[list[ExtraBody], Meta(max_length=MAX_EXTRAS)] = []
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


_Body = TypeVar("_Body")
_score_json = msgspec.json.Decoder(ScoreBody)
_score_msgpack = msgspec.msgpack.Decoder(PackedScoreBody)
_report_json = msgspec.json.Decoder(Report)
_report_msgpack = msgspec.msgpack.Decoder(Report)


def decode_score_request(body: bytes, content_type: str, settings: RouterSettings) -> ScoreRequest:
    """Return the request in a body; raises InvalidRequest and its kinds."""
    parsed: ScoreBody | PackedScoreBody
    if not _is_json(content_type):
        parsed = _decode(_score_msgpack, body)
        packed, packed_field = parsed.tokens, "tokens"
        tokens = _tokens(parsed.token_ids, packed, packed_field)
    elif prompt_kernel.IS_FAST and (quick := _read_quickly(body)):
        parsed, tokens = quick
        packed, packed_field = None, "token_ids_b64"
    else:
        parsed = _decode(_score_json, body)
        packed, packed_field = parsed.token_ids_b64, "token_ids_b64"
        tokens = _tokens(parsed.token_ids, packed, packed_field)
    num_tokens = len(tokens) // 4
    if num_tokens > settings.max_prompt_tokens:
        raise PromptTooLarge(
            "token_ids" if packed is None else packed_field,
            f"{num_tokens} tokens, the limit is {settings.max_prompt_tokens}",
        )
    return ScoreRequest(
        parsed.model,
        tokens,
        parsed.lora,
        parsed.cache_salt,
        _extras(parsed.extras, num_tokens) if parsed.extras else (),
        parsed.max_candidates,
    )


def decode_report(body: bytes, content_type: str) -> Report:
    """Return the report in a body, an empty one for an empty body; raises InvalidRequest."""
    if not body:
        return Report()
    return _decode(_report_json if _is_json(content_type) else _report_msgpack, body)


_TOKEN_IDS = re.compile(rb'"token_ids"[ \t\r\n]*:[ \t\r\n]*$')
#: how far before a list its name is looked for
_NAME_BYTES = 64


def _read_quickly(body: bytes) -> tuple[ScoreBody, bytes] | None:
    """Return a body and its token ids without making Python integers of them.

    The list is cut out and read by itself, a null stands in its place. None unless it is the first
    list in the body, has token ids only, and the rest is a valid body with no other tokens.
    """
    begin = body.find(b"[")
    if begin < 0 or not _TOKEN_IDS.search(body[max(begin - _NAME_BYTES, 0) : begin]):
        return None
    read = prompt_kernel.read_token_list(body, begin)
    if read is None:
        return None
    tokens, end = read
    try:
        parsed = _score_json.decode(body[:begin] + b"null" + body[end:])
    except (msgspec.DecodeError, RecursionError):
        return None
    if parsed.token_ids is not None or parsed.token_ids_b64 is not None:
        return None
    return parsed, tokens


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in JSON_TYPES or not media_type:
        return True
    if media_type in MSGPACK_TYPES:
        return False
    known = ", ".join([JSON_TYPES[0], MSGPACK_TYPES[0]])
    raise UnsupportedContentType("content-type", f"expected one of {known}")


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


def _tokens(token_ids: list[int] | None, packed: bytes | None, packed_field: str) -> bytes:
    """Return the prompt as u32 LE, from whichever field has it."""
    if token_ids is not None and packed is not None:
        raise InvalidRequest(packed_field, "stands beside token_ids, expected one of them")
    if token_ids is not None:
        if not token_ids:
            raise InvalidRequest("token_ids", "an empty prompt")
        return _packed(token_ids)
    if packed is None:
        raise InvalidRequest("token_ids", f"expected token_ids or {packed_field}")
    if not packed:
        raise InvalidRequest(packed_field, "an empty prompt")
    if len(packed) % 4:
        raise InvalidRequest(packed_field, f"{len(packed)} bytes, expected a multiple of 4")
    return packed


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
