"""The demo from start to end: each policy on a fleet of its own, then the comparison.

Reads top to bottom: options, the run of one policy, what is checked at its end, the report.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from kvatlas.common.runtime_folder import runtime_folder, temporary_folder
from kvatlas.demo.fleet_process import FleetAddress, fleet_process, get_json
from kvatlas.demo.one_big_lru import one_big_lru_hit_ratio
from kvatlas.demo.outcomes import (
    PlayedRequestOutcome,
    PolicyFigures,
    PullFigures,
    policy_figures,
    pull_figures,
)
from kvatlas.demo.play import play
from kvatlas.demo.prompts import TRACE_BLOCK_TOKENS, PlayedRequest
from kvatlas.demo.sessions import generate_requests
from kvatlas.demo.trace import read_trace
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.hindsight.replay import Moment, replay_archive
from kvatlas.schemas.errors import DemoStopped, InvalidSetting
from kvatlas.schemas.settings import variable_of
from kvatlas.worker_hooks.sidecar.process import signals_call

MODEL = "reference"
BASELINE = "round_robin"
CONVERGE_SECONDS = 15.0
#: model tokens per second; the scaled clock multiplies both
PREFILL_TOKENS_PER_SECOND = 20_000.0
DECODE_TOKENS_PER_SECOND = 50.0
#: what the router expects before it has seen a pull
PULL_TOKENS_PER_SECOND = 400_000.0
#: router.load_window_ms on the model's clock: long cold prompts gain by waiting where their prefix
#: is, short turns of warm sessions by going elsewhere and pulling it
TRACE_LOAD_WINDOW_MS = 2_500.0
SESSIONS_LOAD_WINDOW_MS = 100.0


class DemoOptions(Struct, frozen=True):
    """What is played, on how large a fleet, and how fast."""

    trace: Path | None
    requests: int
    workers: int
    blocks_per_worker: int
    block_bytes: int
    speed: float
    policy: str
    seed: int
    archive: str | None
    #: where the policy's log is kept; has to be empty or absent
    data: Path | None


class DemoReport(Struct, frozen=True):
    """Everything the demo found out; the JSON line is this object."""

    trace: str
    requests: int
    workers: int
    policies: dict[str, Any]
    events: dict[str, int]
    convergence_ms: dict[str, float]
    pull: PullFigures
    digest: dict[str, Any]
    replay: dict[str, Any]
    seconds: float
    archive: str | None

    @property
    def holds(self) -> bool:
        """Whether all that the demo checks came out as promised."""
        events, pull = self.events, self.pull
        return (
            bool(self.digest["equal"] and self.replay["digest_equal"])
            and events["published"] == events["applied"]
            and events["gaps"] == events["rejected"] == 0
            and pull.verified == pull.blocks
        )


class _PolicyRun(Struct):
    """What one policy's fleet left behind."""

    outcomes: list[PlayedRequestOutcome]
    figures: PolicyFigures
    stats: dict[str, Any]
    equal_digests: dict[str, bool]


class Audience(Protocol):
    """Who watches a demo."""

    def played(self, policy: str, outcomes: Sequence[PlayedRequestOutcome]) -> None:
        """A request has ended; `outcomes` are all so far, the newest last."""

    def lagged(self, lag_ms: float) -> None:
        """The index is this far behind the engines."""


async def run_demo(
    options: DemoOptions, requests: Sequence[PlayedRequest], audience: Audience
) -> DemoReport:
    """Play the requests with the policy, then with round robin; a signal ends it cleanly.

    Raises DemoStopped when one came.
    """
    task = asyncio.current_task()
    assert task is not None
    said: list[str] = []

    def stop(reason: str) -> None:
        said.append(reason)
        task.cancel()

    async with signals_call(stop):
        try:
            return await _run_both(options, requests, audience)
        except asyncio.CancelledError:
            if not said:
                raise
            raise DemoStopped(said[0]) from None


async def _run_both(
    options: DemoOptions, requests: Sequence[PlayedRequest], audience: Audience
) -> DemoReport:
    started = time.monotonic()
    with runtime_folder(temporary_folder(), "demo") as folder:
        archive = options.archive or f"sqlite:///{folder}/archive.db"
        log = ["--data", str(options.data)] if options.data else []
        ours = await _run_policy(options, options.policy, requests, archive, audience, log)
        last = ours.stats["stream_sequence"]
        replayed = await replay_archive(archive, Moment(sequence=last))
        published = await asyncio.to_thread(count_published_events, archive, last)
        theirs = ours
        if options.policy != BASELINE:
            theirs = await _run_policy(options, BASELINE, requests, None, audience)
    capacity = options.workers * options.blocks_per_worker
    big = {"hit_ratio": round(one_big_lru_hit_ratio(requests, capacity), 4)}
    name = "kvatlas" if options.policy != BASELINE else BASELINE
    return DemoReport(
        trace=str(options.trace) if options.trace else f"built-in sessions, seed {options.seed}",
        requests=len(requests),
        workers=options.workers,
        policies={name: ours.figures, BASELINE: theirs.figures, "one_big_lru": big},
        events={
            "published": published,
            "applied": ours.stats["index"]["events"],
            "gaps": ours.stats["index"]["gaps"],
            "rejected": ours.stats["rejected_total"],
        },
        convergence_ms=ours.stats["convergence_ms"],
        pull=pull_figures(ours.outcomes),
        digest={
            "equal": all(ours.equal_digests.values()) and bool(ours.equal_digests),
            "workers": len(ours.equal_digests),
        },
        replay={
            "batches": replayed.num_batches,
            "digest_equal": replayed.state_digest == ours.stats["state_digest"],
        },
        seconds=round(time.monotonic() - started, 1),
        archive=options.archive,
    )


