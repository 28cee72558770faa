"""What a bridge reads in batches and in an engine's HTTP answers, and where it finds the ranks."""

import asyncio
import os
import socket
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from kvatlas.schemas.errors import EndpointUnusable, ForeignFile, InvalidSetting
from kvatlas.schemas.settings import Settings
from kvatlas.worker_hooks.bridge.engine_probe import (
    EngineFacts,
    EventSource,
    ask_engine,
    facts_of,
    read_sources,
)
from kvatlas.worker_hooks.bridge.observed import MAX_PAGES, FirstBlocks, Observed, PayloadReader
from kvatlas.worker_hooks.bridge.options import BridgeOptions
from kvatlas.worker_hooks.bridge.payload_marks import PayloadMarks
from kvatlas.worker_hooks.bridge.run import (
    RankBridge,
    addresses_of,
    run_bridge,
)
from kvatlas.worker_hooks.bridge.stimuli import FrameArrived, ReplayEnded, ReplayFailed
from kvatlas.worker_hooks.bridge.turnover import Turnover
from kvatlas.worker_hooks.bridge.zmq_source import offset_port
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.recordings.zmq_binding import bind
from testkit.ports import kept_ports
from testkit.waiting import until
from testkit.zmq_engine import Blocks, Event

METRICS = """
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="130"} 1.0
process_start_time_seconds 1.79e+09
"""
SOURCES = """{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5600", "topic": ""},
              "1": {"endpoint": "tcp://*:5558", "replay_endpoint": null}}"""


@pytest.mark.parametrize("content", ["a file", "a socket in use"])
def test_what_lies_at_a_path_that_is_bound_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x"
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as live,
        socket.socket(socket.AF_UNIX) as other,
    ):
        if content == "a file":
            path.write_bytes(b"mine")
        else:
            other.bind(str(path))
            other.listen()
        before = path.lstat()
        with pytest.raises(ForeignFile, match=content):
            bind(live, f"ipc://{path}")
        assert path.lstat() == before


def test_a_path_that_is_bound_is_for_this_user_alone(tmp_path: Path) -> None:
    path, mask = tmp_path / "x", os.umask(0)
    try:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        with zmq.Context() as context, context.socket(zmq.SUB) as live:
            bind(live, f"ipc://{path}")
            assert path.stat().st_mode & 0o777 == 0o600
            bind(live, "ipc://*")
    finally:
        os.umask(mask)


def options(**more: object) -> BridgeOptions:
    given: dict[str, object] = {"engine": "vllm", "worker": "w", "model": "m"}
    return BridgeOptions(**{"settings": Settings()} | given | more)  # type: ignore[arg-type]


def batch(*events: Event) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 0])


# --- signs of life ------------------------------------------------------------------------------


class Listening:
    """A rank's bridge without an engine's sockets: what it hears is put in by the test."""

    def __init__(self, folder: Path) -> None:
        address = EventSource(f"tcp://127.0.0.1:{kept_ports(1)}")
        self.bridge = RankBridge(options(), 0, address, EngineFacts(), folder)
        self._path = folder / "0.ring"

    def gives_sign(self, after_seconds: float = 0.0) -> bool:
        """Return whether the sidecar would read a sign of life."""
        before = self._path.read_bytes()[80:88]
        self.bridge.give_sign(time.monotonic() + after_seconds)
        return self._path.read_bytes()[80:88] != before


async def test_an_engine_behind_a_bridge_gives_signs_of_life_over_http(tmp_path: Path) -> None:
    listening = Listening(tmp_path)
    bridge = listening.bridge
    running = asyncio.create_task(bridge.run())
    await until((tmp_path / "0.ring").exists)
    try:
        bridge.learn(None)
        assert not listening.gives_sign()
        bridge.learn(EngineFacts())
        assert listening.gives_sign()
        # an endpoint that never answered says nothing about the engine
        bridge.hear(ReplayFailed(1, "silent"))
        assert listening.gives_sign()
        # one that did, and no longer does, belongs to a process that computes no more
        bridge.hear(ReplayEnded(1))
        bridge.hear(ReplayFailed(2, "silent"))
        assert not listening.gives_sign()
        bridge.hear(FrameArrived(0, b""))
        assert listening.gives_sign()
        # two probes without an answer, each as late as it can be
        assert listening.gives_sign(after_seconds=2 * options().probe_seconds)
        assert not listening.gives_sign(after_seconds=60.0)
    finally:
        bridge.stop("test over")
        await running


