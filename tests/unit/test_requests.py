"""Bodies of requests: what is read, and what each wrong one is told."""

import base64
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvatlas.indexer import prompt_kernel
from kvatlas.router.requests import (
    Report,
    ScoreRequest,
    decode_report,
    decode_score_request,
)
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge, UnsupportedContentType
from kvatlas.schemas.hashing import Extra
from kvatlas.schemas.settings import RouterSettings

prompt_kernel.warm()
SETTINGS = RouterSettings(max_prompt_tokens=100)
TOKENS = array("I", [1, 2, 2**32 - 1]).tobytes()
JSON, MSGPACK = "application/json", "application/x-msgpack"


def from_json(body: bytes | dict[str, Any]) -> ScoreRequest:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return decode_score_request(raw, JSON, SETTINGS)


def from_msgpack(body: bytes | dict[str, Any]) -> ScoreRequest:
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return decode_score_request(raw, MSGPACK, SETTINGS)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: from_json({"model": "m", "token_ids": [1, 2, 2**32 - 1]}),
        lambda: from_json({"model": "m", "token_ids_b64": base64.b64encode(TOKENS).decode()}),
        lambda: from_msgpack({"model": "m", "token_ids": [1, 2, 2**32 - 1]}),
        lambda: from_msgpack({"model": "m", "tokens": TOKENS}),
    ],
    ids=["json list", "json base64", "msgpack list", "msgpack packed"],
)
def test_every_form_says_the_same(request_of: Callable[[], ScoreRequest]) -> None:
    assert request_of() == ScoreRequest("m", TOKENS)


def test_everything_optional_is_read() -> None:
    body = {
        "model": "m",
        "token_ids": [1] * 8,
        "lora": "l",
        "cache_salt": "\x00 any \U0001f9c2 content",
        "extras": [{"kind": "image", "id": "i", "offset": 2, "length": 6}],
        "max_candidates": 3,
    }
    expected = ScoreRequest(
        "m",
        array("I", [1] * 8).tobytes(),
        "l",
        "\x00 any \U0001f9c2 content",
        (Extra(2, "image", "i", 6),),
        3,
    )
    assert from_json(body) == from_msgpack(body) == expected


@pytest.mark.parametrize(
    "content_type",
    [JSON, "Application/JSON", "application/json; charset=utf-8", ""],
)
def test_json_goes_by_several_names(content_type: str) -> None:
    request = decode_score_request(b'{"model":"m","token_ids":[1]}', content_type, SETTINGS)
    assert request.num_tokens == 1


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "x"])
def test_other_formats_are_refused(content_type: str) -> None:
    with pytest.raises(UnsupportedContentType) as refused:
        decode_score_request(b"{}", content_type, SETTINGS)
    assert refused.value.field == "content-type"


TRICKS: list[tuple[bytes, list[int]]] = [
    (b' {\n"token_ids" : [ 1 ,\t2 ] , "model" : "m" } ', [1, 2]),
    (b'{"model":"\\"token_ids\\":[9]","token_ids":[1]}', [1]),
    (b'{"model":"m","lora":"[1]","token_ids":[2]}', [2]),
    (b'{"lora":"token_ids","token_ids":[3],"model":"m"}', [3]),
    (b'{"token_ids":[1],"token_ids":[2,3],"model":"m"}', [2, 3]),
    (b'{"token_ids":null,"token_ids":[4],"model":"m"}', [4]),
    (b'{"extras":[],"token_ids":[5],"model":"m"}', [5]),
    (b'{"tok\\u0065n_ids":[6],"model":"m"}', [6]),
]


@pytest.mark.parametrize(("body", "tokens"), TRICKS)
def test_the_token_list_is_found_wherever_it_stands(body: bytes, tokens: list[int]) -> None:
    assert from_json(body).tokens == array("I", tokens).tobytes()


def test_a_model_that_looks_like_a_list_keeps_its_name() -> None:
    body = b'{"model":"\\"token_ids\\":[9]","token_ids":[1]}'
    assert from_json(body).model == '"token_ids":[9]'


