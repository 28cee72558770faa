"""Bodies with too much in them are refused by counting, before anything is built from them."""

import base64
from typing import Any

import msgspec
import pytest

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.index import kernel
from kvatlas.router.http.bodies import bodies
from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge
from kvatlas.schemas.settings import RouterSettings

prompt_kernel.warm()
kernel.warm()
LIMIT = 40_000
SETTINGS = RouterSettings(max_prompt_tokens=LIMIT)
JSON, MSGPACK = "application/json", "application/x-msgpack"
LONG = list(range(LIMIT + 1))
ONES = b"1," * LIMIT + b"1"
HASH = "00ff" * 8
EXTRA = {"kind": "image", "id": "i", "offset": 0, "length": 1}

pytestmark = pytest.mark.skipif(not prompt_kernel.IS_FAST, reason="nothing is compiled")


def packed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode({"model": "m", **fields})


TOO_LONG = {
    "first": (b'{"model":"m","token_ids":[' + ONES + b"]}", JSON),
    "behind another list": (b'{"model":"m","extras":[],"token_ids":[' + ONES + b"]}", JSON),
    "before the model": (b'{"token_ids":[' + ONES + b'],"model":"m"}', JSON),
    "with space": (b'{ "token_ids" :\n[ ' + ONES.replace(b",", b" , ") + b" ] }", JSON),
    "of no numbers": (b'{"token_ids":[' + b'"a",' * LIMIT + b'"b"]}', JSON),
    "not to its end": (b'{"token_ids":[' + ONES, JSON),
    "a name with escapes": (b'{"token\\u005fids":[' + ONES + b"," + ONES + b"]}", JSON),
    "twice": (b'{"token_ids":[' + ONES[4:] + b'],"token_ids":[' + ONES[4:] + b"]}", JSON),
    "in base64": (
        b'{"model":"m","token_ids_b64":"' + base64.b64encode(bytes(4 * LIMIT + 4)) + b'"}',
        JSON,
    ),
    "hashes": (msgspec.json.encode({"block_hashes": [HASH] * (LIMIT + 1)}), JSON),
    "hashes with space": (
        b'{"block_hashes":[' + b'"x" ,' * LIMIT + b'"x"]}',
        JSON,
    ),
    "msgpack": (packed(token_ids=LONG), MSGPACK),
    "msgpack, of no numbers": (packed(token_ids=["a"] * (LIMIT + 1)), MSGPACK),
    "msgpack, behind another list": (packed(extras=[EXTRA], token_ids=LONG), MSGPACK),
    "msgpack, another field": (packed(what=LONG), MSGPACK),
    "msgpack, not to its end": (packed(token_ids=LONG)[:-9], MSGPACK),
}


@pytest.mark.parametrize("body", TOO_LONG.values(), ids=TOO_LONG)
def test_nothing_is_built_from_what_is_too_long(
    body: tuple[bytes, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: Any) -> Any:
        raise AssertionError("an object for each item")

    monkeypatch.setattr(bodies, "decode_body", built)
    with pytest.raises(PromptTooLarge, match=f"4000[12] tokens, the limit is {LIMIT}"):
        decode_score_request(*body, SETTINGS)


MUCH = {
    "extras": b'{"model":"m","extras":[' + b'{"kind":"a"},' * 20_000 + b'{}],"token_ids":[1]}',
    "extras, first fields": b'{"extras":[{' + b'"kind":"a",' * 20_000 + b'"id":"b"}]}',
    "a salt": b'{"model":"m","cache_salt":"' + b"a" * 100_000 + b'","token_ids":[1]}',
    "a name": b'{"token_ids":[1],"model":"' + b"\\u0061" * 20_000 + b'"}',
    "fields": b'{"token_ids":[1]' + b',"model":"m"' * 20_000 + b"}",
}


@pytest.mark.parametrize("body", MUCH.values(), ids=MUCH)
def test_nothing_is_built_from_too_much_of_anything_else(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: Any) -> Any:
        raise AssertionError("an object for each item")

    monkeypatch.setattr(bodies, "decode_body", built)
    with pytest.raises(InvalidRequest, match=r"<= 1024|more than 32|fewer than 65536"):
        decode_score_request(body, JSON, SETTINGS)


def test_too_many_fields_of_msgpack_are_refused() -> None:
    body = b"\xde\x40\x00" + b"\xa5model\xa1m" * 0x4000
    with pytest.raises(InvalidRequest, match="more than 32 fields"):
        decode_score_request(body, MSGPACK, SETTINGS)


FIELDS = {
    "model": "m",
    "extras": [EXTRA],
    "token_ids": list(range(LIMIT)),
    "cache_salt": 'a "salt", [with] {all} of it\\',
    "max_candidates": 3,
}


@pytest.mark.parametrize("first", FIELDS)
@pytest.mark.parametrize("media_type", [JSON, MSGPACK])
def test_a_long_prompt_is_read_alike_in_any_order(
    first: str, media_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without an object for each token: the decoder sees a body without its list."""
    ordered = {first: FIELDS[first], **FIELDS}
    encode = msgspec.json.encode if media_type == JSON else msgspec.msgpack.encode
    expected = decode_score_request(encode(FIELDS), media_type, SETTINGS)

    def built(*_: Any) -> Any:
        raise AssertionError("an object for each item")

    monkeypatch.setattr(bodies, "decode_body", built)
    assert decode_score_request(encode(ordered), media_type, SETTINGS) == expected


WRONG = [
    {**FIELDS, "token_ids": [*range(25_000), -1]},
    {**FIELDS, "token_ids": [*range(25_000), 2**32]},
    {**FIELDS, "token_ids": [*range(25_000), None]},
    {**FIELDS, "extras": [{"kind": 1}]},
    {**FIELDS, "other": 1},
    {**FIELDS, "block_hashes": [HASH]},
    {**FIELDS, "token_ids": None},
    {"token_ids": list(range(LIMIT)), "model": 3},
]


@pytest.mark.parametrize("fields", WRONG)
@pytest.mark.parametrize("media_type", [JSON, MSGPACK])
def test_what_is_wrong_is_said_as_of_a_short_body(
    fields: dict[str, Any], media_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = msgspec.json.encode if media_type == JSON else msgspec.msgpack.encode
    with pytest.raises(InvalidRequest) as quick:
        decode_score_request(encode(fields), media_type, SETTINGS)
    monkeypatch.setattr(prompt_kernel, "IS_FAST", False)
    with pytest.raises(InvalidRequest) as plain:
        decode_score_request(encode(fields), media_type, SETTINGS)
    assert str(quick.value) == str(plain.value)
