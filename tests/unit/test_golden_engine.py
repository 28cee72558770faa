"""Recordings of real engines come to what the engines' own block pools held, batch by batch.

Written by tests/engine/record_golden.py, which says what the files are.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.worker_hooks.recordings.captures import Frame, read_capture
from kvatlas.worker_hooks.recordings.decoding import DecodeOptions, Decoding
from kvatlas.worker_hooks.recordings.redaction import Redactor

GOLDEN = Path(__file__).parents[1] / "golden" / "captures"
HELD: dict[str, dict[str, Any]] = json.loads((GOLDEN / "engine_held.json").read_text())
MAX_BYTES = 60_000


def checkpoints(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = HELD[name]["checkpoints"]
    return found


def decoded(frames: list[Frame]) -> dict[str, Any]:
    decoding = Decoding(frames, DecodeOptions(engine="vllm", file_stem="engine"))
    for _ in decoding.story():
        pass
    return decoding.report()


def resident(report: dict[str, Any]) -> dict[str, list[str]]:
    """Return the engine's hashes by group; all of them are in its own memory, on its one rank."""
    (groups,) = report["workers"]["engine"].values()
    assert all(set(by_tier) <= {"hbm"} for by_tier in groups.values())
    found = {group: by_tier.get("hbm", {}) for group, by_tier in groups.items()}
    assert all(held["blocks"] == len(held["engine_hashes"]) for held in found.values() if held)
    return {group: held["engine_hashes"] for group, held in found.items() if held}


@pytest.mark.parametrize(
    ("name", "position"),
    [(name, position) for name in HELD for position in range(len(checkpoints(name)))],
)
def test_a_recording_comes_to_what_the_block_pool_held(name: str, position: int) -> None:
    frames = read_capture(GOLDEN / name).frames
    checkpoint = checkpoints(name)[position]
    report = decoded(frames[: checkpoint["batches"]])
    assert resident(report) == checkpoint["held"], checkpoint["after"]


@pytest.mark.parametrize("name", HELD)
def test_a_recording_is_whole_and_small_and_comes_to_the_same_redacted(name: str) -> None:
    file = GOLDEN / name
    capture = read_capture(file)
    frames = capture.frames
    assert (capture.damage, capture.rejected) == (None, ())
    assert file.stat().st_size < MAX_BYTES
    assert [frame.sequence for frame in frames] == list(range(len(frames)))
    assert checkpoints(name)[-1]["batches"] == len(frames)
    report = decoded(frames)
    assert report["counts"]["gaps"] == 0
    redactor = Redactor()
    redacted = [frame._replace(payload=redactor.payload(frame.payload)) for frame in frames]
    assert decoded(redacted) == report


def test_the_scenarios_show_what_they_are_recorded_for() -> None:
    """Copies and their removals, evictions, clears, two groups."""
    found = {name.split("_", 3)[3]: decoded(read_capture(GOLDEN / name).frames) for name in HELD}
    counts = {name.removesuffix(".kvcap"): report["counts"] for name, report in found.items()}
    assert counts["copies"]["duplicates"] > 2
    assert all(counts[name]["removed"] for name in counts if name != "reset")
    assert counts["reset"]["cleared"] > 1
    assert set(resident(found["hybrid_divergent.kvcap"])) == {"0", "1"}
