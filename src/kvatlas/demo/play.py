"""Plays requests against a running fleet: route, serve, report; as any client would."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from kvatlas.demo.outcomes import PlayedRequestOutcome
from kvatlas.demo.prompts import PlayedRequest
from kvatlas.schemas.errors import RequestLost, RequestRefused

MSGPACK = {"content-type": "application/x-msgpack"}
MAX_RETRIES = 20


async def play(
    requests: Sequence[PlayedRequest],
    router_url: str,
    model: str,
    speed: float,
    on_outcome: Callable[[PlayedRequestOutcome], None],
) -> list[PlayedRequestOutcome]:
    """Send each request at its time on a clock that runs `speed` times as fast.

    The router sees them in their order, also those that arrive together. A worker that dies costs a
    retry through the router. Outcomes come in the order of the requests.
    """
    started, first_ms = time.monotonic(), requests[0].arrival_ms
    in_order = asyncio.Lock()

    async def one(request: PlayedRequest, client: aiohttp.ClientSession) -> PlayedRequestOutcome:
        due = started + (request.arrival_ms - first_ms) / 1000 / speed
        await asyncio.sleep(max(due - time.monotonic(), 0))
        outcome = await _serve(request, client, in_order, router_url, model, speed)
        on_outcome(outcome)
        return outcome

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(one(request, client)) for request in requests]
    return [task.result() for task in tasks]


async def _serve(
    request: PlayedRequest,
    client: aiohttp.ClientSession,
    in_order: asyncio.Lock,
    router_url: str,
    model: str,
    speed: float,
) -> PlayedRequestOutcome:
    prompt = request.prompt()
    question = {"model": model, "tokens": prompt}
    for retries in range(MAX_RETRIES):
        async with in_order:
            started = time.monotonic()
            route = await _post(client, f"{router_url}/v1/route", question)
        route_ms = (time.monotonic() - started) * 1000
        if route is None:
            await asyncio.sleep(0.25)
            continue
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "kv_transfer_params": route["kv_transfer_params"],
        }
        answer = await _post(client, f"{route['base_url']}/v1/completions", body)
        done_url = f"{router_url}/v1/requests/{route['decision_id']}/done"
        if answer is None:
            await _post(client, done_url, {"failed": True})
            await asyncio.sleep(0.25)
            continue
        served = answer["kvatlas"]
        await _post(client, done_url, _report(served, request, speed))
        return _outcome(route["worker"], served, route_ms, retries)
    raise RequestLost(f"a request of {request.input_tokens} tokens failed {MAX_RETRIES} times")


async def _post(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the answer, or None if the server is away or has no worker for now.

    Raises RequestRefused for what will not do better a second time.
    """
    content = msgspec.msgpack.encode(body)
    try:
        async with client.post(url, data=content, headers=MSGPACK) as answer:
            if answer.status >= 500:
                return None
            if answer.status >= 400:
                raise RequestRefused(f"{url}: {answer.status}: {await answer.text()}")
            return msgspec.json.decode(await answer.read(), type=dict[str, Any])
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
        return None


def _report(served: dict[str, Any], request: PlayedRequest, speed: float) -> dict[str, Any]:
    """Say what it took on the router's clock, which is not the model's."""
    return {
        "ttft_ms": served["ttft_ms"] / speed,
        "prefill_ms": served["prefill_ms"] / speed,
        "computed_tokens": served["computed_tokens"],
        "local_blocks": served["local_blocks"],
        "pulled_blocks": served["pulled_blocks"],
        "pull_ms": served["pull"]["ms"] / speed,
        "output_tokens": request.output_tokens,
    }


def _outcome(
    worker: str, served: dict[str, Any], route_ms: float, retries: int
) -> PlayedRequestOutcome:
    pull = served["pull"]
    return PlayedRequestOutcome(
        worker=worker,
        prompt_blocks=served["prompt_blocks"],
        local_blocks=served["local_blocks"],
        pulled_blocks=served["pulled_blocks"],
        computed_blocks=served["computed_blocks"],
        ttft_ms=served["ttft_ms"] + route_ms,
        pulled_bytes=pull["bytes"],
        verified_blocks=pull["verified"],
        failed_pull_blocks=pull["failed"],
        transport=pull["transport"],
        retries=retries,
    )