def load_requests(options: DemoOptions) -> list[PlayedRequest]:
    """Return what is to be played.

    Raises InvalidTrace, and InvalidSetting for a used folder or workers that are too small.
    """
    if options.data is not None and options.data.is_dir() and any(options.data.iterdir()):
        raise InvalidSetting("data", str(options.data), "a demo needs an empty or absent folder")
    if options.trace is None:
        requests = generate_requests(options.requests, options.seed)
    else:
        requests = read_trace(options.trace, options.requests)
    most = max(-(-(r.input_tokens + r.output_tokens) // TRACE_BLOCK_TOKENS) for r in requests)
    if most > options.blocks_per_worker:
        problem = f"the largest request takes {most} blocks, a worker has fewer"
        raise InvalidSetting("blocks-per-worker", "the demo", problem)
    return requests


async def _run_policy(
    options: DemoOptions,
    policy: str,
    requests: Sequence[PlayedRequest],
    archive: str | None,
    audience: Audience,
    log: Sequence[str] = (),
) -> _PolicyRun:
    outcomes: list[PlayedRequestOutcome] = []
    arguments = [*_serve_arguments(options, policy), *log]
    # not as an argument, which all users of this machine see: it may have a password
    environment = {variable_of("archive.url"): archive or ""}
    async with fleet_process(arguments, environment) as fleet:

        def on_outcome(outcome: PlayedRequestOutcome) -> None:
            outcomes.append(outcome)
            audience.played(policy, outcomes)

        watching = asyncio.create_task(_watch_lag(fleet, audience))
        try:
            await play(requests, fleet.router_url, MODEL, options.speed, on_outcome)
        finally:
            watching.cancel()
        equal = await converge(fleet)
        stats = await fleet.get("/v1/index/stats")
    return _PolicyRun(outcomes, policy_figures(outcomes, options.workers), stats, equal)


async def _watch_lag(fleet: FleetAddress, audience: Audience) -> None:
    while True:
        stats = await fleet.get("/v1/index/stats")
        audience.lagged(stats["convergence_ms"].get("p99", 0.0))
        await asyncio.sleep(0.5)


def _serve_arguments(options: DemoOptions, policy: str) -> list[str]:
    """Return the arguments of `kvatlas serve`; times of the router run on the scaled clock."""
    speed = options.speed
    window_ms = TRACE_LOAD_WINDOW_MS if options.trace else SESSIONS_LOAD_WINDOW_MS
    scaled: dict[str, str | float] = {
        "router.policy": policy,
        "router.seed": options.seed + 1,
        "router.load_window_ms": window_ms / speed,
        "router.prefill_tokens_per_second": PREFILL_TOKENS_PER_SECOND * speed,
        "router.pull_tokens_per_second": PULL_TOKENS_PER_SECOND * speed,
        "router.max_prompt_tokens": 4_000_000,
        "router.max_body_bytes": 64 * 1024**2,
    }
    if policy == BASELINE:  # a balancer that knows nothing of KV does not move it either
        scaled["sidecar.transport"] = "none"
        scaled["router.min_pull_tokens"] = 10**9
    return [
        *("--port", "0", "--workers", str(options.workers)),
        *("--blocks-per-worker", str(options.blocks_per_worker)),
        *("--block-bytes", str(options.block_bytes)),
        *("--block-tokens", str(TRACE_BLOCK_TOKENS)),
        *("--speed", str(speed)),
        *("--prefill-tokens-per-second", str(PREFILL_TOKENS_PER_SECOND)),
        *("--decode-tokens-per-second", str(DECODE_TOKENS_PER_SECOND)),
        *(word for key, value in scaled.items() for word in ("--set", f"{key}={value}")),
    ]


def count_published_events(archive_url: str, last: int) -> int:
    """Return how many events the archived batches up to `last` hold, counted without the fold."""
    with SqlArchive(archive_url, must_exist=True) as archive:
        messages = archive.read_events(1, last)
        payloads = [m.payload for m in messages if m.subject.startswith("kv.events.")]
    return sum(len(msgspec.msgpack.decode(payload)[6]) for payload in payloads)


async def converge(fleet: FleetAddress) -> dict[str, bool]:
    """Wait until the index says of each living worker what its engine says; return who agrees."""
    deadline = time.monotonic() + CONVERGE_SECONDS
    while True:
        equal = await _compare_digests(fleet)
        if all(equal.values()) or time.monotonic() > deadline:
            return equal
        await asyncio.sleep(0.1)


async def _compare_digests(fleet: FleetAddress) -> dict[str, bool]:
    workers = (await fleet.get("/v1/workers"))["workers"]
    equal: dict[str, bool] = {}
    for worker in workers:
        if worker["trust"] == "gone" or not worker["base_url"]:
            continue
        truth = (await get_json(f"{worker['base_url']}/v1/kv/digest"))["digests"]
        equal[worker["worker"]] = _held(truth) == _held(worker["digests"])
    return equal


def _held(digests: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of tiers that hold something."""
    return {tier: digest for tier, digest in digests.items() if digest["count"]}
