"""Where compiled kernels are kept, and when they are stale: as soon as any file here has changed.

A kernel's machine code has in it that of all kernels it calls, and the constants of each, while
numba looks only at the file that the kernel itself stands in. So its locators are given a stamp of
all files of this folder beside their own. They keep things where they always do: NUMBA_CACHE_DIR,
`__pycache__`, or the user's cache folder, the first that can be written to, by this user alone.
"""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba.core import caching, config

_decorating = threading.Lock()


def stamp_of(folder: Path) -> bytes:
    """Return what changes with the content of any Python file in a folder."""
    digest = sha256()
    for source in sorted(folder.glob("*.py")):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)} ".encode() + content)
    return digest.digest()


_STAMP = stamp_of(Path(__file__).parent)


class _Stamped:
    def get_source_stamp(self) -> Any:
        located: Any = super()
        return located.get_source_stamp(), _STAMP


class _Owned(_Stamped):
    """Takes no folder that another user could have put code into: numba runs what it loads."""

    def ensure_cache_path(self) -> None:
        located: Any = super()
        located.ensure_cache_path()
        found = Path(located.get_cache_path()).lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)
        if not is_ours or found.st_mode & stat.S_IWOTH:
            raise PermissionError(errno.EACCES, "not of this user alone", located.get_cache_path())


class UserProvided(_Owned, caching.UserProvidedCacheLocator):
    """Keeps kernels in NUMBA_CACHE_DIR."""


class InTree(_Stamped, caching.InTreeCacheLocator):
    """Keeps kernels in `__pycache__`."""


class UserWide(_Owned, caching.UserWideCacheLocator):
    """Keeps kernels in the user's cache folder."""


_LOCATORS = ",".join(f"{__name__}.{kind.__name__}" for kind in (UserProvided, InTree, UserWide))


@contextmanager
def kept_by_all_sources() -> Iterator[None]:
    """Have numba keep what is decorated meanwhile with the stamp of all files.

    numba's setting is the process's: what another thread decorates at this moment is kept so, too.
    """
    settings: Any = config
    with _decorating:
        before = settings.CACHE_LOCATOR_CLASSES
        settings.CACHE_LOCATOR_CLASSES = _LOCATORS
        try:
            yield
        finally:
            settings.CACHE_LOCATOR_CLASSES = before