EMPTY, BASE = b"", b'{"model":"m","token_ids":[1]'
BAD_JSON: list[tuple[bytes, str, str]] = [
    (EMPTY, "body", "truncated"),
    (b"{", "body", "truncated"),
    (b"[]", "body", "expected `object`, got `array`"),
    (b"null", "body", "expected `object`, got `null`"),
    (b"1", "body", "expected `object`, got `int`"),
    (BASE + b"} x", "body", "trailing characters"),
    (b'\xef\xbb\xbf{"model":"m"}', "body", "malformed"),
    (b'{"model":"\xff","token_ids":[1]}', "body", "UTF-8"),
    (b'{"model":"\\ud800","token_ids":[1]}', "body", ""),
    (b"[" * 100_000, "body", "expected `object`"),
    (b'{"model":' + b"[" * 100_000, "model", "expected `str`, got `array`"),
    (BASE + b',"extra":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "extra", "unknown field"),
    (b'{"token_ids":[1]}', "model", "required field is missing"),
    (b'{"model":"","token_ids":[1]}', "model", "length"),
    (b'{"model":"' + b"x" * 513 + b'","token_ids":[1]}', "model", "length"),
    (b'{"model":7,"token_ids":[1]}', "model", "expected `str`, got `int`"),
    (b'{"model":"m"}', "token_ids", "expected token_ids or token_ids_b64"),
    (b'{"model":"m","token_ids":null}', "token_ids", "expected token_ids or token_ids_b64"),
    (b'{"model":"m","token_ids":[]}', "token_ids", "an empty prompt"),
    (b'{"model":"m","token_ids":"123"}', "token_ids", "expected `array"),
    (b'{"model":"m","token_ids":{}}', "token_ids", "expected `array"),
    (b'{"model":"m","token_ids":[1,-1]}', "token_ids[1]", "expected 0..4294967295"),
    (b'{"model":"m","token_ids":[4294967296]}', "token_ids[0]", "expected 0..4294967295"),
    (b'{"model":"m","token_ids":[' + b"9" * 30 + b"]}", "token_ids[0]", "0..4294967295"),
    (b'{"model":"m","token_ids":[' + b"9" * 5_000 + b"]}", "token_ids[0]", "out of range"),
    (b'{"model":"m","token_ids":[1.5]}', "token_ids[0]", "got `float`"),
    (b'{"model":"m","token_ids":[1.0]}', "token_ids[0]", "got `float`"),
    (b'{"model":"m","token_ids":[1e400]}', "token_ids[0]", ""),
    (b'{"model":"m","token_ids":["1"]}', "token_ids[0]", "got `str`"),
    (b'{"model":"m","token_ids":[true]}', "token_ids[0]", "got `bool`"),
    (b'{"model":"m","token_ids":[null]}', "token_ids[0]", "got `null`"),
    (b'{"model":"m","token_ids":[[1]]}', "token_ids[0]", "got `array`"),
    (b'{"model":"m","token_ids":[NaN]}', "body", "malformed"),
    (b'{"model":"m","token_ids":[Infinity]}', "body", "malformed"),
    (b'{"model":"m","token_ids":[01]}', "body", "malformed"),
    (b'{"model":"m","x":{"token_ids":[1]}}', "x", "unknown field"),
    (b'{"model":"m","token_ids":[1]]}', "body", "malformed"),
    (b'{"model":"m","token_ids":[1,]}', "body", "malformed"),
    (BASE + b',"token_ids_b64":"AAAAAA=="}', "token_ids_b64", "beside token_ids"),
    (b'{"model":"m","token_ids_b64":""}', "token_ids_b64", "an empty prompt"),
    (b'{"model":"m","token_ids_b64":"AAAAAA"}', "token_ids_b64", "base64"),
    (b'{"model":"m","token_ids_b64":"!!!!"}', "token_ids_b64", "base64"),
    (b'{"model":"m","token_ids_b64":"AAA="}', "token_ids_b64", "expected a multiple of 4"),
    (b'{"model":"m","token_ids_b64":[1]}', "token_ids_b64", "got `array`"),
    (BASE + b',"lora":""}', "lora", "length"),
    (BASE + b',"lora":1}', "lora", "got `int`"),
    (BASE + b',"cache_salt":1}', "cache_salt", "got `int`"),
    (BASE + b',"cache_salt":"' + b"s" * 4097 + b'"}', "cache_salt", "length"),
    (BASE + b',"max_candidates":0}', "max_candidates", ">= 1"),
    (BASE + b',"max_candidates":1025}', "max_candidates", "<= 1024"),
    (BASE + b',"max_candidates":"8"}', "max_candidates", "got `str`"),
    (BASE + b',"extras":{}}', "extras", "expected `array"),
    (BASE + b',"extras":[{}]}', "extras[0].kind", "missing"),
    (BASE + b',"prompt":"x"}', "prompt", "unknown field"),
]


@pytest.mark.parametrize(("body", "field", "problem"), BAD_JSON)
def test_bad_json_is_named(body: bytes, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        from_json(body)
    assert refused.value.field == field
    assert problem in refused.value.problem


BAD_MSGPACK: list[tuple[bytes | dict[str, Any], str, str]] = [
    (b"", "body", "truncated"),
    (b"\xc1", "body", ""),
    (b"\x81\xa5model\xa2\xff\xff", "body", "UTF-8"),
    (b"\x91" * 100_000, "body", "expected `object`"),
    ({"model": "m"}, "token_ids", "expected token_ids or tokens"),
    ({"model": "m", "tokens": b""}, "tokens", "an empty prompt"),
    ({"model": "m", "tokens": b"12345"}, "tokens", "expected a multiple of 4"),
    ({"model": "m", "tokens": "1234"}, "tokens", "got `str`"),
    ({"model": "m", "tokens": b"1234", "token_ids": [1]}, "tokens", "beside token_ids"),
    ({"model": "m", "token_ids": [1.0]}, "token_ids[0]", "got `float`"),
    ({"model": "m", "token_ids": [float("nan")]}, "token_ids[0]", "got `float`"),
    ({"model": "m", "token_ids": [2**64 - 1]}, "token_ids[0]", "0..4294967295"),
    ({"model": "m", "token_ids_b64": "AAAA"}, "token_ids_b64", "unknown field"),
    ({"model": b"m", "token_ids": [1]}, "model", "got `bytes`"),
]


@pytest.mark.parametrize(("body", "field", "problem"), BAD_MSGPACK)
def test_bad_msgpack_is_named(body: bytes | dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        from_msgpack(body)
    assert refused.value.field == field
    assert problem in refused.value.problem


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"offset": -1}, "offset"),
        ({"length": 0}, "length"),
        ({"offset": 6, "length": 3}, "ends at token 9 of a prompt of 8"),
        ({"kind": ""}, "kind"),
        ({"id": 5}, "id"),
        ({"size": 5}, "size"),
        ({"offset": 2**70}, "offset"),
    ],
)
def test_a_bad_extra_is_named(extra: dict[str, Any], problem: str) -> None:
    good = {"kind": "image", "id": "i", "offset": 0, "length": 4}
    with pytest.raises(InvalidRequest) as refused:
        from_json({"model": "m", "token_ids": [1] * 8, "extras": [{**good, **extra}]})
    assert refused.value.field.startswith("extras[0]")
    assert problem in str(refused.value)


