"""What the reference engine says of a request that it cannot serve."""

from collections.abc import Callable

import httpx
import msgspec
import pytest

from kvatlas.reference.http import create_worker_app

KINDS: list[tuple[str, Callable[[object], bytes]]] = [
    ("application/json", msgspec.json.encode),
    ("application/x-msgpack", msgspec.msgpack.encode),
]


async def refused(body: bytes, kind: str) -> str:
    app = create_worker_app(None, None, "m")  # type: ignore[arg-type] # neither is asked here
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post("/v1/completions", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize(("kind", "encode"), KINDS)
@pytest.mark.parametrize("prompt", ["", "Hello", "aGVsbG8h", ["Hello"]])
async def test_a_prompt_in_words_is_told_why_not(
    kind: str, encode: Callable[[object], bytes], prompt: object
) -> None:
    """The third is base64 as well, which was taken for tokens."""
    told = "prompt: expected token ids; the reference engine has no tokenizer"
    assert await refused(encode({"model": "m", "prompt": prompt}), kind) == told


@pytest.mark.parametrize(("kind", "name"), [(KINDS[0][0], "JSON"), (KINDS[1][0], "msgpack")])
async def test_an_empty_body_is_called_so(kind: str, name: str) -> None:
    assert await refused(b"", kind) == f"body: an empty body, expected a {name} object"
