"""Files that prove a user: accepted in both forms, and what is wrong with one is named."""

import base64
import binascii
import os
from pathlib import Path
from typing import Any

import pytest

from kvatlas.events.nats import credentials as nats_credentials
from kvatlas.events.nats.credentials import login_of
from kvatlas.schemas.errors import InvalidSetting


def a_seed() -> str:
    raw = bytes([18 << 3 | 20 << 3 >> 5, (20 << 3 & 31) << 3]) + bytes(range(100, 132))
    raw += binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


SEED = a_seed()
JWT = "-----BEGIN NATS USER JWT-----\neyJ0eXAi.x.y\n------END NATS USER JWT------\n"
KEY = f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "user.creds"


@pytest.fixture(autouse=True)
def nkeys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that signs is there; what is checked needs nothing of it."""
    monkeypatch.setattr(nats_credentials, "find_spec", lambda name: name)


def test_a_seed_of_a_user_begins_as_nats_writes_it() -> None:
    assert SEED.startswith("SU")
    assert len(SEED) == 58


@pytest.mark.parametrize("text", [SEED, f"{SEED}\n", f"\n  {SEED}\r\n"])
def test_the_seed_of_an_nkey_is_taken(file: Path, text: str) -> None:
    file.write_text(text)
    assert login_of(file) == {"nkeys_seed_str": SEED}


def test_credentials_of_jwt_and_seed_are_taken(file: Path) -> None:
    file.write_text(f"{JWT}\n{KEY}")
    (name, value), *others = login_of(file).items()
    assert (name, str(value), others) == ("user_credentials", f"{JWT}\n{KEY}", [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a credentials file"),
        ("hello\n", "expected a credentials file"),
        (JWT, "'BEGIN USER NKEY SEED' is missing"),
        (KEY, "'BEGIN NATS USER JWT' is missing"),
        (f"{JWT}-----BEGIN USER NKEY SEED-----\n", "'BEGIN USER NKEY SEED' is missing"),
        (SEED[:-1], "damaged"),
        (f"SUAA{SEED[4:]}", "damaged"),
        (f"{JWT}{KEY.replace(SEED, 'SA' + SEED[2:])}", "damaged"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_and_never_its_seed(
    file: Path, text: str, problem: str
) -> None:
    file.write_text(text)
    with pytest.raises(InvalidSetting, match=problem) as wrong:
        login_of(file)
    assert str(file) in str(wrong.value)
    assert "nats.credentials" in str(wrong.value)
    assert SEED[2:20] not in str(wrong.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path, problem in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "bytes", "expected a credentials file"),
    ):
        with pytest.raises(InvalidSetting, match=problem):
            login_of(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(file: Path) -> None:
    file.write_text(SEED)
    file.chmod(0)
    with pytest.raises(InvalidSetting, match="cannot be read: Permission denied"):
        login_of(file)


def test_the_extra_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_credentials, "find_spec", lambda _: None)
    file.write_text(SEED)
    with pytest.raises(InvalidSetting, match=r"pip install 'kvatlas\[credentials\]'"):
        login_of(file)


def test_the_seed_that_is_made_here_is_one_for_nkeys() -> None:
    nkeys: Any = pytest.importorskip("nkeys")
    assert nkeys.from_seed(bytearray(SEED.encode())).seed == SEED.encode()
