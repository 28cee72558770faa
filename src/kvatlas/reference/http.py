"""The HTTP of a reference worker, as that of vLLM.

POST /v1/completions   serve a prompt, with the router's plan in `kv_transfer_params`; with `stream`
                       as server-sent events while the output grows
POST /v1/reset         forget the cache
GET  /v1/models        the one that it serves
GET  /v1/kv/digest     what the engine itself says that it holds, for comparison with the index
GET  /metrics          what its sidecar counts, for Prometheus
GET  /health           503 while the worker drains
"""

import asyncio
import functools
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta, Struct

from kvatlas.reference.engine import ReferenceEngine
from kvatlas.reference.requests import Completion
from kvatlas.router.http.server.messages import ClientGone, read_body
from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.errors import (
    InvalidInput,
    InvalidRequest,
    KvatlasError,
    PromptTooLarge,
    RequestTooSlow,
    UnsupportedContentType,
)
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.routing import Plan
from kvatlas.schemas.settings import RouterSettings
from kvatlas.worker_hooks.sidecar.channel import SidecarChannel
from kvatlas.worker_hooks.sidecar.metrics import exposition

JSON = "application/json"
MSGPACK_TYPES = ("application/x-msgpack", "application/msgpack", "application/vnd.msgpack")


class _KvatlasParams(Struct, frozen=True):
    plan: Plan | None = None
    decision_id: str = ""


class _StreamOptions(Struct, frozen=True):
    #: one more event before the end, with the usage and no choices
    include_usage: bool = False


class _TransferParams(Struct, frozen=True):
    kvatlas: _KvatlasParams = _KvatlasParams()


_Prompt = TypeVar("_Prompt")
_Tokens = tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...]


class _CompletionRequest(Struct, Generic[_Prompt], frozen=True):
    """The part of an OpenAI completion request that an engine without a tokenizer can serve."""

    model: str
    prompt: _Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 16
    cache_salt: str | None = None
    kv_transfer_params: _TransferParams = _TransferParams()
    stream: bool = False
    stream_options: _StreamOptions | None = None


_json_requests = msgspec.json.Decoder(_CompletionRequest[_Tokens])
_msgpack_requests = msgspec.msgpack.Decoder(_CompletionRequest[bytes | _Tokens])
_TEXT_PROMPT = re.compile(r"got `str` - at `\$\.prompt\b")

#: of a worker whose name no client asks for
UNNAMED = InstanceId("reference", 0)


def create_worker_app(
    engine: ReferenceEngine,
    channel: SidecarChannel,
    model: str,
    is_draining: Callable[[], bool] = lambda: False,
    max_body_bytes: int = RouterSettings().max_body_bytes,
    instance: InstanceId = UNNAMED,
) -> FastAPI:
    """Return the HTTP application of one reference worker."""
    app = FastAPI(title="kvatlas reference worker", docs_url=None, redoc_url=None)
    started = int(time.time())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        declared = request.headers.get("content-length", "0")
        declared_bytes = int(declared) if declared.isdecimal() else 0
        body = await read_body(request.receive, declared_bytes, max_body_bytes)
        asked = _decode(body, request.headers.get("content-type", ""))
        if asked.model != model:
            raise InvalidRequest("model", f"this worker serves {model!r}")
        if asked.stream_options is not None and not asked.stream:
            raise InvalidRequest("stream_options", 'expected beside "stream": true only')
        prompt = asked.prompt if isinstance(asked.prompt, bytes) else list(asked.prompt)
        serve = functools.partial(
            engine.submit,
            prompt,
            asked.max_tokens,
            asked.cache_salt,
            asked.kv_transfer_params.kvatlas.plan,
        )
        if not asked.stream:
            return _json(_completion(asked, await serve()))
        output = _Output(serve)
        await output.begun()
        return StreamingResponse(_events(asked, output), media_type="text/event-stream")

    @app.post("/v1/reset")
    async def reset() -> Response:
        return _json({"reset": engine.reset()})

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": model, "object": "model", "created": started, "owned_by": "kvatlas"}
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/kv/digest")
    async def digest() -> Response:
        flushed = await channel.flush()
        held = digest_of(engine.store.pool.cached_hashes())
        digests = {Tier.hbm.name: {"count": held.count, "xor": f"{held.xor:016x}"}}
        return _json({"epoch": flushed.epoch, "seq": flushed.seq, "digests": digests})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = exposition(instance, await channel.status())
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> Response:
        if is_draining():
            return _json({"status": "draining"}, 503)
        return _json({"status": "ok"})

    @app.exception_handler(InvalidInput)
    async def invalid(_: Request, error: InvalidInput) -> Response:
        return _json(_error(error), _status_of(error))

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=400)  # it is not sent

    @app.exception_handler(KvatlasError)
    async def unavailable(_: Request, error: KvatlasError) -> Response:
        return _json(_error(error), 503)

    return app


