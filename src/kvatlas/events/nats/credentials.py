"""What proves a user to the broker: a credentials file (JWT and seed) or the seed of an nkey.

nats-py reads neither carefully: of a file without a JWT it reads for ever, and what it raises for
other files names neither file nor setting. So the file is read and checked here, before each
attempt to connect, and nats-py gets its content.
"""

import base64
import binascii
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvatlas.schemas.errors import InvalidSetting

_SETTING = "nats.credentials"
_JWT, _SEED = "BEGIN NATS USER JWT", "BEGIN USER NKEY SEED"
#: what the seed of a user begins with, and how long each is
_SEED_PREFIX, _SEED_CHARACTERS = "SU", 58
_EXPECTED = "expected a credentials file (JWT and seed) or the seed of a user's nkey (SU...)"


def login_of(file: Path) -> dict[str, Any]:
    """Return what `nats.connect` takes to prove a user by a file.

    Raises InvalidSetting, which names the file and what is wrong with it, and never its content.
    """
    try:
        text = file.read_text()
    except FileNotFoundError as error:
        raise _invalid(file, "there is no such file") from error
    except UnicodeDecodeError as error:
        raise _invalid(file, _EXPECTED) from error
    except OSError as error:
        raise _invalid(file, f"cannot be read: {error.strerror}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and lines[0].startswith(_SEED_PREFIX):
        _check_seed(file, lines[0])
        return {"nkeys_seed_str": lines[0]}
    jwt, seed = _behind(lines, _JWT), _behind(lines, _SEED)
    if not jwt and not seed:
        raise _invalid(file, _EXPECTED)
    if not jwt or not seed:
        missing = _SEED if jwt else _JWT
        raise _invalid(file, f"{_EXPECTED}; its part {missing!r} is missing")
    _check_seed(file, seed)
    from nats.aio.client import RawCredentials  # an engine that checks the file loads no bus

    return {"user_credentials": RawCredentials(text)}


def _behind(lines: list[str], title: str) -> str:
    """Return the line behind the one with a title; empty where there is none."""
    for line, following in pairwise(lines):
        if title in line and not following.startswith("-"):
            return following
    return ""


def _check_seed(file: Path, seed: str) -> None:
    if not _is_seed(seed):
        raise _invalid(file, f"the seed in it is damaged: expected {_SEED_CHARACTERS} characters")
    if find_spec("nkeys") is None:
        raise _invalid(file, "needs the package nkeys: pip install 'kvatlas[credentials]'")


def _is_seed(seed: str) -> bool:
    """Say whether a seed is a user's and whole; it ends with a checksum."""
    if not seed.startswith(_SEED_PREFIX) or len(seed) != _SEED_CHARACTERS:
        return False
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except ValueError:
        return False
    return int.from_bytes(raw[-2:], "little") == binascii.crc_hqx(raw[:-2], 0)


def _invalid(file: Path, problem: str) -> InvalidSetting:
    return InvalidSetting(_SETTING, "", f"{_SETTING} (--creds) {file}: {problem}")
