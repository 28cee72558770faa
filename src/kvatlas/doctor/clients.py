"""The two servers that the doctor asks: an engine with OpenAI's routes, and our router."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from kvatlas.doctor.facts import UNREADABLE, ProbedFacts, engine_facts
from kvatlas.router.answers import ScoreAnswer, WorkersAnswer
from kvatlas.schemas.errors import KeyRefused, NoAnswer

_Answer = TypeVar("_Answer")

#: a busy engine may let a probe wait for its turn
REQUEST_SECONDS = 60.0
#: of one answer; what is longer is none
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_CANDIDATES = 1024
#: of what a server says in refusing a request, to be shown
MAX_SHOWN = 200


class Completed(Struct, frozen=True):
    """Tokens that the engine had cached, if it says so; or why it refused."""

    reported_tokens: int | None = None
    refused: str = ""


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Completion(Struct, frozen=True):
    usage: _Usage | None = None


class _Tokenized(Struct, frozen=True):
    tokens: tuple[int, ...]


class _Version(Struct, frozen=True):
    version: str = ""


def doctor_session() -> aiohttp.ClientSession:
    """Return the session that both clients use; the caller closes it."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS))


class EngineClient:
    """Asks an engine; `rank` picks one of several data-parallel ones. Raises NoAnswer."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api_key: str, rank: int | None = None
    ) -> None:
        self._session, self.url = session, url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if rank is not None:
            self._headers["x-data-parallel-rank"] = str(rank)

    async def facts(self) -> ProbedFacts:
        """Return what it says of itself."""
        status, models = await self._get("/v1/models")
        if status in (401, 403):
            raise KeyRefused(self.url, f"refuses the key with {status}")
        if status != 200:
            raise NoAnswer(self.url, f"/v1/models answers {status}")
        _, metrics = await self._get("/metrics")
        _, version = await self._get("/version")
        status, info = await self._get("/server_info")
        try:
            return engine_facts(
                models,
                metrics.decode("utf-8", "replace"),
                info if status == 200 else b"",
                _version(version),
            )
        except UNREADABLE as error:
            raise NoAnswer(self.url, f"/v1/models is no list of models: {error}") from error

    async def complete(
        self, model: str, tokens: Sequence[int], cache_salt: str | None = None
    ) -> Completed:
        """Let it serve a prompt and one token more."""
        body: dict[str, Any] = {"model": model, "prompt": list(tokens), "max_tokens": 1}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return await self._serve("/v1/completions", body)

    async def chat(self, model: str, messages: Sequence[dict[str, str]]) -> Completed:
        """Let it serve a conversation and one token more."""
        body = {"model": model, "messages": list(messages), "max_tokens": 1}
        return await self._serve("/v1/chat/completions", body)

    async def tokenize(
        self, model: str, text: str | Sequence[dict[str, str]]
    ) -> tuple[int, ...] | None:
        """Return its token ids of a text or a conversation, None if it does not tell."""
        field = {"prompt": text} if isinstance(text, str) else {"messages": list(text)}
        status, answer = await self._post("/tokenize", {"model": model, **field})
        if status != 200:
            return None
        try:
            return msgspec.json.decode(answer, type=_Tokenized).tokens
        except UNREADABLE:
            return None

    async def _serve(self, path: str, body: dict[str, Any]) -> Completed:
        status, answer = await self._post(path, body)
        if status != 200:
            return Completed(refused=f"{status} {_shown(answer)}")
        try:
            usage = msgspec.json.decode(answer, type=_Completion).usage
        except UNREADABLE as error:
            raise NoAnswer(self.url, f"{path} answers something else: {error}") from error
        details = usage.prompt_tokens_details if usage else None
        return Completed(details.cached_tokens if details else None)

    async def _get(self, path: str) -> tuple[int, bytes]:
        return await _ask(self._session, "GET", self.url, path, self._headers, None)

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return await _ask(self._session, "POST", self.url, path, self._headers, body)


class RouterClient:
    """Asks a router. Raises NoAnswer."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url

    async def workers(self) -> WorkersAnswer:
        """Return all workers as the router knows them."""
        status, answer = await _ask(self._session, "GET", self.url, "/v1/workers", {}, None)
        if status != 200:
            raise NoAnswer(self.url, f"/v1/workers answers {status} {_shown(answer)}")
        return _decoded(self.url, answer, WorkersAnswer)

    async def match(
        self,
        model: str,
        tokens: Sequence[int],
        worker: str,
        rank: int,
        cache_salt: str | None = None,
    ) -> int:
        """Return how many tokens of a prompt an instance is believed to hold."""
        body: dict[str, Any] = {
            "model": model, "token_ids": list(tokens), "max_candidates": MAX_CANDIDATES,
        }  # fmt: skip
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        status, answer = await _ask(self._session, "POST", self.url, "/v1/score", {}, body)
        if status != 200:
            raise NoAnswer(self.url, f"/v1/score answers {status} {_shown(answer)}")
        for candidate in _decoded(self.url, answer, ScoreAnswer).candidates:
            if (candidate.worker, candidate.rank) == (worker, rank):
                return candidate.match_tokens
        return 0


async def _ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    path: str,
    headers: dict[str, str],
    body: dict[str, Any] | None,
) -> tuple[int, bytes]:
    data = None if body is None else msgspec.json.encode(body)
    headers = headers if body is None else headers | {"content-type": "application/json"}
    try:
        async with session.request(method, url + path, data=data, headers=headers) as answer:
            content = bytearray()
            async for chunk in answer.content.iter_chunked(65_536):
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise NoAnswer(url, f"answers more than {MAX_ANSWER_BYTES} bytes")
            return answer.status, bytes(content)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise NoAnswer(url, str(error) or f"no answer within {REQUEST_SECONDS:g} s") from error


def _decoded(url: str, answer: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(answer, type=kind)
    except UNREADABLE as error:
        raise NoAnswer(url, f"answers something else: {error}") from error


def _version(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=_Version).version
    except UNREADABLE:
        return ""


def _shown(answer: bytes) -> str:
    """Return the beginning of a refusal, without control characters and without lists of tokens."""
    text = re.sub(r"\[[\d,\s]{8,}\]", "[...]", answer.decode("utf-8", "replace"))
    return " ".join(text.split())[:MAX_SHOWN]
