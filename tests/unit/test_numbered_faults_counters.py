"""F78 beside an engine: whatever goes wrong there moves a counter in the sidecar's status."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import events_stream
from kvatlas.schemas.ids import InstanceId
from kvatlas.worker_hooks.raw_events import RawHeld
from testkit.engine_words import tokens_of
from testkit.sidecars import Beside, beside, sidecar_options


def lose_records(at: Beside) -> None:
    at.hook.stored([1], None, bytes(at.hook._ring.max_record_bytes))
    assert at.hook.num_lost == 1


def remove_what_is_not_there(at: Beside) -> None:
    at.hook.removed([7])


def be_ones_own_parent(at: Beside) -> None:
    at.hook.stored([1], 1, tokens_of(1))


def hold_two_copies(at: Beside) -> None:
    at.hook.stored([1], None, tokens_of(1))
    at.hook.stored([2], None, tokens_of(1))


def lack_a_parent(at: Beside) -> None:
    at.hook.stored([2], 1, tokens_of(2))


def hold_without_a_name(at: Beside) -> None:
    at.hook.stored([2], None, b"")


def cut_blocks_otherwise(at: Beside) -> None:
    at.hook.stored([1], None, tokens_of(1, 2))


def speak_no_language(at: Beside) -> None:
    at.hook._ring.append(b"rubbish")


def speak_no_batch(at: Beside) -> None:
    at.hook.report_published("vllm", b"\xc1")


def speak_an_unknown_event(at: Beside) -> None:
    at.hook.report_published("vllm", msgspec.msgpack.encode([0.0, [{"type": "Unheard"}]]))


def hold_in_an_unknown_place(at: Beside) -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "FOO"}
    at.hook.report_published("vllm", msgspec.msgpack.encode([0.0, [event]]))


def count_otherwise(at: Beside) -> None:
    at.hook.report(RawHeld(99))


class Row(NamedTuple):
    faults: str
    drive: Callable[[Beside], None]
    counter: str


TABLE = [
    Row("F14", lose_records, "lost_events"),
    Row("F19", remove_what_is_not_there, "unknown_removals"),
    Row("F19", be_ones_own_parent, "rejected_events"),
    Row("F20", hold_two_copies, "duplicate_blocks"),
    Row("F21", count_otherwise, "audit_mismatches"),
    Row("F25 F26", lack_a_parent, "parked_events"),
    Row("F22 F43", hold_without_a_name, "unnamed_blocks"),
    Row("F42 F51", cut_blocks_otherwise, "rejected_events"),
    Row("F40", speak_no_language, "malformed_events"),
    Row("F39", speak_no_batch, "malformed_events"),
    Row("F58", hold_in_an_unknown_place, "rejected_unknown_medium"),
    Row("F38 F40", speak_an_unknown_event, "rejected_unknown_event"),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.faults}-{row.drive.__name__}")
async def test_f78_a_fault_beside_an_engine_moves_its_counter(tmp_path: Path, row: Row) -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            await one.channel.flush()
            before = (await one.channel.status()).counters
            row.drive(one)
            await one.channel.flush()
            after = (await one.channel.status()).counters
            assert after.get(row.counter, 0) > before.get(row.counter, 0), after


async def test_f78_blocks_that_a_pull_does_not_bring_are_counted_by_reason(tmp_path: Path) -> None:
    """F72, F73 and F75: whatever became of a pull has a name."""
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            await one.channel.pull(bytes(32), [0, 1], [InstanceId("a", 0)], 0.5)
            assert (await one.channel.status()).counters["missing_no_transport"] == 2
