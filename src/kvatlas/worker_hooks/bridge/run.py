"""Runs a bridge: for each rank one source, one FollowState, one ring and one sidecar.

    ZmqSource --> FollowState --> ring --> Sidecar --> bus        a rank
    engine_probe ----^                                            all ranks

All in one process and one event loop. While the broker or the sidecar is slow the ring fills, then
batches are no longer read, then ZMQ drops them, which shows as a gap and is replayed: memory stays
bounded, and the engine waits for nobody.
"""

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from kvatlas.events.nats.bus import NatsBus
from kvatlas.schemas.errors import EndpointUnusable
from kvatlas.worker_hooks.bridge.engine_probe import (
    PROBE_SECONDS,
    EngineFacts,
    EventSource,
    ask_engine,
)
from kvatlas.worker_hooks.bridge.follow_options import FollowOptions
from kvatlas.worker_hooks.bridge.follow_state import FollowState
from kvatlas.worker_hooks.bridge.observed import Observed, PayloadReader
from kvatlas.worker_hooks.bridge.options import BridgeOptions
from kvatlas.worker_hooks.bridge.stimuli import (
    Degrade,
    Deliver,
    DeliveryFailed,
    Effect,
    EngineAnswered,
    EngineSilent,
    FrameArrived,
    FrameReplayed,
    Recover,
    ReplayEnded,
    ReplayFailed,
    RequestReplay,
    Restarted,
    Stimulus,
    Ticked,
)
from kvatlas.worker_hooks.bridge.zmq_source import ZmqSource, offset_port
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.raw_events import (
    RawDoubted,
    RawEngineBatch,
    RawEvent,
    RawForgotten,
    RawRestarted,
    encode_raw,
)
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter
from kvatlas.worker_hooks.sidecar.options import SidecarOptions, shared_options
from kvatlas.worker_hooks.sidecar.process import signals_call
from kvatlas.worker_hooks.sidecar.service import Sidecar

TICK_SECONDS = 0.25
#: how often a full ring is looked at
ROOM_SECONDS = 0.002
#: beside its payload in a record
_RECORD_OVERHEAD_BYTES = 256

_logger = logging.getLogger(__name__)


async def run_bridge(options: BridgeOptions, folder: Path) -> str:
    """Run until a signal or a newer epoch of a rank; return which of them.

    `folder` takes rings and sockets. Raises InvalidSetting, EndpointUnusable, RingUnusable.
    """
    options.validate()
    facts = await ask_engine(options.engine_url) if options.engine_url else None
    addresses = addresses_of(options, facts or EngineFacts())
    ranks = [
        RankBridge(options, rank, address, facts or EngineFacts(), folder)
        for rank, address in addresses.items()
    ]

    def stop(reason: str) -> None:
        for rank in ranks:
            rank.stop(reason)

    async with signals_call(stop), asyncio.TaskGroup() as tasks:
        probing = tasks.create_task(_probe(options, ranks))
        running = [tasks.create_task(rank.run()) for rank in ranks]
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        probing.cancel()
        reason = ended.pop().result()
        stop(reason)
    return reason


def addresses_of(options: BridgeOptions, facts: EngineFacts) -> dict[int, EventSource]:
    """Return where each rank publishes: as told, else as the engine says."""
    if options.rank is not None:
        ranks = [options.rank]
    elif options.num_ranks is not None:
        ranks = list(range(options.num_ranks))
    else:
        ranks = sorted(facts.sources) or [0]
    return {rank: _address(options, facts, rank) for rank in ranks}


def _address(options: BridgeOptions, facts: EngineFacts, rank: int) -> EventSource:
    offset = 0 if options.rank is not None else rank
    said = facts.sources.get(rank, EventSource(""))
    endpoint = offset_port(options.endpoint, offset) or _reachable(said.endpoint, options)
    replay = offset_port(options.replay_endpoint, offset)
    replay = replay or _reachable(said.replay_endpoint, options)
    if not endpoint:
        problem = f"says nowhere that rank {rank} publishes; --endpoint does"
        raise EndpointUnusable(options.engine_url, problem)
    return EventSource(endpoint, replay)


def _reachable(endpoint: str, options: BridgeOptions) -> str:
    """Put the engine's host in place of a wildcard that it has bound."""
    if "*" not in endpoint or options.binds:
        return endpoint
    host = options.engine_url.partition("://")[2].partition("/")[0].rpartition(":")[0]
    return endpoint.replace("*", host or "127.0.0.1")


async def _probe(options: BridgeOptions, ranks: "list[RankBridge]") -> None:
    while options.engine_url:
        facts = await ask_engine(options.engine_url)
        for rank in ranks:
            rank.learn(facts)
        await asyncio.sleep(options.probe_seconds)


