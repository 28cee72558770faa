"""Bytes of others: each decoder returns what they say, or raises the error that it names."""

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from kvatlas.events.bus import Entry
from kvatlas.events.codec import decode, decode_control, encode
from kvatlas.events.dead_letters import decode_letter, encode_letter, letter_about
from kvatlas.events.leases import LeaseValue, decode_lease, parse_lease_key
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.indexer.index.shared import header as h
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.router.replicas.signals import Routed, decode_signal, encode_signal
from kvatlas.schemas.errors import (
    CaptureDamaged,
    CaptureUnreadable,
    IndexUnavailable,
    InvalidSubject,
    MalformedBatch,
    MalformedEvent,
    MalformedLetter,
    MalformedSignal,
)
from kvatlas.schemas.routing import Plan, decode_decision
from kvatlas.schemas.transfer import (
    LeaseMissing,
    LeaseRequest,
    decode_transfer_answer,
    decode_transfer_request,
    encode_transfer,
)
from kvatlas.worker_hooks.raw_events import RawStored, decode_raw, encode_raw
from kvatlas.worker_hooks.recordings.captures import read_capture
from testkit.builders import (
    a_batch,
    a_control,
    a_message,
    arrived,
    digests,
    hashes,
    inventory,
    stored,
    up,
)
from testkit.indexes import tiny_index

NUM_MUTANTS = 1_500
#: what a decoder may take for a mutant: far more than any of them says
MAX_BYTES = 4 << 20
A_BATCH = encode(a_batch(up(), stored(1, 2), inventory(1, as_of=1), *digests(1)))
A_REQUEST = LeaseRequest(
    fingerprint=b"f" * 16, hashes=hashes(1, 2), ttl_ms=100, requester="w2", transports=("nixl",)
)
NESTED = b"\x91" * 60_000 + b"\x00"
#: lengths and numbers as large as the format allows, and text that is none
EXTREMES = [
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xdb\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7)),
    *(b"\xcb\x7f\xf0" + bytes(6), b"\xcb\x7f\xf8" + bytes(6), b"\xa2\xff\xfe", b"\xc1", b""),
]

Decode = Callable[[bytes], object]

DECODERS: dict[str, tuple[bytes, Decode, tuple[type[Exception], ...]]] = {
    "batch": (A_BATCH, decode, (MalformedBatch,)),
    "record": (encode(a_control()), decode_control, (MalformedBatch,)),
    "message of the log": (
        A_BATCH,
        lambda payload: stimulus_of(msgspec.structs.replace(a_message(a_batch()), payload=payload)),
        (),
    ),
    "dead letter": (
        encode_letter(letter_about(a_message(a_batch()), "payload", "why", "me")),
        decode_letter,
        (MalformedLetter,),
    ),
    "lease": (
        msgspec.msgpack.encode(LeaseValue(7, b"details")),
        lambda value: decode_lease(Entry("lease.w1.0", value, 1)),
        (),
    ),
    "decision": (msgspec.msgpack.encode({"v": 100}), decode_decision, (MalformedBatch,)),
    "signal of a router": (
        encode_signal(
            "router", Routed("id", "model", "w1", 0, 1, Plan(4, 1, (), 8), 1.0, hashes(1))
        ),
        decode_signal,
        (MalformedSignal,),
    ),
    "request for blocks": (
        encode_transfer(A_REQUEST),
        decode_transfer_request,
        (MalformedBatch,),
    ),
    "answer about blocks": (
        encode_transfer(LeaseMissing(reason="not_held", detail="why")),
        decode_transfer_answer,
        (MalformedBatch,),
    ),
    "record of the ring": (
        encode_raw(RawStored((1, 2), None, bytes(32), lora="sql")),
        decode_raw,
        (MalformedEvent,),
    ),
}


def mutants(content: bytes, seed: int) -> list[bytes]:
    random, found = Random(seed), [NESTED, b"", *EXTREMES, content + content]
    while len(found) < NUM_MUTANTS:
        mutant = bytearray(content)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(mutant) + 1)
            match random.randrange(5):
                case 0 if at < len(mutant):
                    mutant[at] ^= 1 << random.randrange(8)
                case 1:
                    del mutant[at:]
                case 2:
                    mutant[at:at] = random.randbytes(random.choice([1, 2, 9]))
                case 3:
                    mutant[at : at + 1] = random.choice(EXTREMES)
                case _:
                    mutant[at : at + 1] = NESTED[:-1]
        found.append(bytes(mutant))
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_a_mutant_is_read_or_refused_by_name_and_takes_no_memory(name: str) -> None:
    content, read, allowed = DECODERS[name]
    tracemalloc.start()
    try:
        for mutant in mutants(content, seed=7):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(*allowed):
                read(mutant)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["kvcap", "msgpack", "jsonl", "bin"])
def test_a_damaged_recording_is_named(tmp_path: Path, suffix: str) -> None:
    content = {
        "kvcap": b"KVCAP1\n" + A_BATCH,
        "msgpack": A_BATCH * 3,
        "jsonl": b'{"topic": "t", "seq": 1, "payload": "00"}\n' * 3,
        "bin": len(A_BATCH).to_bytes(4, "little") + A_BATCH,
    }[suffix]
    file = tmp_path / f"recording.{suffix}"
    for mutant in mutants(content, seed=3)[:300]:
        file.write_bytes(mutant)
        try:
            read_capture(file)
        except (CaptureUnreadable, CaptureDamaged):
            continue


@pytest.mark.parametrize("key", ["lease", "lease.", "lease..0", "lease.=.0", "lease.w1.-1", "."])
def test_a_key_that_is_no_lease_is_refused(key: str) -> None:
    for rank in ("", "0", "9" * 5_000):
        try:
            assert parse_lease_key(key + rank).rank < 2**32
        except InvalidSubject:
            continue


def test_a_header_of_a_shared_index_with_any_number_leads_nobody_astray(tmp_path: Path) -> None:
    """Its readers have the answer, or say that there is none."""
    arrays = SharedArrays(tmp_path / "shared")
    state = IndexState(tiny_index(arrays=arrays))
    publication = IndexPublication(arrays, state, state)
    with publication:
        state.handle(arrived(a_batch(up(), stored(1, 2, 3)), 1))
    publication.publish_status(WriterStatus(True, True, 1, 0.0, {}))
    opened = h.open_header(tmp_path / "shared" / h.FILE)
    assert opened is not None
    words, chain = opened[0], hashes(1, 2, 3)
    numbers = [0, 1, 2, 7, 63, 64, 2**31, 2**40, 2**62, 2**63, 2**64 - 1]
    for word in range(h.FLEET_GENERATION, h.FIRST_ARRAY + 2 * len(h.ARRAYS)):
        if word == h.MULTIPLIER:
            continue  # any odd number is one
        before = words[word]
        for number in numbers:
            words[word] = np.uint64(number)
            reader = SharedIndexReader(tmp_path / "shared")
            try:
                found = [match.num_blocks for match in reader.match(chain)]
            except IndexUnavailable:
                continue
            assert found in ([], [3])
        words[word] = before
    assert [match.num_blocks for match in SharedIndexReader(tmp_path / "shared").match(chain)] == [
        3
    ]
