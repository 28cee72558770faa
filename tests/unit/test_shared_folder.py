"""The folder of a shared index: nothing in it goes but what a writer of ours has left."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.folder import SharedFolder, check_shared_folder
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.schemas.errors import FolderUnusable, ForeignFile, InvalidSetting
from testkit.indexes import tiny_index

TOKEN = "0123456789abcdef"


def an_earlier_run(folder: Path) -> list[str]:
    """Leave what a writer leaves; return the names."""
    arrays = SharedArrays(folder)
    tiny_index(arrays=arrays)
    arrays.close()
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_what_an_earlier_writer_left_goes_when_the_next_one_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    left = set(an_earlier_run(folder)) - {"lock", "header"}
    assert left
    arrays = SharedArrays(folder)
    assert left <= {path.name for path in folder.iterdir()}  # readers may still need them
    FlatRadixIndex(arrays=arrays)
    assert not left & {path.name for path in folder.iterdir()}
    arrays.close()


def test_a_folder_of_before_its_lock_said_anything_is_one_of_ours(tmp_path: Path) -> None:
    an_earlier_run(tmp_path / "index")
    (tmp_path / "index/lock").write_bytes(b"")
    an_earlier_run(tmp_path / "index")


@pytest.mark.parametrize(
    "name",
    ["thesis.tex", ".bashrc", "lock", "header", f"{TOKEN}.weights.1", f"{TOKEN}.cells.1.bak"],
)
@pytest.mark.parametrize("has_run_before", [False, True])
def test_a_folder_with_another_file_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str, has_run_before: bool
) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    if has_run_before:
        an_earlier_run(folder)
    (folder / name).write_bytes(b"mine " * 100)
    before = contents(folder)
    for refuse in (SharedArrays, check_shared_folder):
        with pytest.raises(ForeignFile, match=name) as raised:
            refuse(folder)
        assert str(folder) in str(raised.value)
        assert "indexer.shared_folder" in str(raised.value)
        assert "name a folder" in str(raised.value)
    assert contents(folder) == before


def a_folder(path: Path, _: Path) -> None:
    path.mkdir()


def a_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def a_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["lock", "header", f"{TOKEN}.cells.1"])
@pytest.mark.parametrize("make", [a_folder, a_link, a_pipe])
def test_nothing_but_a_file_is_taken_for_one_of_ours(
    tmp_path: Path, make: Callable[[Path, Path], None], name: str
) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "index").mkdir()
    make(tmp_path / "index" / name, tmp_path / "mine")
    with pytest.raises(ForeignFile, match=name):
        SharedFolder(tmp_path / "index")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "index").iterdir()] == [name]


def test_files_without_the_lock_of_a_writer_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / f"{TOKEN}.cells.1").write_bytes(b"mine")
    with pytest.raises(ForeignFile, match="without a lock"):
        SharedFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{TOKEN}.cells.1"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_no_folder_of_ours(tmp_path: Path, is_there: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if is_there:
        an_earlier_run(target)
    link.symlink_to(target)
    for refuse in (SharedFolder, check_shared_folder, SharedIndexReader):
        with pytest.raises(ForeignFile, match="a symbolic link"):
            refuse(link)
    assert target.exists() == is_there


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    an_earlier_run(tmp_path / "index")
    (tmp_path / "index").chmod(mode)
    for refuse in (SharedFolder, check_shared_folder, SharedIndexReader):
        with pytest.raises(ForeignFile, match=f"mode {mode:o}"):
            refuse(tmp_path / "index")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    an_earlier_run(tmp_path / "index")
    os.chown(tmp_path / "index", 12345, -1)
    for refuse in (SharedFolder, check_shared_folder, SharedIndexReader):
        with pytest.raises(ForeignFile, match="user 12345"):
            refuse(tmp_path / "index")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_makes_a_folder_foreign(tmp_path: Path) -> None:
    an_earlier_run(tmp_path / "index")
    os.chown(tmp_path / "index/header", 12345, -1)
    with pytest.raises(ForeignFile, match=r"header \(a file of user 12345\)"):
        SharedFolder(tmp_path / "index")


def test_a_reader_leaves_a_folder_that_becomes_foreign_while_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = SharedIndexReader(tmp_path / "index")
    an_earlier_run(tmp_path / "real")
    (tmp_path / "index").symlink_to(tmp_path / "real")
    assert not reader.is_ready
    assert not reader.connected
    assert "a symbolic link" in caplog.text
    assert caplog.text.count("cannot be read") == 1


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(ForeignFile, match="found a file"):
        SharedFolder(tmp_path / "file")
    with pytest.raises(FolderUnusable, match="Not a directory"):
        SharedFolder(tmp_path / "file/index")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_all_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        names = an_earlier_run(tmp_path / "index")
    finally:
        os.umask(before)
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o700
    modes = {name: (tmp_path / "index" / name).stat().st_mode & 0o777 for name in names}
    assert set(modes.values()) == {0o600}


def test_checking_makes_nothing(tmp_path: Path) -> None:
    check_shared_folder(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_what_is_put_in_the_place_of_the_folder_later_is_not_touched(tmp_path: Path) -> None:
    folder, moved = tmp_path / "index", tmp_path / "moved"
    an_earlier_run(folder)
    arrays = SharedArrays(folder)
    left = set(contents(folder))
    folder.rename(moved)
    folder.mkdir()
    for name in left:
        (folder / name).write_bytes(b"mine")
    index = tiny_index(arrays=arrays)
    index.add_instance()
    assert contents(folder) == dict.fromkeys(left, b"mine")
    assert not (left - {"lock", "header"}) & set(contents(moved))
    arrays.close()


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    arrays = SharedArrays(tmp_path / "index")
    tiny_index(arrays=arrays)
    before = set(contents(tmp_path / "index"))
    with pytest.raises(InvalidSetting, match="another index writes here"):
        SharedArrays(tmp_path / "index")
    assert set(contents(tmp_path / "index")) == before
    arrays.close()