def _error(error: KvatlasError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__}}


def _status_of(error: InvalidInput) -> int:
    match error:
        case UnsupportedContentType():
            return 415
        case RequestTooSlow():
            return 408
        case PromptTooLarge(field="body"):
            return 413
        case _:
            return 400


def _decode(body: bytes, content_type: str) -> _CompletionRequest[Any]:
    media_type = content_type.partition(";")[0].strip().lower()
    is_msgpack = media_type in MSGPACK_TYPES
    if body and not is_msgpack and media_type != JSON:
        found = repr(media_type[:64]) if media_type else "none"
        problem = f"expected one of {JSON}, {MSGPACK_TYPES[0]}, found {found}"
        raise UnsupportedContentType("content-type", problem)
    try:
        return _msgpack_requests.decode(body) if is_msgpack else _json_requests.decode(body)
    except msgspec.DecodeError as error:
        if _TEXT_PROMPT.search(str(error)):
            problem = "expected token ids; the reference engine has no tokenizer"
            raise InvalidRequest("prompt", problem) from error
        if not body.strip():
            form = "msgpack" if is_msgpack else "JSON"
            raise InvalidRequest("body", f"an empty body, expected a {form} object") from error
        raise InvalidRequest("body", str(error)) from error


def _completion(asked: _CompletionRequest[Any], done: Completion) -> dict[str, Any]:
    return {
        **_head(asked),
        "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
        "usage": _usage(done),
        "kvatlas": done,
    }


def _head(asked: _CompletionRequest[Any]) -> dict[str, Any]:
    return {
        "id": f"cmpl-{asked.kv_transfer_params.kvatlas.decision_id}",
        "object": "text_completion",
        "model": asked.model,
    }


def _usage(done: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.output_tokens,
        "total_tokens": done.prompt_tokens + done.output_tokens,
        "prompt_tokens_details": {"cached_tokens": done.prompt_tokens - done.computed_tokens},
    }


class _Output:
    """A completion that is followed while it grows; its end is put behind its tokens.

    What waits to be sent is bounded by `max_tokens`, as the output in the engine is.
    """

    def __init__(self, serve: Callable[..., Coroutine[Any, Any, Completion]]) -> None:
        self._parts = asyncio.Queue[bytes | None]()
        self.done = asyncio.ensure_future(serve(on_tokens=self._parts.put_nowait))
        self.done.add_done_callback(lambda _: self._parts.put_nowait(None))
        self._first: bytes | None = None

    async def begun(self) -> None:
        """Return once there are tokens, or the end; raises what kept it from being served."""
        try:
            self._first = await self._parts.get()
        except asyncio.CancelledError:
            self.done.cancel()
            raise
        if self._first is None:
            self.done.result()

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the tokens of the output as they come, packed."""
        part = self._first
        while part is not None:
            yield part
            part = await self._parts.get()


async def _events(asked: _CompletionRequest[Any], output: _Output) -> AsyncGenerator[bytes, None]:
    """Yield a completion as OpenAI's server-sent events. A client that leaves withdraws it."""
    has_usage = asked.stream_options is not None and asked.stream_options.include_usage
    head = {**_head(asked), "created": int(time.time()), **({"usage": None} if has_usage else {})}
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": None}
    try:
        async for part in output.parts():
            tokens = memoryview(part).cast("I").tolist()
            yield _event({**head, "choices": [{**choice, "token_ids": tokens}]})
        try:
            done = output.done.result()
        except KvatlasError as error:  # its status has been sent
            yield _event(_error(error))
            return
        end = {**choice, "finish_reason": "length", "token_ids": []}
        yield _event({**head, "choices": [end], "kvatlas": done})
        if has_usage:
            yield _event({**head, "choices": [], "usage": _usage(done)})
        yield b"data: [DONE]\n\n"
    finally:
        output.done.cancel()


def _event(content: object) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
