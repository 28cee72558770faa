"""A hundred workers are broken at once and all are healed; no time is asserted."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "repair_storm.py"


async def test_all_of_a_hundred_are_healed() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--peer", "none"]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(out.splitlines()[-1])
    assert (found["bench"], found["quick"], found["ratios"]) == ("repair_storm", True, {})
    assert found["gates"] == [
        "all 100 are exact again within 60 s",
        "a storm is a gap of each of 100",
        "each has told its inventory",
    ]
    cells = {(row["form"], row["load"]) for row in found["rows"] if row["case"] == "latency"}
    loads = ("idle", "events", "storm")
    assert cells == {(form, load) for form in ("json", "packed") for load in loads}
