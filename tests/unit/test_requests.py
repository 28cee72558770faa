"""Bodies of requests: what is read, and what each wrong one is told."""

import base64
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvatlas.indexer import prompt_kernel
from kvatlas.router.decision.requests import HashedPrompt, Report, ScoreRequest
from kvatlas.router.http.bodies.decoding import decode_report, decode_score_request
from kvatlas.schemas.errors import InvalidRequest, PromptTooLarge, UnsupportedContentType
from kvatlas.schemas.hashing import Extra, HashAlgorithm
from kvatlas.schemas.settings import RouterSettings

prompt_kernel.warm()
SETTINGS = RouterSettings(max_prompt_tokens=100)
TOKENS = array("I", [1, 2, 2**32 - 1]).tobytes()
JSON, MSGPACK = "application/json", "application/x-msgpack"
OCTETS = "application/octet-stream"
HASHES = bytes(range(64))
DIGITS = [HASHES[at : at + 16].hex() for at in range(0, 64, 16)]


def from_json(body: bytes | dict[str, Any]) -> ScoreRequest:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return decode_score_request(raw, JSON, SETTINGS)


def from_msgpack(body: bytes | dict[str, Any]) -> ScoreRequest:
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return decode_score_request(raw, MSGPACK, SETTINGS)


def from_octets(body: bytes, query: bytes = b"model=m", salt: bytes | None = None) -> ScoreRequest:
    return decode_score_request(body, OCTETS, SETTINGS, query, salt)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: from_json({"model": "m", "token_ids": [1, 2, 2**32 - 1]}),
        lambda: from_json({"model": "m", "token_ids_b64": base64.b64encode(TOKENS).decode()}),
        lambda: from_msgpack({"model": "m", "token_ids": [1, 2, 2**32 - 1]}),
        lambda: from_msgpack({"model": "m", "tokens": TOKENS}),
        lambda: from_octets(TOKENS),
    ],
    ids=["json list", "json base64", "msgpack list", "msgpack packed", "octets"],
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
    [JSON, "Application/JSON", "application/json; charset=utf-8"],
)
def test_json_goes_by_several_names(content_type: str) -> None:
    request = decode_score_request(b'{"model":"m","token_ids":[1]}', content_type, SETTINGS)
    assert request.num_tokens == 1


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "x", ""]
)
def test_other_formats_and_unnamed_ones_are_refused(content_type: str) -> None:
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
    (EMPTY, "body", "an empty body, expected a JSON object"),
    (b" \n", "body", "an empty body, expected a JSON object"),
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
    (BASE + b',"require":"truth"}', "require", "invalid enum value 'truth'; allowed are 'exact'"),
    (BASE + b',"algorithm":"md5"}', "algorithm", "'md5'; allowed are 'xxh3_128', 'sha256_128'"),
    (BASE + b',"max_candidates":1025}', "max_candidates", "<= 1024"),
    (BASE + b',"max_candidates":"8"}', "max_candidates", "got `str`"),
    (BASE + b',"extras":{}}', "extras", "expected `array"),
    (BASE + b',"extras":[{}]}', "extras[0].kind", "missing"),
    (BASE + b',"prompt":"x"}', "prompt", "unknown field; did you mean token_ids?"),
    (b'{"model":"m","tokens":[1]}', "tokens", "unknown field; did you mean token_ids?"),
    (b'{"model":"m","input_ids":[1]}', "input_ids", "unknown field; did you mean token_ids?"),
    (b'{"model":"m","token_id":[1]}', "token_id", "unknown field; did you mean token_ids?"),
    (BASE + b',"x":1}', "x", "unknown field; known are algorithm, block_hashes, "),
    (BASE + b',"extras":[{"ofset":1}]}', "extras[0].ofset", "unknown field; did you mean offset?"),
]


