"""Objects in a folder: none of them is a file that somebody else has put there."""

import os
from pathlib import Path

import pytest

from kvatlas.events.folder_objects import FolderObjects
from kvatlas.schemas.errors import ForeignFile


async def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_bytes(b"mine")
    objects = FolderObjects(tmp_path)
    with pytest.raises(ForeignFile, match=r"thesis\.tex"):
        await objects.put("thesis.tex", [b"ours"])
    with pytest.raises(ForeignFile, match="name a folder for objects alone"):
        await objects.delete("thesis.tex")
    assert os.listdir(tmp_path) == ["thesis.tex"]


async def test_a_folder_of_an_earlier_process_is_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    await FolderObjects(folder).put("one", [b"1"])
    await FolderObjects(folder).put("two", [b"2"])
    await FolderObjects(folder).delete("one")
    assert [entry.name for entry in await FolderObjects(folder).entries()] == ["two"]


async def test_objects_are_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        await FolderObjects(tmp_path / "objects").put("one", [b"1"])
    finally:
        os.umask(before)
    modes = [os.stat(tmp_path / name).st_mode & 0o777 for name in ("objects", "objects/one")]
    assert modes == [0o700, 0o600]