# --- batches ------------------------------------------------------------------------------------


def test_a_batch_tells_what_it_stores_and_removes_and_how_prompts_begin() -> None:
    blocks, read = Blocks(), PayloadReader(adapter_of("vllm"))
    observed = read(batch(blocks.store(1, 2), blocks.remove(1, 2)))
    assert (observed.num_stored, observed.num_removed, observed.is_cleared) == (2, 1, False)
    assert observed.block_tokens == 4
    ((_, first),) = observed.first_blocks
    assert first == blocks.hash_of((1,))


def test_numbers_count_from_a_clear_on() -> None:
    blocks, read = Blocks(), PayloadReader(adapter_of("vllm"))
    observed = read(batch(blocks.store(1, 2), blocks.clear(), blocks.store(3)))
    assert (observed.num_stored, observed.num_removed, observed.is_cleared) == (1, 0, True)


def test_what_cannot_be_read_is_counted_and_says_nothing() -> None:
    read = PayloadReader(adapter_of("vllm"))
    assert read(b"\xc1") == Observed()
    assert read(batch({"type": "Unheard"})) == Observed()
    assert read.num_rejected == 2


def page(name: int, tokens: int, parent: int | None = None, pages: int = 1) -> Event:
    return {
        "type": "BlockStored", "block_hashes": list(range(name, name + pages)),
        "parent_block_hash": parent, "token_ids": list(range(tokens * pages)),
        "block_size": tokens, "lora_id": None, "medium": "GPU",
    }  # fmt: skip


def sure_sizes(*events: Event) -> list[int]:
    read = PayloadReader(adapter_of("sglang"), has_short_pages=True)
    return [read(batch(event)).block_tokens for event in events]


def test_a_page_that_may_be_short_is_not_taken_as_the_size_of_all() -> None:
    assert sure_sizes(page(1, 10), page(2, 64), page(3, 64, parent=2)) == [0, 0, 64]
    assert sure_sizes(page(1, 64), page(2, 10, parent=1)) == [0, 0]  # the adapter knows it as short
    assert sure_sizes(page(1, 10), page(2, 64, pages=2)) == [0, 64]
    assert sure_sizes(page(1, 1), page(2, 1, parent=1)) == [0, 1]