@pytest.mark.parametrize(("body", "field", "problem"), BAD_JSON)
def test_bad_json_is_named(body: bytes, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        from_json(body)
    assert refused.value.field == field
    assert problem in refused.value.problem


BAD_MSGPACK: list[tuple[bytes | dict[str, Any], str, str]] = [
    (b"", "body", "an empty body, expected a msgpack object"),
    (b"\x81", "body", "truncated"),
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
    ({"model": "m", "token_ids_b64": "AAAA"}, "token_ids_b64", "did you mean tokens?"),
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


class TestHashes:
    @pytest.mark.parametrize(
        "request_of",
        [
            lambda: from_json({"model": "m", "block_hashes": DIGITS}),
            lambda: from_json({"model": "m", "block_hashes": [each.upper() for each in DIGITS]}),
            lambda: from_json(
                {"model": "m", "block_hashes_b64": base64.b64encode(HASHES).decode()}
            ),
            lambda: from_msgpack({"model": "m", "block_hashes": HASHES}),
        ],
        ids=["json list", "json upper case", "json base64", "msgpack packed"],
    )
    def test_every_form_says_the_same(self, request_of: Callable[[], ScoreRequest]) -> None:
        assert request_of() == ScoreRequest("m", b"", hashed=HashedPrompt(HASHES))

    @pytest.mark.parametrize(
        "items",
        [
            '"{0}","{1}"',
            '"{0}", "{1}"',
            '"{0}" ,"{1}"',
            '"{0}","{1}" ',
            '"{0}",\n"{1}"',
            '"\\u0030{2}","{1}"',
        ],
    )
    def test_a_list_may_be_written_in_any_way(self, items: str) -> None:
        digits = ["0" + DIGITS[0][1:], DIGITS[1]]
        text = items.format(*digits, digits[0][1:])
        request = from_json(f'{{"model":"m","block_hashes":[{text}]}}'.encode())
        assert request.hashed == HashedPrompt(bytes.fromhex("".join(digits)))

    @pytest.mark.parametrize(
        "items",
        [
            '"{0}""{1}"',
            '"{0}","{1}","',
            '"{0}0","{2}"',
            '"{0}","{1}',
            '"{0}","{1}]',
            '"{0}","{1}",1',
            '"{0}","{1}",""',
            '"","{0}"',
            '"{0}","","{1}"',
            '"{0}:","{2}"',
            '" {2}","{1}"',
        ],
    )
    def test_what_looks_like_a_list_of_hashes_is_none(self, items: str) -> None:
        text = items.format(DIGITS[0], DIGITS[1], DIGITS[1][1:])
        with pytest.raises(InvalidRequest):
            from_json(f'{{"model":"m","block_hashes":[{text}]}}'.encode())

    def test_everything_optional_is_read(self) -> None:
        body = {
            "model": "m",
            "lora": "l",
            "block_tokens": 16,
            "algorithm": "sha256_128",
            "num_tokens": 70,
            "max_candidates": 3,
        }
        hashed = HashedPrompt(HASHES, 16, HashAlgorithm.sha256_128, 70)
        expected = ScoreRequest("m", b"", "l", max_candidates=3, hashed=hashed)
        assert from_json({**body, "block_hashes": DIGITS}) == expected
        assert from_msgpack({**body, "block_hashes": HASHES}) == expected

    def test_a_prompt_shorter_than_a_block_has_no_hashes(self) -> None:
        request = from_json({"model": "m", "block_hashes": [], "num_tokens": 5})
        assert request.hashed == HashedPrompt(b"", num_tokens=5)

    @pytest.mark.parametrize(
        ("more", "field", "problem"),
        [
            ({"block_hashes": []}, "block_hashes", "an empty prompt"),
            ({"block_hashes": ["0" * 31]}, "block_hashes[0]", "expected 32 hex digits"),
            ({"block_hashes": [DIGITS[0], "g" * 32]}, "block_hashes[1]", "expected 32 hex digits"),
            ({"block_hashes": ["0" * 30 + "  "]}, "block_hashes[0]", "expected 32 hex digits"),
            ({"block_hashes": ["0" * 31, "0" * 33]}, "block_hashes[0]", "expected 32 hex digits"),
            ({"block_hashes": ["\u0660" * 32]}, "block_hashes[0]", "expected 32 hex digits"),
            ({"block_hashes": [1]}, "block_hashes[0]", "expected `str`, got `int`"),
            ({"block_hashes": "00"}, "block_hashes", "expected `array"),
            (
                {"block_hashes_b64": "AAAA"},
                "block_hashes_b64",
                "3 bytes, expected a multiple of 16",
            ),
            ({"block_hashes": DIGITS, "token_ids": [1]}, "block_hashes", "beside token_ids"),
            ({"block_hashes": DIGITS, "block_hashes_b64": ""}, "block_hashes_b64", "beside block"),
            ({"block_hashes": DIGITS, "cache_salt": ""}, "cache_salt", "is part of the hashes"),
            (
                {
                    "block_hashes": DIGITS,
                    "extras": [{"kind": "k", "id": "i", "offset": 0, "length": 1}],
                },
                "extras",
                "is part of the hashes",
            ),
            ({"block_hashes": DIGITS, "block_tokens": 0}, "block_tokens", ">= 1"),
            ({"block_hashes": DIGITS, "block_tokens": 65_537}, "block_tokens", "<= 65536"),
            ({"block_hashes": DIGITS, "algorithm": "md5"}, "algorithm", "nvalid enum value"),
            ({"block_hashes": DIGITS, "num_tokens": 0}, "num_tokens", ">= 1"),
            ({"token_ids": [1], "block_tokens": 16}, "block_tokens", "beside hashes only"),
            ({"token_ids": [1], "algorithm": "sha256_128"}, "algorithm", "beside hashes only"),
            ({"token_ids": [1], "num_tokens": 1}, "num_tokens", "beside hashes only"),
        ],
    )
    def test_what_is_wrong_is_named(self, more: dict[str, Any], field: str, problem: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            from_json({"model": "m", **more})
        assert refused.value.field == field
        assert problem in refused.value.problem

    def test_packed_hashes_are_whole(self) -> None:
        with pytest.raises(InvalidRequest, match="block_hashes: 15 bytes, expected a multiple"):
            from_msgpack({"model": "m", "block_hashes": HASHES[:15]})
        with pytest.raises(InvalidRequest, match=r"block_hashes: expected .*got `array`"):
            from_msgpack({"model": "m", "block_hashes": DIGITS})

    @pytest.mark.parametrize(
        "more",
        [
            {"block_hashes": DIGITS, "block_tokens": 26},
            {"block_hashes": DIGITS * 26},
            {"block_hashes": DIGITS, "num_tokens": 101},
        ],
    )
    def test_too_long_a_prompt_is_told_apart(self, more: dict[str, Any]) -> None:
        with pytest.raises(PromptTooLarge, match=r"10[14] tokens, the limit is 100"):
            from_json({"model": "m", **more})

    def test_no_text_repeats_a_hash(self) -> None:
        request = from_json({"model": "m", "block_hashes": DIGITS})
        assert str(request) == "ScoreRequest(model='m', HashedPrompt(num_blocks=4))"


class TestOctets:
    def test_everything_optional_stands_beside_them(self) -> None:
        query = b"model=a%2Fb&lora=l+x&max_candidates=3&require=exact"
        expected = ScoreRequest(
            "a/b", TOKENS, "l x", "s\u00e9", max_candidates=3, requires_exact=True
        )
        assert from_octets(TOKENS, query, "s\u00e9".encode()) == expected

    def test_an_empty_salt_is_one(self) -> None:
        assert from_octets(TOKENS, salt=b"").cache_salt == ""

    @pytest.mark.parametrize(
        ("body", "query", "salt", "field", "problem"),
        [
            (b"", b"model=m", None, "body", "an empty prompt"),
            (b"12345", b"model=m", None, "body", "expected a multiple of 4"),
            (TOKENS, b"", None, "model", "required field is missing"),
            (TOKENS, b"lora=l", None, "model", "required field is missing"),
            (TOKENS, b"model=", None, "model", "length"),
            (TOKENS, b"model=m&model=n", None, "query", "twice"),
            (
                TOKENS,
                b"model=m&x=1",
                None,
                "x",
                "unknown field; known are algorithm, block_tokens, lookahead_tokens, lora, ",
            ),
            (TOKENS, b"model=m&require=exakt", None, "require", "'exakt'; allowed are 'exact'"),
            (TOKENS, b"model=%ff", None, "query", "percent-encoded"),
            (TOKENS, b"model=m\xff", None, "query", "percent-encoded"),
            (TOKENS, b"model=m&" + b"&".join([b"x=1"] * 17), None, "query", "name=value"),
            (TOKENS, b"model=m&max_candidates=0", None, "max_candidates", ">= 1"),
            (TOKENS, b"model=m&max_candidates=x", None, "max_candidates", "expected `int"),
            (TOKENS, b"model=m&cache_salt=s3cret", None, "cache_salt", "not in a URL"),
            (TOKENS, b"model=m", b"\xff", "x-kvatlas-cache-salt", "UTF-8"),
            (TOKENS, b"model=m", b"s" * 4097, "x-kvatlas-cache-salt", "at most 4096"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, body: bytes, query: bytes, salt: bytes | None, field: str, problem: str
    ) -> None:
        with pytest.raises(InvalidRequest) as refused:
            from_octets(body, query, salt)
        assert refused.value.field == field
        assert problem in refused.value.problem
        assert "s3cret" not in str(refused.value)

    def test_too_long_a_prompt_is_told_apart(self) -> None:
        with pytest.raises(PromptTooLarge, match="body: 101 tokens, the limit is 100"):
            from_octets(bytes(4 * 101))

    def test_they_are_hashes_where_the_query_says_so(self) -> None:
        query = b"model=m&prompt=block_hashes&block_tokens=16&algorithm=sha256_128&num_tokens=70"
        query += b"&lookahead_tokens=2&lora=l&max_candidates=3&require=exact"
        hashed = HashedPrompt(HASHES, 16, HashAlgorithm.sha256_128, 70, 2)
        expected = ScoreRequest("m", b"", "l", max_candidates=3, hashed=hashed, requires_exact=True)
        assert from_octets(HASHES, query) == expected
        assert from_octets(TOKENS, b"model=m&prompt=tokens") == from_octets(TOKENS)

    @pytest.mark.parametrize(
        ("body", "query", "salt", "field", "problem"),
        [
            (b"", b"prompt=block_hashes", None, "body", "an empty prompt"),
            (HASHES[:15], b"prompt=block_hashes", None, "body", "expected a multiple of 16"),
            (HASHES, b"prompt=block_hashes", b"s", "x-kvatlas-cache-salt", "is part of the hashes"),
            (HASHES, b"prompt=hashes", None, "prompt", "'hashes'"),
            (HASHES, b"prompt=block_hashes&num_tokens=0", None, "num_tokens", ">= 1"),
            (TOKENS, b"num_tokens=4", None, "num_tokens", "beside hashes only"),
            (TOKENS, b"prompt=tokens&block_tokens=16", None, "block_tokens", "beside hashes only"),
        ],
    )
    def test_what_is_wrong_about_hashes_is_named(
        self, body: bytes, query: bytes, salt: bytes | None, field: str, problem: str
    ) -> None:
        with pytest.raises(InvalidRequest) as refused:
            from_octets(body, b"model=m&" + query, salt)
        assert refused.value.field == field
        assert problem in refused.value.problem

    def test_too_many_hashes_are_told_apart(self) -> None:
        with pytest.raises(PromptTooLarge, match="body: 101 tokens, the limit is 100"):
            from_octets(bytes(16 * 101), b"model=m&prompt=block_hashes")

    @pytest.mark.parametrize("content_type", [JSON, MSGPACK])
    def test_nothing_stands_beside_another_body(self, content_type: str) -> None:
        with pytest.raises(InvalidRequest, match="query: put it into the body"):
            decode_score_request(b"{}", content_type, SETTINGS, b"model=m")
        with pytest.raises(InvalidRequest, match="x-kvatlas-cache-salt: expected cache_salt in"):
            decode_score_request(b"{}", content_type, SETTINGS, b"", b"s")


class TestReports:
    def test_octets_are_no_report(self) -> None:
        with pytest.raises(UnsupportedContentType, match="expected one of"):
            decode_report(b"1234", OCTETS)

    def test_nothing_has_to_be_said(self) -> None:
        assert decode_report(b"", "") == decode_report(b"{}", JSON) == Report()

    @pytest.mark.parametrize(
        "usage",
        [
            {
                "prompt_tokens": 640,
                "completion_tokens": 7,
                "total_tokens": 647,
                "prompt_tokens_details": {"cached_tokens": 512, "audio_tokens": None},
            },
            {
                "input_tokens": 640,
                "output_tokens": 7,
                "input_tokens_details": {"cached_tokens": 512},
            },
        ],
        ids=["chat", "responses"],
    )
    def test_an_engines_usage_is_read_as_it_stands(self, usage: dict[str, Any]) -> None:
        body = msgspec.json.encode({"usage": usage, "ttft_ms": 3.0})
        expected = Report(ttft_ms=3.0, cached_tokens=512, prompt_tokens=640, output_tokens=7)
        assert decode_report(body, JSON) == expected

    def test_a_usage_without_details_says_nothing_of_the_cache(self) -> None:
        usage = {"prompt_tokens": 640, "completion_tokens": 7, "prompt_tokens_details": None}
        body = msgspec.json.encode({"usage": usage, "output_tokens": 9})
        assert decode_report(body, JSON) == Report(prompt_tokens=640, output_tokens=9)

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
