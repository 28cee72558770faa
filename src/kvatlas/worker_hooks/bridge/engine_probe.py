"""What an engine's HTTP server tells a bridge: its size, its sources, and whether it is the same.

Everything here may be absent; a bridge then knows less and works as well.
"""

import asyncio
import http.client
import re
import urllib.error
import urllib.request
from typing import Any

import msgspec
from msgspec import Struct

MAX_ANSWER_BYTES = 4 * 1024 * 1024
TIMEOUT_SECONDS = 2.0
#: what `ask_engine` takes at most: so many questions one after the other
PROBE_SECONDS = 3 * TIMEOUT_SECONDS

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_START_TIME = re.compile(r"^process_start_time_seconds\s+(?P<seconds>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class EventSource(Struct, frozen=True):
    """Where a rank publishes, as the engine sees it."""

    endpoint: str
    replay_endpoint: str = ""


#: of a number that an engine says; longer ones are none
MAX_DIGITS = 12


class EngineFacts(Struct, frozen=True):
    """What is known of an engine; 0, empty and "" where it does not say."""

    num_blocks: int = 0
    block_tokens: int = 0
    #: when the process began, and what it publishes: other for another incarnation
    identity: str = ""
    sources: dict[int, EventSource] = {}


async def ask_engine(url: str) -> EngineFacts | None:
    """Return what the server says; None if it does not answer at all."""
    metrics = await asyncio.to_thread(_get, f"{url}/metrics")
    sources = await asyncio.to_thread(_get, f"{url}/kv_event_sources")
    if not sources:
        sources = await asyncio.to_thread(_get, f"{url}/server_info")
    if metrics is None and sources is None:
        return None
    return facts_of(metrics or "", sources or "")


def facts_of(metrics: str, sources: str) -> EngineFacts:
    """Read the engine's metrics, and its list of sources."""
    labels: dict[str, str] = {}
    if found := _CACHE_CONFIG.search(metrics):
        labels = dict(_LABEL.findall(found["labels"]))
    started = _START_TIME.search(metrics)
    known = read_sources(sources)
    identity = "|".join(
        [
            started["seconds"] if started else "",
            *(f"{rank}={source.endpoint}" for rank, source in sorted(known.items())),
        ]
    )
    return EngineFacts(
        _number(labels.get("num_gpu_blocks", "")),
        _number(labels.get("block_size", "")),
        identity.strip("|"),
        known,
    )


def read_sources(answer: str) -> dict[int, EventSource]:
    """Read rank -> source out of vLLM's `/kv_event_sources` or SGLang's `/server_info`."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict) and "kv_events" in found:
        found = found["kv_events"]
    if isinstance(found, list):
        found = {str(rank): source for rank, source in enumerate(found)}
    if isinstance(found, dict) and isinstance(found.get("endpoint"), str):
        found = {"0": found}
    if not isinstance(found, dict):
        return {}
    return {
        int(rank): source
        for rank, config in found.items()
        if str(rank).isdecimal() and len(str(rank)) <= MAX_DIGITS and (source := _source(config))
    }


def _source(config: Any) -> EventSource | None:
    if not isinstance(config, dict) or not isinstance(config.get("endpoint"), str):
        return None
    replay = config.get("replay_endpoint")
    return EventSource(config["endpoint"], replay if isinstance(replay, str) else "")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0


def _get(url: str) -> str | None:
    """Return the text behind a URL, "" for an answer that is none, None for no answer."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return str(answer.read(MAX_ANSWER_BYTES), "utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        return ""
    except (OSError, ValueError, http.client.HTTPException):
        return None