def test_of_many_pages_that_nothing_follows_the_longest_is_believed() -> None:
    sizes = sure_sizes(*(page(n, 64 if n % 3 else 10) for n in range(MAX_PAGES * 3)))
    assert set(sizes) == {0, 64}
    assert sizes[MAX_PAGES // 2] == 0
    assert sizes[-2] == 64


def test_an_engine_that_tells_of_whole_blocks_only_is_believed_at_once() -> None:
    assert PayloadReader(adapter_of("vllm"))(batch(page(1, 16))).block_tokens == 16


def test_values_as_deep_as_the_stack_cost_their_batch_only() -> None:
    read = PayloadReader(adapter_of("lmcache"))
    for depth in range(800, 1000):
        entry = '{"key": ' * depth + "1" + "}" * depth
        fields = f'"event_type": "store", "tier": "l1", "entries": [{entry}]'
        assert read(f"{{{fields}}}".encode()) == Observed()


def test_beginnings_with_another_hash_contradict_but_for_adapters() -> None:
    read, known = PayloadReader(adapter_of("vllm")), FirstBlocks()
    known.observe(read(batch(Blocks().told(1, 2))))
    assert not known.contradict(read(batch(Blocks().told(1, 3))))
    assert known.contradict(read(batch(Blocks(seed=1).told(1))))
    assert not known.contradict(read(batch(Blocks(seed=1).told(1) | {"lora_name": "x"})))
    assert not known.contradict(read(batch(Blocks(seed=1).told(1, 2, first=1))))
    known.clear()
    assert not known.contradict(read(batch(Blocks(seed=1).told(1))))


def test_marks_forget_what_is_long_ago() -> None:
    marks = PayloadMarks(size=4)
    for sequence in range(6):
        marks.put(sequence, sequence * 10)
    assert [marks.get(sequence) for sequence in range(7)] == [None, None, 20, 30, 40, 50, None]


def test_turnover_needs_the_engines_size_and_counts_from_the_last_doubt() -> None:
    unknown = Turnover(None)
    unknown.begin()
    unknown.observe(Observed(1000))
    assert not unknown.is_complete
    turnover = Turnover(10)
    turnover.begin()
    turnover.observe(Observed(9))
    turnover.begin()
    complete = []
    for observed in (Observed(9, 8), Observed(1)):
        turnover.observe(observed)
        complete.append(turnover.is_complete)
    turnover.end()
    assert [*complete, turnover.is_complete] == [False, True, False]
    assert turnover.num_too_many == 0


# --- the engine's HTTP server -------------------------------------------------------------------


def test_an_engine_tells_its_size_its_start_and_its_ranks() -> None:
    facts = facts_of(METRICS, SOURCES)
    assert (facts.num_blocks, facts.block_tokens) == (130, 32)
    assert facts.sources == {
        0: EventSource("tcp://*:5557", "tcp://*:5600"),
        1: EventSource("tcp://*:5558"),
    }
    assert facts.identity == facts_of(METRICS, SOURCES).identity
    assert facts.identity != facts_of(METRICS.replace("1.79", "1.80"), SOURCES).identity
    assert facts.identity != facts_of(METRICS, SOURCES.replace("5558", "5559")).identity


@pytest.mark.parametrize("answer", ["", "{}", "[]", "null", "no json", '{"a": 1}', '{"0": 5}'])
def test_an_engine_may_tell_nothing(answer: str) -> None:
    assert facts_of("", answer) == EngineFacts()


def test_other_shapes_of_sources_are_read() -> None:
    source = {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}
    expected = {0: EventSource("tcp://*:1", "tcp://*:2")}
    for said in ({"kv_events": source}, {"kv_events": [source]}, [source], {"0": source}):
        assert read_sources(msgspec.json.encode(said).decode()) == expected


async def test_a_server_is_asked_and_a_missing_one_is_none() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        body = {b"/metrics": METRICS, b"/kv_event_sources": SOURCES}.get(path, "")
        status = "200 OK" if body else "404 Not Found"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await ask_engine(f"http://127.0.0.1:{port}") == facts_of(METRICS, SOURCES)
    assert await ask_engine(f"http://127.0.0.1:{port}") is None


# --- where the ranks are ------------------------------------------------------------------------


def test_ranks_count_up_the_port() -> None:
    given = options(endpoint="tcp://h:10", replay_endpoint="tcp://h:20", num_ranks=2)
    assert addresses_of(given, EngineFacts()) == {
        0: EventSource("tcp://h:10", "tcp://h:20"),
        1: EventSource("tcp://h:11", "tcp://h:21"),
    }


def test_one_rank_is_where_it_is_told_to_be() -> None:
    given = options(endpoint="tcp://h:10", rank=3)
    assert addresses_of(given, EngineFacts()) == {3: EventSource("tcp://h:10")}


def test_ranks_are_found_where_the_engine_says() -> None:
    given = options(engine_url="http://engine-1:8000")
    assert addresses_of(given, facts_of("", SOURCES)) == {
        0: EventSource("tcp://engine-1:5557", "tcp://engine-1:5600"),
        1: EventSource("tcp://engine-1:5558"),
    }
    with pytest.raises(EndpointUnusable, match="says nowhere that rank 0 publishes"):
        addresses_of(given, EngineFacts())


def test_only_ports_can_be_counted() -> None:
    assert offset_port("ipc:///tmp/x", 0) == "ipc:///tmp/x"
    with pytest.raises(EndpointUnusable, match="no port to count rank 1 from"):
        offset_port("ipc:///tmp/x", 1)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "no engine: give --endpoint tcp://HOST:PORT or --engine-url"),
        ({"endpoint": "tcp://h:1", "worker": ""}, "worker.* 1 to 256 characters, found 0"),
        ({"endpoint": "tcp://h:1", "adapters": ("a" * 257,)}, "adapter.*found 257"),
        ({"endpoint": "tcp://h:1", "rank": 0, "num_ranks": 2}, "either"),
        ({"endpoint": "tcp://h:1", "num_ranks": 0}, "at least one"),
        ({"endpoint": "tcp://h:1", "engine": "unheard"}, "unheard"),
        ({"endpoint": "tcp://h:1", "engine": "mooncake"}, "--engine.*vllm, sglang, trtllm"),
        ({"endpoint": "tcp://h:1", "engine": "lmcache"}, "--engine.*vllm, sglang, trtllm"),
    ],
)
async def test_wrong_options_are_named(
    more: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=problem):
        await run_bridge(options(**more), tmp_path)
