"""The benchmark of the write path runs to its end, and its gates hold; no time is asserted."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "ingest.py"
GATES = {
    "all events become visible",
    "the index holds as many blocks as were published",
    "its digests are those of the publisher",
    "every event has a delay",
}


async def test_ingest_runs_without_a_peer() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--peer", "none"]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(out.splitlines()[-1])
    assert (found["bench"], found["quick"], found["ratios"]) == ("ingest", True, {})
    assert set(found["gates"]) == GATES
    assert {"delay_p99_ms_1000", "delay_p99_ms_10000"} <= set(found["absolutes"])
    rates = [row for row in found["rows"] if row["case"] == "publish to visible"]
    sides = ("kvatlas", "kvatlas, as the sidecar does it")
    assert {(row["side"], row["blocks"]) for row in rates} == {
        (side, blocks) for side in sides for blocks in (1, 64)
    }
