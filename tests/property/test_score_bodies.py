"""However a prompt is sent, and in tokens or hashes, the same decision comes of it."""

from array import array
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.index import kernel
from kvatlas.router.decision.requests import ScoreRequest
from kvatlas.router.http.bodies import bodies
from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.schemas.errors import InvalidRequest
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import MODEL, Fleet

prompt_kernel.warm()
kernel.warm()
SETTINGS = RouterSettings()
JSON, MSGPACK = "application/json", "application/x-msgpack"
OCTETS = "application/octet-stream"
ADAPTERS = {"style": MODEL}
DESCRIPTORS = [
    NamespaceDescriptor(block_tokens, algorithm)
    for block_tokens in (1, 4, 16)
    for algorithm in HashAlgorithm
]

prompts = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70)
adapters = st.sampled_from([None, "style"])
#: of each worker: how many leading blocks of the prompt it holds
holdings = st.lists(st.integers(0, 20), min_size=1, max_size=4)


def in_tokens(prompt: list[int], lora: str | None) -> dict[str, ScoreRequest]:
    packed, said = array("I", prompt).tobytes(), {"model": MODEL, "lora": lora}
    in_json = msgspec.json.encode({**said, "token_ids": prompt})
    in_msgpack = msgspec.msgpack.encode({**said, "tokens": packed})
    query = f"model={MODEL}" + (f"&lora={lora}" if lora else "")
    return {
        "json": decode_score_request(in_json, JSON, SETTINGS),
        "msgpack": decode_score_request(in_msgpack, MSGPACK, SETTINGS),
        "octets": decode_score_request(packed, OCTETS, SETTINGS, query.encode()),
    }


def in_hashes(
    prompt: list[int], lora: str | None, descriptor: NamespaceDescriptor, is_told: bool
) -> dict[str, ScoreRequest]:
    chain = BlockHasher(descriptor.namespace(MODEL, lora, None)).chain(prompt)
    said: dict[str, Any] = {"model": MODEL, "lora": lora, "num_tokens": len(prompt)}
    if is_told:
        said |= {"block_tokens": descriptor.block_tokens, "algorithm": descriptor.algorithm}
    digits = [chain[at : at + 16].hex() for at in range(0, len(chain), 16)]
    bodies = {
        "json": (msgspec.json.encode({**said, "block_hashes": digits}), JSON),
        "base64": (msgspec.json.encode({**said, "block_hashes_b64": chain}), JSON),
        "msgpack": (msgspec.msgpack.encode({**said, "block_hashes": chain}), MSGPACK),
    }
    requests = {name: decode_score_request(*body, SETTINGS) for name, body in bodies.items()}
    said |= {"prompt": "block_hashes"}
    query = urlencode({name: value for name, value in said.items() if value is not None})
    requests["octets"] = decode_score_request(chain, OCTETS, SETTINGS, query.encode())
    return requests


def a_fleet(
    held: list[int], prompt: list[int], lora: str | None, descriptor: NamespaceDescriptor
) -> Fleet:
    fleet = Fleet()
    for number, num_blocks in enumerate(held):
        name = f"w{number}"
        fleet.up(
            name,
            block_tokens=descriptor.block_tokens,
            algorithm=descriptor.algorithm,
            adapters=ADAPTERS,
        )
        fleet.holds(name, prompt, num_blocks=num_blocks, lora=lora)
    return fleet


@given(prompts, adapters, holdings, st.sampled_from(DESCRIPTORS), st.booleans())
def test_every_body_gets_the_same_answers(
    prompt: list[int],
    lora: str | None,
    held: list[int],
    descriptor: NamespaceDescriptor,
    is_told: bool,
) -> None:
    fleet = a_fleet(held, prompt, lora, descriptor)
    requests = [
        *in_tokens(prompt, lora).values(),
        *in_hashes(prompt, lora, descriptor, is_told).values(),
    ]
    expected = None
    for request in requests:
        router = fleet.router()  # each is the first that its router is asked
        answers = router.score(request), router.route(request)
        expected = expected or answers
        assert answers == expected


@given(prompts, adapters, holdings, st.permutations(DESCRIPTORS))
def test_hashes_see_what_their_group_holds(
    prompt: list[int],
    lora: str | None,
    held: list[int],
    descriptors: list[NamespaceDescriptor],
) -> None:
    mine, other = descriptors[:2]
    fleet, alone = (a_fleet(held, prompt, lora, mine) for _ in range(2))
    fleet.up("other", block_tokens=other.block_tokens, algorithm=other.algorithm, adapters=ADAPTERS)
    fleet.holds("other", prompt, lora=lora)
    alone.up("elsewhere", model="another")
    alone.tell("elsewhere")  # both logs have one length, which answers tell
    for request in in_hashes(prompt, lora, mine, is_told=True).values():
        assert fleet.router().score(request) == alone.router().score(request)


@pytest.mark.parametrize(
    "prompt",
    [b'"token_ids": [1, 2]', b'"num_tokens": 16, "block_hashes": ["%b"]' % (b"a" * 32)],
)
def test_a_prompt_that_is_named_twice_is_what_it_is_last(prompt: bytes) -> None:
    """As in all of JSON that is read here, also where the list is cut out and read by itself."""
    field = prompt[: prompt.index(b": [")].rpartition(b" ")[2].strip(b'"').decode()
    body = b'{"model": "m", %b, "%b": null}' % (prompt, field.encode())
    with pytest.raises(InvalidRequest, match=f"expected .*{field}"):
        decode_score_request(body, JSON, SETTINGS)


AN_EXTRA = {"kind": "image", "id": 'i"[', "offset": 0, "length": 1}
odd_values = st.sampled_from([None, -1, 2**32, 1.5, True, 'a "b\\', [1, 2], [], {}, AN_EXTRA])
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=30)
fields = st.one_of(
    st.tuples(st.just("token_ids"), token_lists),
    st.tuples(st.just("token_ids"), st.lists(st.one_of(st.integers(0, 9), odd_values))),
    st.tuples(st.just("extras"), st.lists(st.just(AN_EXTRA), max_size=2)),
    st.tuples(st.just("block_hashes"), st.lists(st.just("00ff" * 8), max_size=3)),
    st.sampled_from([("model", "m"), ("cache_salt", "s,["), ("lora", "l"), ("require", "exact")]),
    st.tuples(st.sampled_from(["model", "what", "token_ids", "token_ids_b64"]), odd_values),
)


@given(st.lists(fields, max_size=5), st.sampled_from([",", ", ", " ,\n"]), st.booleans())
def test_bodies_that_are_walked_first_say_the_same(
    extra: list[tuple[str, Any]], separator: str, is_json: bool
) -> None:
    """Fields in any order, twice, unknown and wrong: as if the decoder alone had read them."""
    sent = [("model", "m"), *extra]
    if is_json:
        texts = [
            msgspec.json.encode(key) + b":" + msgspec.json.encode(value) for key, value in sent
        ]
        body, kind = b"{" + separator.encode().join(texts) + b"}", JSON
    else:
        encode = msgspec.msgpack.encode
        body = bytes([0x80 | len(sent)]) + b"".join(encode(k) + encode(v) for k, v in sent)
        kind = MSGPACK

    def outcome() -> object:
        try:
            return decode_score_request(body, kind, SETTINGS)
        except InvalidRequest as error:
            return type(error), str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SMALL_BYTES", 64)
        walked = outcome()
        patch.setattr(prompt_kernel, "IS_FAST", False)
        assert walked == outcome()
