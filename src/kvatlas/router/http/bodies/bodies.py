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
    octets   packed, ?prompt=block_hashes&model= and the same as above, without a salt

What is wrong is an InvalidRequest that names the field and never repeats tokens or salts.
"""

import re
from collections.abc import Callable, Collection
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvatlas.indexer import prompt_kernel
from kvatlas.router.http.bodies.body_kernel import (
    NO_VALUE,
    TOO_MANY,
    bytes_of,
    end_of_json,
    end_of_msgpack,
    msgpack_array,
    msgpack_map,
    msgpack_name,
    read_packed_tokens,
)
from kvatlas.router.http.bodies.wrong_fields import at_field
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge, UnsupportedContentType
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
_OCTETS_ARE = "what the octets are: token ids as u32, or hashes of full blocks, 16 bytes each"
#: in a query; more than it knows
_MAX_QUERY_FIELDS = 16


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
    prompt: Annotated[Literal["tokens", "block_hashes"], Meta(description=_OCTETS_ARE)] = "tokens"
    block_tokens: BlockTokens | None = None
    algorithm: HashAlgorithm | None = None
    lookahead_tokens: LookaheadTokens | None = None
    num_tokens: NumTokens | None = None
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
    """Return the form that a content type names; raises UnsupportedContentType, also for none.

    A web page can send what has none, or that of a form, to any server without being asked.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in JSON_TYPES:
        return "json"
    if media_type in MSGPACK_TYPES:
        return "msgpack"
    if media_type == OCTETS_TYPE:
        return "octets"
    raise unsupported(content_type, JSON_TYPES[0], MSGPACK_TYPES[0], OCTETS_TYPE)


def unsupported(found: str, *known: str) -> UnsupportedContentType:
    """Return the error of a content type that is none of these."""
    shown = repr(found[:64]) if found else "none"
    return UnsupportedContentType(
        "content-type", f"expected one of {', '.join(known)}, found {shown}"
    )


def read_score_body(
    form: Form, body: bytes, max_items: int
) -> tuple[ScoreBody | PackedScoreBody, str, Any]:
    """Return a body of JSON or msgpack, the field that has its prompt, and what that has.

    A list may be packed already. Lists of more than `max_items` are refused before anything is
    built from them. Raises InvalidRequest and PromptTooLarge.
    """
    if form == "msgpack":
        packed_body, cut = _read_packed(body, max_items)
        return (packed_body, *cut) if cut else (packed_body, *_prompt(packed_body))
    if quick := _read_quickly(body, max_items):
        return quick
    parsed = decode_body(_score_json, body)
    return parsed, *_prompt(parsed)


@lru_cache(maxsize=256)  # no salt is in it, and a fleet has few models
def read_query(query: bytes) -> ScoreQuery:
    """Return what a query says; raises InvalidRequest."""
    try:
        text = query.decode("ascii")
        pairs = parse_qsl(text, True, True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS)
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
#: what stands before a value of the outermost object: a name of ours has no escapes
_FIELD = re.compile(rb'[ \t\r\n]*[{,][ \t\r\n]*"([^"\\]{0,64})"[ \t\r\n]*:[ \t\r\n]*')
_READERS: dict[bytes, Callable[[bytes, int, int], tuple[bytes, int] | None]] = {
    b"token_ids": prompt_kernel.read_token_list,
    b"block_hashes": prompt_kernel.read_hash_list,
}
_QUOTED = {field: b'"%b"' % field for field in _READERS}
_prompts_of = attrgetter(*ScoreBody.PROMPT_FIELDS)
_NO_PROMPT = (None,) * len(ScoreBody.PROMPT_FIELDS)
#: bytes of an item of a prompt when it is packed
_ITEM_BYTES = {
    b"token_ids": 4,
    b"token_ids_b64": 4,
    b"block_hashes": BLOCK_HASH_BYTES,
    b"block_hashes_b64": BLOCK_HASH_BYTES,
}
COMMA, NIL = np.uint8(44), b"\xc0"
#: how far before a list its name is looked for
_NAME_BYTES = 64
#: and the same in msgpack, from the body's beginning on, where the body is small
_PACKED_NAME_BYTES = 512
#: what costs little however it is read: less is not walked before
_SMALL_BYTES = 64 * 1024
#: fields of a body, and of each extra: more than there are, for those that stand there twice
_MAX_FIELDS, _MAX_EXTRA_FIELDS = 32, 8
_MAX_EXTRA_ITEMS = MAX_EXTRAS * (1 + 2 * _MAX_EXTRA_FIELDS)


