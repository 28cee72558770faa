"""The benchmark of the HTTP surface runs to its end, and its gates hold; no time is asserted."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "http.py"
FORMS = {"json", "base64", "msgpack", "packed", "by_hash", "by_hash_msgpack"}


async def test_http_runs_without_a_peer() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--peer", "none"]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(out.splitlines()[-1])
    assert (found["bench"], found["quick"], found["ratios"]) == ("http", True, {})
    assert {"p99_loaded_over_idle", "p99_loaded_over_idle_packed"} <= set(found["absolutes"])
    for form in FORMS:
        assert f"kvatlas {form}: 8192 of 8192 tokens at 8 workers" in found["gates"]
        assert f"kvatlas {form}: 4096 of 8192 tokens at 8 workers" in found["gates"]
        assert any(row["case"] == form for row in found["rows"])
