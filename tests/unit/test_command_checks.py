"""What a command line gets wrong is told before anything starts, and what can be set is listed."""

import json
import tomllib
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvatlas import __version__
from kvatlas.__main__ import main
from kvatlas.cli.options import EXTRAS, extra_of
from kvatlas.router.decision.policies import POLICIES
from kvatlas.schemas.settings import (
    Settings,
    kind_and_bounds,
    load_settings,
    settings_by_key,
    variable_of,
)

BRIDGE = ["bridge", "--engine", "vllm"]
SIDECAR = ["sidecar", "--ring", "r", "--socket", "s"]
REPLICAS = (
    "log.replicas is 3, and the embedded broker is one node: leave it at 1, or give the address of"
    " a cluster with --nats"
)
BOTH = (
    "--nats (nats.url) and --data (nats.folder) exclude each other: a given broker keeps its own"
    " log; leave one of them out"
)
POLICY = (
    "setting router.policy from flag --policy: expected str, one of predicted_ttft, round_robin,"
    " random, least_loaded, power_of_two"
)
SHARED = "setting indexer.kernel from reference: only `flat` can be shared"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVATLAS_NATS__URL", raising=False)
    monkeypatch.setattr("kvatlas.cli.commands.write_log_lines", lambda _: None)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")


def said(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], status: int = 1) -> str:
    assert main(arguments) == status
    return capsys.readouterr().err.removeprefix("kvatlas: ").rstrip("\n")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["worker"], "--name"),
        (["worker", "--name", "w"], "--model"),
        ([*BRIDGE, "--model", "m"], "--worker"),
        ([*BRIDGE, "--worker", "w"], "--model"),
        ([*SIDECAR, "--model", "m"], "--worker"),
        ([*SIDECAR, "--worker", "w"], "--model"),
    ],
)
def test_a_name_that_the_wire_cannot_carry_is_named_by_its_flag(
    command: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = flag.removeprefix("--")
    for name, problem in (
        ("", "expected 1 to 256 characters, found 0"),
        ("x" * 257, "expected 1 to 256 characters, found 257"),
        ("\udcff", "expected Unicode, found other bytes"),
    ):
        ended = said([*command, "--nats", "nats://127.0.0.1:1", flag, name], capsys)
        assert ended == f"setting {key} from flag {flag}: {problem}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "log.replicas=3"], REPLICAS),
        (["--nats", "nats://h:4222"], BOTH),
        (["--policy", "best"], POLICY),
        (["--port", "99999"], "setting router.port from flag --port: expected int, 0..65535"),
        (["--archive", "x://y"], "--archive (archive.url) 'x': known databases are sqlite and"),
        (["--archive", "sqlite:///no/z"], "--archive (archive.url) no/z: does the folder no exist"),
        (["--archive", "sqlite:///."], "--archive (archive.url) .: is a folder, expected a file"),
        (["--archive", "sqlite+x:///z"], "--archive (archive.url): no driver 'x' is known"),
        (["--config", "none"], "--config none: no such file"),
        (["--config", "."], "--config .: is a folder, expected a file"),
        (["--creds", "none"], "--creds none: no such file"),
        (["--routers", "1", "--set", "indexer.kernel=reference"], SHARED),
        (["--set", "indexer.shared_folder=/f", "--set", "indexer.kernel=reference"], SHARED),
    ],
)
def test_serve_says_what_is_wrong_before_it_starts_a_broker(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(["serve", "--port", "0", "--data", "log", *arguments], capsys).startswith(says)
    assert not Path("log").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--data", "file"], "--data file: is a file, expected a folder"),
        (["demo", "--data", "file"], "--data file: is a file, expected a folder"),
        (
            ["indexer", "--nats", "x://y", "--set", "indexer.shared_folder=file/x"],
            "indexer.shared_folder file: is a file, expected a folder",
        ),
        (
            ["worker", "--name", "w", "--folder", "file"],
            "--folder file: is a file, expected a folder",
        ),
        (["demo", "--policy", "best"], POLICY),
        (["demo", "--trace", "none"], "--trace none: no such file"),
        (["router", "--nats", "nats://h:4222", "--policy", "best"], POLICY),
        (["router", "--nats", "nats://h:4222", "--creds", "none"], "--creds none: no such file"),
        (["replay", "--archive", "x", "--match", "none"], "--match none: no such file"),
        (
            ["dead-letters", "--nats", "nats://h:1", "--payload", "1", "--out", "no/z"],
            "--out no/z: the folder no does not exist",
        ),
        (
            ["archive", "--nats", "nats://h:4222", "--archive", "sqlite:///no/z"],
            "--archive (archive.url) no/z: does the folder no exist?",
        ),
    ],
)
def test_other_commands_do_so_too(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(arguments, capsys) == line


LONG = "a" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "0", "--workers", "0", "--archive", f"sqlite:///{LONG}"],
        ["serve", "--port", "0", "--workers", "0", "--data", LONG],
        ["replay", "--archive", f"sqlite:///{LONG}"],
        ["dead-letters", "--nats", "nats://h:1", "--payload", "1", "--out", f"{LONG}/z"],
        [
            "doctor",
            "--worker",
            "w",
            "--engine-url",
            "http://h:1",
            "--router-url",
            "http://h:1",
            "--tokenizer",
            LONG,
        ],
    ],
    ids=lambda arguments: f"{arguments[0]}-{arguments[-2]}",
)
def test_a_path_that_the_system_refuses_to_look_at_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(arguments, capsys)
    assert LONG in line
    assert "File name too long" in line
    assert "\n" not in line


