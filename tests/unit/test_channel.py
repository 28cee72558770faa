"""The socket between engine and sidecar."""

import asyncio
from pathlib import Path

import pytest

from kvatlas.schemas.errors import SidecarUnavailable
from kvatlas.schemas.ids import InstanceId
from kvatlas.worker_hooks.sidecar.channel import (
    MAX_FRAME_BYTES,
    Answer,
    ChannelServer,
    Flush,
    Flushed,
    PullBlocks,
    PullEnded,
    Question,
    SidecarChannel,
    SidecarStatus,
    StatusRequest,
)


class PlayedSidecar:
    """Answers when it may."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def answer(self, question: Question) -> Answer:
        self.asked.append(question)
        match question:
            case StatusRequest(id):
                return SidecarStatus(id, 1, 2, True, 3, 4, "nixl", {"epochs": 1})
            case Flush(id):
                await self.may_answer.wait()
                return Flushed(id, 5, 6)
            case PullBlocks(id):
                return PullEnded(id, (0,), ((1, "busy"),), 16, "nixl", 0, 0.5)


async def test_many_questions_wait_at_a_time_and_each_gets_its_answer(tmp_path: Path) -> None:
    played, path = PlayedSidecar(), tmp_path / "socket"
    async with ChannelServer(path, played.answer), SidecarChannel(path) as channel:
        played.may_answer.clear()
        flushing = asyncio.create_task(channel.flush())
        status = await channel.status()
        assert (status.epoch, status.num_blocks, status.counters) == (1, 3, {"epochs": 1})
        ended = await channel.pull(bytes(32), [4, 5], [InstanceId("a", 1)], 30.0)
        assert (ended.held, ended.missing) == ((0,), ((1, "busy"),))
        asked = played.asked[-1]
        assert isinstance(asked, PullBlocks)
        assert (asked.slots, asked.owners, asked.deadline_ms) == ((4, 5), (("a", 1),), 30_000)
        assert asked.owners[0].worker == "a"
        assert not flushing.done()
        played.may_answer.set()
        assert (await flushing).seq == 6


async def test_without_a_sidecar_every_question_says_so(tmp_path: Path) -> None:
    async with SidecarChannel(tmp_path / "socket") as channel:
        with pytest.raises(SidecarUnavailable):
            await channel.status()
        with pytest.raises(SidecarUnavailable):
            await channel.wait_ready(timeout_seconds=0.05)


async def test_a_sidecar_that_goes_fails_what_waits_and_another_is_found(tmp_path: Path) -> None:
    played, path = PlayedSidecar(), tmp_path / "socket"
    async with SidecarChannel(path) as channel:
        async with ChannelServer(path, played.answer):
            played.may_answer.clear()
            flushing = asyncio.create_task(channel.flush())
            await channel.status()
        with pytest.raises(SidecarUnavailable, match="went away"):
            await flushing
        async with ChannelServer(path, played.answer):
            await channel.wait_ready()


async def test_a_sidecar_that_is_silent_is_given_up(tmp_path: Path) -> None:
    played, path = PlayedSidecar(), tmp_path / "socket"
    async with ChannelServer(path, played.answer), SidecarChannel(path) as channel:
        played.may_answer.clear()
        with pytest.raises(SidecarUnavailable, match="no answer in time"):
            await channel.flush(timeout_seconds=0.05)
        played.may_answer.set()
        await channel.flush()  # the late answer of the first is nobody's


@pytest.mark.parametrize(
    "sent",
    [
        b"\x03\0\0\0\x93\x01\x02",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\x10\0\0\0short",
    ],
)
async def test_who_sends_nonsense_is_cut_off_alone(tmp_path: Path, sent: bytes) -> None:
    played, path = PlayedSidecar(), tmp_path / "socket"
    async with ChannelServer(path, played.answer), SidecarChannel(path) as channel:
        await channel.status()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await channel.status()