class _Cut(NamedTuple):
    """The prompt's list in a body: its field, what it has, where it begins and ends."""

    field: bytes
    packed: bytes
    begin: int
    end: int


def _read_quickly(body: bytes, max_items: int) -> tuple[ScoreBody, str, bytes] | None:
    """Return a body, its prompt's field and what that has, packed, without an object for each item.

    The list is cut out and read by itself, a null stands in its place. None unless it has token ids
    or hashes only, and the rest is a valid body that names no other prompt, nor this one again.
    Raises PromptTooLarge for more than `max_items`, and InvalidRequest for more of anything else
    than any body has.
    """
    cut = _first_list(body, max_items)
    if cut is None:
        is_large = len(body) > _SMALL_BYTES
        if is_large or (b"[" in body and any(name in body for name in _QUOTED.values())):
            cut = _walked(body, max_items)
    elif len(body) - (cut.end - cut.begin) > _SMALL_BYTES:
        cut = _walked(body, max_items)
    if cut is None:
        return None
    rest = body[: cut.begin] + b"null" + body[cut.end :]
    if rest.count(_QUOTED[cut.field]) > 1:
        return None
    try:
        parsed = _score_json.decode(rest)
    except msgspec.ValidationError as error:  # in the list is nothing wrong
        raise at_field(str(error), ScoreBody) from None
    except (msgspec.DecodeError, RecursionError):
        return None
    return (parsed, cut.field.decode(), cut.packed) if _prompts_of(parsed) == _NO_PROMPT else None


def _first_list(body: bytes, max_items: int) -> _Cut | None:
    """Return the first list of a body, if it is the prompt's. Raises PromptTooLarge."""
    begin = body.find(b"[")
    name = _LISTS.search(body[max(begin - _NAME_BYTES, 0) : begin]) if begin > 0 else None
    return None if name is None else _list_at(body, name[1], begin, max_items)


def _list_at(body: bytes, field: bytes, begin: int, max_items: int) -> _Cut | None:
    """Return the prompt's list that begins at a `[`; None for what is to be read otherwise."""
    read = _READERS[field](body, begin, max_items) if prompt_kernel.IS_FAST else None
    if read is None:
        return None
    packed, end = read
    if end == prompt_kernel.TOO_LONG:
        raise _too_many(field, max_items)
    return _Cut(field, packed, begin, end)