def test_a_folder_that_is_a_loop_of_links_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop").symlink_to("loop")
    line = said(["serve", "--port", "0", "--workers", "0", "--data", "loop"], capsys)
    assert "loop" in line
    assert "\n" not in line


@pytest.mark.parametrize("command", [BRIDGE, SIDECAR])
def test_a_rank_that_the_wire_cannot_carry_is_wrong_usage(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--worker", "w", "--model", "m", "--nats", "x://y", "--rank", str(2**32)]
    assert "--rank" in said([*command, *given], capsys, 2)


@pytest.mark.parametrize(
    "content",
    [b'{"name": "x"}', b'[1, 2]\n"x"\n{"a": 1}\n', b"\xff\xd8\xff\xe0JFIF", b"\0\0\0\x10abcd"],
)
@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "mooncake", "lmcache"])
def test_what_is_no_recording_ends_decode_with_a_line(
    content: bytes, options: tuple[str, ...], engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_bytes(content)
    ended = said(["decode", "--engine", engine, "file", *options], capsys).splitlines()[-1]
    assert ended.endswith(f"capture file: nothing in it could be read as batches of {engine}")


def test_a_recording_without_batches_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_bytes(b"")
    assert said(["decode", "--engine", "vllm", "file"], capsys, 0) == ""


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), ("serve",), ("dead-letters",)])
def test_help_has_two_names(
    command: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, flag]) == 0
    assert "Usage: " in capsys.readouterr().out


def test_the_version_is_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n" * 2


def test_a_missing_module_is_asked_for_by_the_smallest_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        package = packages_distributions().get(module, [module])[0].lower().replace("_", "-")
        assert any(package in needed for needed in extras[extra]), (module, extra)
    assert extra_of(ModuleNotFoundError(name="numba.core")) == "indexer"
    assert extra_of(ModuleNotFoundError(name="unheard")) == "all"


def test_settings_are_listed_as_they_are_declared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["settings"]
    assert [one["name"] for one in listed] == list(settings_by_key())
    for one in listed:
        assert one["environment"] == variable_of(one["name"])
    defaults = {one["environment"]: str(one["default"]) for one in listed}
    assert load_settings(environment=defaults) == Settings()
    port = next(one for one in listed if one["name"] == "router.port")
    assert (port["type"], port["default"], port["bounds"]) == ("int", 8080, "0..65535")


def test_settings_are_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "type", "default", "bounds", "environment"]
    assert [line.split()[0] for line in lines[1:]] == list(settings_by_key())


def test_policies_that_can_be_set_are_those_that_there_are() -> None:
    _, bounds = kind_and_bounds(settings_by_key()["router.policy"])
    assert bounds == f"one of {', '.join(POLICIES)}"
