"""A reference worker that looks like a vLLM server, and does on demand what engines do wrong."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fastapi import FastAPI, HTTPException, Request, Response

from testkit.server import served

BLOCK_TOKENS = 16


class FrontEngine:
    """Serves what vLLM serves, by a reference worker; attributes make it misbehave.

    A word is a token: `t7` is 7, any other one is by its hash; a conversation begins with 241.
    """

    def __init__(self, worker_url: str, model: str) -> None:
        self.worker_url, self.model = worker_url, model
        self.url = ""
        self.behave()

    def behave(self) -> None:
        """Do everything right again."""
        self.block_tokens = BLOCK_TOKENS
        self.prefix_caching = True
        self.reports_cached_tokens = True
        self.adapters: dict[str, str] = {}
        #: serves and caches by itself: nothing of it gets out
        self.tells_events = True
        #: caches salted prompts together with all others
        self.minds_salts = True
        #: /tokenize says one thing, the prompt is another
        self.tokenizes_truly = True
        self.api_key = ""
        self._own_blocks: set[bytes] = set()

    def tokens_of(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [_token(word) for word in text.split()]

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation."""
        return [241, *(id_ for message in messages for id_ in self.tokens_of(message["content"]))]

    async def complete(
        self, client: aiohttp.ClientSession, prompt: list[int], salt: str | None
    ) -> dict[str, Any]:
        """Serve a prompt, here or by the worker."""
        if not self.tells_events:
            return self._usage(len(prompt), self._cached_here(prompt))
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        if self.minds_salts and salt is not None:
            body["cache_salt"] = salt
        async with client.post(f"{self.worker_url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return self._usage(len(prompt), cached if self.prefix_caching else 0)

    def metrics(self) -> str:
        """Return the metric that says how the cache is set up."""
        labels = {
            "block_size": str(self.block_tokens),
            "enable_prefix_caching": str(self.prefix_caching),
            "prefix_caching_hash_algo": "sha256",
        }
        shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return f"vllm:cache_config_info{{{shown}}} 1.0\n"

    def _usage(self, prompt_tokens: int, cached: int) -> dict[str, Any]:
        details = {"cached_tokens": cached} if self.reports_cached_tokens else None
        return {"usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}}

    def _cached_here(self, prompt: list[int]) -> int:
        ends = range(self.block_tokens, len(prompt), self.block_tokens)
        names = [hashlib.sha256(repr(prompt[:end]).encode()).digest() for end in ends]
        known = [name in self._own_blocks for name in names]
        self._own_blocks.update(names)
        return (known.index(False) if False in known else len(known)) * self.block_tokens


@asynccontextmanager
async def front_engine(worker_url: str, model: str) -> AsyncIterator[FrontEngine]:
    """Serve one in front of a running reference worker."""
    engine = FrontEngine(worker_url, model)
    async with aiohttp.ClientSession() as client, served(_app(engine, client)) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


def _app(engine: FrontEngine, client: aiohttp.ClientSession) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        if engine.api_key and request.headers.get("authorization") != f"Bearer {engine.api_key}":
            raise HTTPException(401)
        cards = [{"id": engine.model, "parent": None}]
        return {"data": cards + [{"id": a, "parent": m} for a, m in engine.adapters.items()]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics(), media_type="text/plain")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": "0.0-front"}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await request.json()
        if "messages" in body:
            tokens = engine.chat_tokens(body["messages"])
        else:
            tokens = engine.tokens_of(body["prompt"])
        return {"tokens": tokens, "count": len(tokens)}

    @app.post("/v1/completions")
    async def completions(request: Request) -> dict[str, Any]:
        body = await request.json()
        return await engine.complete(client, body["prompt"], body.get("cache_salt"))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        tokens = engine.chat_tokens((await request.json())["messages"])
        return await engine.complete(client, tokens if engine.tokenizes_truly else tokens[1:], None)

    return app


def _token(word: str) -> int:
    if word[:1] == "t" and word[1:].isdecimal():
        return int(word[1:])
    return hashlib.sha256(word.encode()).digest()[0]