def _walked(body: bytes, max_items: int) -> _Cut | None:
    """Return the prompt's list, wherever it stands, once no field of a body has too much in it.

    Raises PromptTooLarge and InvalidRequest; what is no JSON is left to others.
    """
    if not prompt_kernel.IS_FAST:
        return None
    cut, text, at, num_left = None, bytes_of(body), 0, max_items
    for _ in range(_MAX_FIELDS):
        found = _FIELD.match(body, at)
        if found is None:
            break
        field, begin = found[1], found.end()
        is_prompt = field in _READERS and cut is None and body[begin : begin + 1] == b"["
        if is_prompt and (listed := _list_at(body, field, begin, max_items)):
            cut, at = listed, listed.end
            num_left -= len(cut.packed) // _ITEM_BYTES[field]
            continue
        at = _end_of_plain_string(body, begin)
        if at == NO_VALUE:
            most = _MAX_EXTRA_ITEMS if field == b"extras" else num_left - 1  # commas
            at = end_of_json(text, begin, most)
        if at == TOO_MANY:
            raise _too_many(field, max_items)
        if at == NO_VALUE:
            return None
        _check_size(field, at - begin, max_items)
        if field in _READERS:  # one that stands there again counts, too
            num_left = max(num_left - (at - begin) // 2, 0)
    else:
        raise InvalidRequest("body", f"more than {_MAX_FIELDS} fields")
    rest = text[at:]
    # behind a name with escapes, for example
    if len(rest) > _SMALL_BYTES and np.count_nonzero(rest == COMMA) > max_items:
        raise _too_many(b"body", max_items)
    return cut


def _end_of_plain_string(body: bytes, begin: int) -> int:
    """Return where the string without escapes ends that begins at a byte, NO_VALUE for another."""
    if body[begin : begin + 1] != b'"':
        return NO_VALUE
    end = body.find(b'"', begin + 1)
    return NO_VALUE if end < 0 or body.find(b"\\", begin, end) >= 0 else end + 1


def _too_many(field: bytes, max_items: int) -> InvalidRequest:
    if field == b"extras":
        return InvalidRequest("extras", f"expected `array` of length <= {MAX_EXTRAS}")
    name = field.decode(errors="replace")
    known = name if name in ScoreBody.__struct_fields__ else "body"
    # a hash stands for a token at least
    return PromptTooLarge(known, f"at least {max_items + 1} tokens, the limit is {max_items}")


def _check_size(field: bytes, num_bytes: int, max_items: int) -> None:
    """Refuse what is too long by its bytes: a prompt in base64, and any value that is no list."""
    name = field.decode(errors="replace")
    if field in _READERS or name == "extras" or name not in ScoreBody.__struct_fields__:
        return
    item_bytes = _ITEM_BYTES.get(field)
    if item_bytes is None:
        if num_bytes > _SMALL_BYTES:
            raise InvalidRequest(name, f"{num_bytes} bytes, expected fewer than {_SMALL_BYTES}")
    elif (num_bytes - 2) // 4 * 3 - 2 > max_items * item_bytes:
        raise _too_many(field, max_items)


def _read_packed(body: bytes, max_items: int) -> tuple[PackedScoreBody, tuple[str, bytes] | None]:
    """Return a body of msgpack, and its list of token ids, packed, with a nil in its place.

    Without the list where it is read as all else. Raises InvalidRequest and PromptTooLarge.
    """
    cut = None
    if prompt_kernel.IS_FAST and (
        len(body) > _SMALL_BYTES or body.find(b"token_ids", 0, _PACKED_NAME_BYTES) >= 0
    ):
        cut = _walked_msgpack(body, max_items)
    if cut is not None:
        rest = body[: cut.begin] + NIL + body[cut.end :]
        try:
            parsed = _score_msgpack.decode(rest)
        except msgspec.ValidationError as error:  # in the list is nothing wrong
            raise at_field(str(error), PackedScoreBody) from None
        except (msgspec.DecodeError, RecursionError):
            return decode_body(_score_msgpack, body), None
        if all(getattr(parsed, name) is None for name in parsed.PROMPT_FIELDS):
            return parsed, (cut.field.decode(), cut.packed)
    return decode_body(_score_msgpack, body), None


def _walked_msgpack(body: bytes, max_items: int) -> _Cut | None:
    """Do for msgpack what `_walked` does for JSON."""
    header, cut = msgpack_map(body, 0), None
    if header is None:
        return None
    num_fields, at = header
    if num_fields > _MAX_FIELDS:
        raise InvalidRequest("body", f"more than {_MAX_FIELDS} fields")
    text, num_left, is_twice = bytes_of(body), max_items, False
    for _ in range(num_fields):
        named = msgpack_name(body, at)
        if named is None:
            return None
        field, begin = named
        listed = msgpack_array(body, begin) if field == b"token_ids" else None
        if listed is not None:
            count, first = listed
            if count > max_items:
                problem = f"{count} tokens, the limit is {max_items}"
                raise PromptTooLarge("token_ids", problem)
            if count > num_left:  # it stands there again
                raise _too_many(field, max_items)
            num_left -= count
            tokens = np.empty(min(count, len(body) - first), np.uint32)
            end = read_packed_tokens(text, first, tokens)
            if len(tokens) == count and end != NO_VALUE:
                is_twice, at = is_twice or cut is not None, end
                cut = _Cut(field, tokens.tobytes(), begin, end)
                continue
        is_twice = is_twice or (cut is not None and field == cut.field)
        at = end_of_msgpack(text, begin, max_items if listed else _MAX_EXTRA_ITEMS)
        if at == TOO_MANY:
            raise _too_many(b"extras" if field == b"extras" else b"body", max_items)
        if at == NO_VALUE:
            return None
    return None if is_twice else cut


def _prompt(parsed: ScoreBody | PackedScoreBody) -> tuple[str, Any]:
    """Return the field that has the prompt, and what it has."""
    fields = parsed.PROMPT_FIELDS
    sent = [name for name in fields if getattr(parsed, name) is not None]
    if not sent:
        raise InvalidRequest("token_ids", f"expected {' or '.join(fields)}")
    if len(sent) > 1:
        raise InvalidRequest(sent[1], f"stands beside {sent[0]}, expected one of them")
    return sent[0], getattr(parsed, sent[0])