class RankBridge:
    """One rank's part of the bridge."""

    def __init__(
        self,
        options: BridgeOptions,
        rank: int,
        address: EventSource,
        facts: EngineFacts,
        folder: Path,
    ) -> None:
        self._options, self._rank, self._address = options, rank, address
        self._name = f"{options.worker}/{rank}"
        self._folder = folder
        self._reader = PayloadReader(
            adapter_of(options.engine), has_short_pages=options.engine != "vllm"
        )
        self._state = FollowState(
            self._read,
            FollowOptions(
                has_replay=bool(address.replay_endpoint),
                num_blocks=options.num_blocks or facts.num_blocks or None,
                max_waiting_bytes=options.max_waiting_bytes,
                quiet_seconds=options.quiet_seconds,
                away_seconds=options.away_seconds,
            ),
        )
        self._source = ZmqSource(
            address.endpoint,
            address.replay_endpoint,
            binds=options.binds or "*" in address.endpoint,
            silent_seconds=options.silent_seconds,
        )
        self._num_blocks = options.num_blocks or facts.num_blocks
        self._block_tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if known := options.block_tokens or facts.block_tokens:
            self._block_tokens.set_result(known)
        #: as told, else of the store that the block size was learnt from
        self._lookahead_tokens = options.lookahead_tokens or 0
        self._is_block_size_wrong = self._is_lookahead_wrong = self._has_told_wait = False
        self._stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sidecar: Sidecar | None = None
        self._ring: RingWriter | None = None
        #: the engine has answered a question for batches, and did not answer the last one
        self._answers_replays = self._is_deaf = False
        #: until when the last answer of the engine's HTTP server is a sign of life
        self._alive_until = float("-inf")

    def stop(self, reason: str) -> None:
        """Let `run` publish what it has and return; only the first reason counts."""
        if not self._stopping.done():
            self._stopping.set_result(reason)
        if self._sidecar is not None:
            self._sidecar.stop(reason)

    def learn(self, facts: EngineFacts | None) -> None:
        """Take what the engine's HTTP server says, or that it does not."""
        if facts is None:
            self._source.put(EngineSilent())
            return
        self._source.put(EngineAnswered(facts.identity))
        # not over before two further probes have had no answer
        a_probe = self._options.probe_seconds + PROBE_SECONDS
        self._alive_until = time.monotonic() + 2 * a_probe
        if facts.num_blocks and not self._options.num_blocks:
            self._num_blocks = facts.num_blocks
            self._state.learn_num_blocks(facts.num_blocks)
        if facts.block_tokens and not self._block_tokens.done():
            self._block_tokens.set_result(facts.block_tokens)

    async def run(self) -> str:
        """Bridge until stopped or fenced; return which."""
        path = self._folder / f"{self._rank}.ring"
        ring = RingWriter.create(path, self._options.ring_bytes)
        reader = RingReader(path)
        self._ring = ring
        try:
            async with self._source, asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(ring))
                ticking = tasks.create_task(self._tick())
                reporting = tasks.create_task(self._report())
                reason = await self._run_sidecar(reader)
                for task in (following, ticking, reporting):
                    task.cancel()
        finally:
            self._ring = None
            reader.close()
            ring.close()
        self._log_counters()
        return reason

    # --- towards the bus ------------------------------------------------------------------------

    async def _run_sidecar(self, reader: RingReader) -> str:
        """Run the sidecar as soon as it is known how the engine cuts prompts."""
        await asyncio.wait(
            (self._block_tokens, self._stopping), return_when=asyncio.FIRST_COMPLETED
        )
        if self._stopping.done():
            return self._stopping.result()
        options = self._sidecar_options(self._block_tokens.result())
        bus = NatsBus(
            options.nats_url,
            name=f"kvatlas bridge {self._name}",
            creds_file=Path(options.creds_file) if options.creds_file else None,
            replicas=options.replicas,
        )
        self._sidecar = Sidecar(options, reader, bus)
        return await self._sidecar.run()

    def _sidecar_options(self, block_tokens: int) -> SidecarOptions:
        given = self._options
        options = SidecarOptions(
            nats_url=given.settings.nats.url,
            creds_file=given.settings.nats.credentials,
            worker=given.worker,
            rank=self._rank,
            model=given.model,
            base_url=given.base_url or given.engine_url,
            adapters=dict.fromkeys(given.adapters, given.model),
            kv_fingerprint=given.kv_fingerprint,
            p2p_address=_address_of(given.p2p_address, self._rank),
            descriptor=given.settings.fleet.descriptor(block_tokens, self._lookahead_tokens),
            num_unreusable_trailing_blocks=given.unreusable_blocks,
            num_blocks=self._num_blocks,
            counts_copies=True,
            versions={"engine": given.engine},
            ring_path=str(self._folder / f"{self._rank}.ring"),
            socket_path=str(self._folder / f"{self._rank}.sock"),
            transport="none",
            **shared_options(given.settings),
        )
        options.validate()
        return options

    # --- from the engine ------------------------------------------------------------------------

    def _read(self, payload: bytes) -> Observed:
        observed = self._reader(payload)
        if found := observed.block_tokens:
            if not self._block_tokens.done():
                if self._options.lookahead_tokens is None:
                    self._lookahead_tokens = observed.lookahead_tokens or 0
                self._block_tokens.set_result(found)
            elif found != self._block_tokens.result() and not self._is_block_size_wrong:
                self._is_block_size_wrong = True
                told = self._block_tokens.result()
                _logger.error(
                    "%s: the engine's blocks have %d tokens, told were %d: nothing will match; "
                    "start the bridge with --block-tokens %d",
                    self._name,
                    found,
                    told,
                    found,
                )
        elif observed.num_stored and not self._block_tokens.done() and not self._has_told_wait:
            self._has_told_wait = True
            _logger.info(
                "%s: the engine's first page may be a short one: nothing is told before another "
                "one makes sure of their size, or the bridge is started with --block-tokens",
                self._name,
            )
        self._check_lookahead(observed.lookahead_tokens)
        return observed

    def _check_lookahead(self, found: int | None) -> None:
        """Say once that the engine names blocks by another window than configured."""
        is_known = self._block_tokens.done() and found is not None
        if is_known and found != self._lookahead_tokens and not self._is_lookahead_wrong:
            self._is_lookahead_wrong = True
            _logger.error(
                "%s: the engine's block hashes cover %d tokens behind a block, configured are %d: "
                "nothing will match; start the bridge with --lookahead-tokens %d",
                self._name,
                found,
                self._lookahead_tokens,
                found,
            )

    async def _follow(self, ring: RingWriter) -> None:
        await self._carry_out(self._state.start(time.monotonic()), ring)
        while True:
            stimulus = await self._source.next()
            await self._carry_out(self._handle(stimulus), ring)

    def hear(self, stimulus: Stimulus) -> None:
        """Take in what a stimulus says about whether the engine computes."""
        match stimulus:
            case ReplayFailed():
                self._is_deaf = self._answers_replays
            case FrameReplayed() | ReplayEnded():
                self._answers_replays, self._is_deaf = True, False
            case FrameArrived():
                self._is_deaf = False
            case _:
                pass

    def give_sign(self, now: float) -> None:
        """Give a sign of life in the engine's stead, if its HTTP server answers.

        That may be another process than the one that computes, which answers replays.
        """
        if self._ring is not None and not self._is_deaf and now < self._alive_until:
            self._ring.beat()

    def _handle(self, stimulus: Stimulus) -> list[Effect]:
        self.hear(stimulus)
        return self._state.handle(stimulus, time.monotonic())

    async def _carry_out(self, effects: list[Effect], ring: RingWriter) -> None:
        for effect in effects:
            match effect:
                case Deliver(sequence, payload):
                    await self._deliver(sequence, payload, ring)
                case RequestReplay():
                    self._source.request_replay(effect)
                case Restarted(reason):
                    _logger.warning("%s: another incarnation of the engine: %s", self._name, reason)
                    await _append(RawRestarted(reason), ring)
                case Degrade(reason):
                    _logger.warning("%s: doubted: %s", self._name, reason)
                    await _append(RawDoubted(reason), ring)
                case Recover(forgets):
                    _logger.warning("%s: no longer doubted", self._name)
                    if forgets:
                        await _append(RawForgotten(), ring)
                    await _append(RawDoubted(""), ring)

    async def _deliver(self, sequence: int, payload: bytes, ring: RingWriter) -> None:
        if len(payload) + _RECORD_OVERHEAD_BYTES > ring.max_record_bytes:
            reason = f"batch {sequence} of {len(payload)} bytes is larger than a ring takes"
            await self._carry_out(self._handle(DeliveryFailed(reason)), ring)
            return
        await _append(RawEngineBatch(self._options.engine, payload), ring)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._source.put(Ticked())
            self.give_sign(time.monotonic())

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._options.report_seconds)
            self._log_counters()

    def _log_counters(self) -> None:
        counters = msgspec.structs.asdict(self._state.counters)
        counters["rejected"] = self._reader.num_rejected
        counters["malformed_frames"] = self._source.num_malformed
        text = " ".join(f"{name}={count}" for name, count in counters.items())
        _logger.info(
            "%s: %s next=%s %s", self._name, self._state.phase, self._state.next_sequence, text
        )


async def _append(event: RawEvent, ring: RingWriter) -> None:
    """Append once there is room: half of the ring stays free, so that no record is dropped."""
    while ring.waiting_bytes > ring.capacity // 2:  # noqa: ASYNC110 - a ring wakes its reader only
        await asyncio.sleep(ROOM_SECONDS)
    ring.append(encode_raw(event))


def _address_of(address: str, rank: int) -> str:
    """Return where a rank's transfer tier listens; engines count up the port."""
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdigit() else address
