"""What every ObjectStore does; a new adapter adds one line."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvatlas.events.folder_objects import FolderObjects
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.objects import Buffer, ObjectStore
from kvatlas.schemas.errors import InvalidSubject, NotFound

ADAPTERS = ["memory", "folder", pytest.param("nats", marks=pytest.mark.integration)]
BUCKET = "KV_THINGS"
#: some chunks of any adapter, and a rest
LARGE = bytes(range(251)) * 12_000


@pytest.fixture(params=ADAPTERS)
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "memory":
                bus = await stack.enter_async_context(MemoryBroker().connect())
                yield bus.objects(BUCKET)
            case "folder":
                yield FolderObjects(tmp_path / "objects")
            case _:
                server = await stack.enter_async_context(embedded_server(tmp_path))
                nats = await stack.enter_async_context(NatsBus(server.url))
                yield nats.objects(BUCKET)


async def content_of(objects: ObjectStore, name: str) -> bytes:
    content = bytearray()

    def take(chunk: bytes) -> bool:
        content.extend(chunk)
        return True

    await objects.get(name, take)
    return bytes(content)


async def names_in(objects: ObjectStore) -> list[str]:
    return [entry.name for entry in await objects.entries()]


async def test_a_bucket_that_nobody_has_put_to_is_empty(objects: ObjectStore) -> None:
    assert await objects.entries() == []
    await objects.delete("nothing")
    with pytest.raises(NotFound, match="nothing"):
        await content_of(objects, "nothing")


@pytest.mark.parametrize("content", [b"", b"x", LARGE], ids=["empty", "small", "large"])
async def test_what_is_put_is_what_is_got(objects: ObjectStore, content: bytes) -> None:
    await objects.put("one", [content])
    assert await content_of(objects, "one") == content
    (entry,) = await objects.entries()
    assert (entry.name, entry.num_bytes) == ("one", len(content))
    assert entry.stored_ns > 0


async def test_parts_lie_one_behind_the_other(objects: ObjectStore) -> None:
    parts: list[Buffer] = [b"", b"one", memoryview(LARGE)[1:700_001], b"", bytearray(b"two")]
    await objects.put("one", parts)
    assert await content_of(objects, "one") == b"".join(parts)


async def test_the_newest_comes_first(objects: ObjectStore) -> None:
    for name in ("b", "c", "a"):
        await objects.put(name, [name.encode()])
        await asyncio.sleep(0.01)  # clocks of file systems are coarse
    assert await names_in(objects) == ["a", "c", "b"]


async def test_a_second_one_of_a_name_replaces_the_first(objects: ObjectStore) -> None:
    await objects.put("one", [LARGE])
    await objects.put("other", [b"other"])
    await asyncio.sleep(0.01)
    await objects.put("one", [b"new"])
    assert await content_of(objects, "one") == b"new"
    assert await names_in(objects) == ["one", "other"]


async def test_what_is_deleted_is_gone(objects: ObjectStore) -> None:
    await objects.put("one", [LARGE])
    await objects.put("other", [b"other"])
    await objects.delete("one")
    await objects.delete("one")
    assert await names_in(objects) == ["other"]
    with pytest.raises(NotFound):
        await content_of(objects, "one")
    await objects.put("one", [b"again"])
    assert await content_of(objects, "one") == b"again"


class Broken(Exception):
    pass


async def test_an_upload_that_fails_in_the_middle_leaves_what_was_there(
    objects: ObjectStore,
) -> None:
    def parts() -> Iterator[bytes]:
        yield LARGE
        raise Broken

    await objects.put("old", [b"old"])
    for name in ("new", "old"):
        with pytest.raises(Broken):
            await objects.put(name, parts())
    assert await names_in(objects) == ["old"]
    assert await content_of(objects, "old") == b"old"


async def test_an_object_is_not_seen_before_it_is_whole(objects: ObjectStore) -> None:
    seen: list[list[str]] = []
    putting = asyncio.create_task(objects.put("one", [LARGE, LARGE]))
    while not putting.done():
        seen.append(await names_in(objects))
        if seen[-1]:
            assert await content_of(objects, "one") == LARGE + LARGE
        await asyncio.sleep(0)
    await putting
    assert await names_in(objects) == ["one"]


async def test_an_upload_that_is_cancelled_leaves_nothing(objects: ObjectStore) -> None:
    await objects.put("old", [b"old"])
    putting = asyncio.create_task(objects.put("new", [LARGE] * 20))
    await asyncio.sleep(0.005)
    putting.cancel()
    await asyncio.wait((putting,))
    if putting.cancelled():
        assert await names_in(objects) == ["old"]
    else:
        assert await content_of(objects, "new") == LARGE * 20


async def test_a_reader_that_wants_no_more_gets_no_more(objects: ObjectStore) -> None:
    await objects.put("one", [LARGE])
    taken: list[bytes] = []

    def take(chunk: bytes) -> bool:
        taken.append(chunk)
        return False

    await objects.get("one", take)
    assert len(taken) == 1
    assert LARGE.startswith(taken[0])


async def test_two_uploads_at_once_both_arrive(objects: ObjectStore) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(objects.put("one", [LARGE]))
        tasks.create_task(objects.put("other", [LARGE[::-1]]))
    assert await content_of(objects, "one") == LARGE
    assert await content_of(objects, "other") == LARGE[::-1]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a b", "a*", "x" * 201])
async def test_a_name_that_no_store_could_have_is_refused(objects: ObjectStore, name: str) -> None:
    with pytest.raises(InvalidSubject):
        await objects.put(name, [b""])
    with pytest.raises(InvalidSubject):
        await content_of(objects, name)
    with pytest.raises(InvalidSubject):
        await objects.delete(name)
