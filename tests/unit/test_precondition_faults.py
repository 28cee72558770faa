"""Faults F50 and F51: what has to agree between engines and index, and what happens if it does not.

Others' indexes match only if seeds, algorithms and block sizes agree everywhere, silently. Here the
edge names blocks itself, so an engine's own hashes need not agree; what has to is checked or seen.
"""

from kvatlas.schemas.fleet import NamespaceDescriptor, Trust
from kvatlas.schemas.hashing import HashAlgorithm, pack_tokens
from kvatlas.schemas.kv_events import BlockStored, KvEvent
from kvatlas.worker_hooks.raw_events import RawStored
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.fleet import Fleet, a_prompt, a_request

PROMPT = a_prompt(64)


def told(tracker: EngineStateTracker, first_hash: int, block_tokens: int) -> list[KvEvent]:
    hashes = tuple(range(first_hash, first_hash + 64 // block_tokens))
    return tracker.handle([RawStored(hashes, None, pack_tokens(PROMPT))])


def stored(events: list[KvEvent]) -> bytes:
    return b"".join(event.hashes for event in events if isinstance(event, BlockStored))


def test_f50_engines_with_different_seeds_name_blocks_alike() -> None:
    one, other = (EngineStateTracker("m", NamespaceDescriptor(16)) for _ in range(2))
    names = stored(told(one, 1_000, 16))
    assert len(names) == 64
    assert stored(told(other, 2**63, 16)) == names


def test_f50_workers_that_name_blocks_by_other_algorithms_are_matched_each_by_its_own() -> None:
    fleet = Fleet()
    fleet.up("w1")
    fleet.up("w2", algorithm=HashAlgorithm.sha256_128)
    for worker in ("w1", "w2"):
        fleet.holds(worker, PROMPT)
    answer = fleet.router().score(a_request(a_prompt(65)))
    assert {score.match_tokens for score in answer.candidates} == {64}


def test_f51_blocks_of_another_size_are_refused_and_counted() -> None:
    """An engine with 32 beside a worker that says 16: nothing false is held, and it is seen."""
    tracker = EngineStateTracker("m", NamespaceDescriptor(16))
    assert stored(told(tracker, 1, 32)) == b""
    assert tracker.counters.rejected_events == 1
    assert tracker.resident() == {}


def test_f51_block_sizes_are_mixed_in_one_model_and_compared_in_tokens() -> None:
    fleet = Fleet()
    for block_tokens in (1, 16, 64):
        fleet.up(f"w{block_tokens}", block_tokens=block_tokens)
        fleet.holds(f"w{block_tokens}", PROMPT)
    answer = fleet.router().score(a_request(a_prompt(65)))
    assert {score.worker: score.match_tokens for score in answer.candidates} == {
        "w1": 64,
        "w16": 64,
        "w64": 64,
    }
    assert all(score.trust is Trust.exact for score in answer.candidates)