def test_extras_may_not_make_a_small_body_hash_much() -> None:
    extras = [{"kind": "k" * 256, "id": "i" * 512, "offset": 0, "length": 8}]
    with pytest.raises(InvalidRequest, match="extras: kinds and ids are too long"):
        from_json({"model": "m", "token_ids": [1] * 8, "extras": extras})


def test_extras_may_not_cost_more_than_their_prompt() -> None:
    extra = {"kind": "image", "id": "i", "offset": 0, "length": 8}
    with pytest.raises(InvalidRequest, match="extras: span 40 tokens of a prompt of 8"):
        from_json({"model": "m", "token_ids": [1] * 8, "extras": [extra] * 5})


@pytest.mark.parametrize("decode", [from_json, from_msgpack])
def test_too_long_a_prompt_is_told_apart(decode: Callable[[dict[str, Any]], ScoreRequest]) -> None:
    with pytest.raises(PromptTooLarge, match="101 tokens, the limit is 100"):
        decode({"model": "m", "token_ids": [1] * 101})


def test_no_error_and_no_text_repeats_a_prompt_or_a_salt() -> None:
    request = ScoreRequest("m", TOKENS, cache_salt="s3cret")
    assert repr(request) == str(request) == "ScoreRequest(model='m', num_tokens=3)"
    for wrong in ({"token_ids": [77_777, "x"]}, {"token_ids": [77_777, -1]}, {"token_ids": 77_777}):
        with pytest.raises(InvalidRequest) as refused:
            from_json({"model": "m", "cache_salt": "s3cret", **wrong})
        assert "77777" not in str(refused.value)
        assert "s3cret" not in str(refused.value)


class TestReports:
    def test_nothing_has_to_be_said(self) -> None:
        assert decode_report(b"", "") == decode_report(b"{}", JSON) == Report()

    def test_json_and_msgpack_say_the_same(self) -> None:
        body = {"ttft_ms": 12.5, "computed_tokens": 7, "pulled_blocks": 1, "failed": False}
        expected = Report(ttft_ms=12.5, computed_tokens=7, pulled_blocks=1)
        assert decode_report(msgspec.json.encode(body), JSON) == expected
        assert decode_report(msgspec.msgpack.encode(body), MSGPACK) == expected

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b'{"ttft_ms":-1}', "ttft_ms"),
            (b'{"ttft_ms":"1"}', "ttft_ms"),
            (b'{"ttft_ms":1e400}', "ttft_ms"),
            (b'{"prefill_ms":1e11}', "prefill_ms"),
            (b'{"computed_tokens":1.5}', "computed_tokens"),
            (b'{"computed_tokens":-1}', "computed_tokens"),
            (b'{"failed":1}', "failed"),
            (b'{"status":"ok"}', "status"),
            (b"[]", "body"),
        ],
    )
    def test_a_bad_report_is_named(self, body: bytes, field: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            decode_report(body, JSON)
        assert refused.value.field == field

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_no_time_is_without_end(self, value: float) -> None:
        with pytest.raises(InvalidRequest):
            decode_report(msgspec.msgpack.encode({"ttft_ms": value}), MSGPACK)
