"""The folder of a broker that was given none: gone with its process, or with the next one."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from testkit.waiting import WAIT_SECONDS

BROKER = """
import asyncio
from kvatlas.runtime.broker import broker_url
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.settings import load_settings

async def main():
    async with broker_url(load_settings(), Conditions()) as url:
        print(url, flush=True)
        await asyncio.to_thread(input)

asyncio.run(main())
"""


def a_broker(folder: Path, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", BROKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(folder), **environment},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("nats://"):
        process.communicate()  # or later tests would get a warning about its pipes
    assert line.startswith("nats://")
    return process


@pytest.mark.parametrize("has_data", [False, True])
def test_what_a_killed_one_left_goes_with_the_next(tmp_path: Path, has_data: bool) -> None:
    temporary, data = tmp_path / "tmp", tmp_path / "data"
    temporary.mkdir()
    process = a_broker(temporary)
    (left,) = temporary.iterdir()
    process.kill()
    process.communicate()
    assert left.exists()
    until = time.monotonic() + WAIT_SECONDS
    while list(temporary.iterdir()):  # the server of the killed one may take a moment to end
        assert time.monotonic() < until
        again = a_broker(temporary, **({"KVATLAS_NATS__FOLDER": str(data)} if has_data else {}))
        again.communicate("\n")
        assert again.returncode == 0


def test_that_of_a_living_one_stays(tmp_path: Path) -> None:
    process = a_broker(tmp_path)
    (own,) = tmp_path.iterdir()
    other = a_broker(tmp_path)
    other.communicate("\n")
    assert list(tmp_path.iterdir()) == [own]
    process.communicate("\n")
    assert list(tmp_path.iterdir()) == []
