"""Foreign text is printed and logged as one line that no terminal obeys, without credentials."""

import ast
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import kvatlas
from kvatlas.cli.commands import run_command
from kvatlas.cli.options import say, say_error, say_json
from kvatlas.demo.display import print_report
from kvatlas.demo.outcomes import PullFigures
from kvatlas.demo.run import DemoReport
from kvatlas.runtime.health_server import Announcement
from kvatlas.schemas.printable import (
    MAX_CHARACTERS,
    printable,
    printable_json,
    printable_lines,
    without_credentials,
)
from kvatlas.worker_hooks.log_lines import LineFormatter, printable_log

PASSWORD = "p4ss-w0rd"
HOSTILE = "w\x1b[2J\u202e\u2066\n2026-01-01 00:00:00,000 router ERROR forged\x9b\r\x7f\u200b"


@given(st.text())
def test_whatever_comes_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()


@given(st.text())
def test_what_is_printable_and_without_credentials_stays(text: str) -> None:
    if text.isprintable() and "@" not in text and "=" not in text:
        assert printable(text) == text


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_means_the_same(content: object) -> None:
    text = json.dumps(content, ensure_ascii=False)
    shown = printable_json(text)
    assert shown.isprintable()
    if "@" not in text and "=" not in text:
        assert json.loads(shown) == content


def test_a_lone_surrogate_is_written_out() -> None:
    assert printable("a\udcff") == "a\\udcff"


def test_a_long_text_is_cut_with_how_much_is_left_out() -> None:
    shown = printable("x" * (MAX_CHARACTERS + 7))
    assert shown.endswith("... (7 more characters)")
    assert len(shown) < MAX_CHARACTERS + 40
    assert printable("abcdef", 2) == "ab... (4 more characters)"


def test_lines_stay_lines() -> None:
    assert printable_lines("a\nb\x1b\r\nc") == "a\nb\\x1b\nc"


@pytest.mark.parametrize(
    "text",
    [
        f"nats://kv:{PASSWORD}@h:4222",
        f"'postgresql+psycopg://u:{PASSWORD}@h/db': no answer",
        f"nats://kv:a@{PASSWORD}@h:4222",
        f"nats://kv:{PASSWORD}/b@h:4222",
        f"nats://u:{PASSWORD}@h1:1,nats://u:{PASSWORD}@h2:2",
        f"nats://u:{PASSWORD}@h1:1, tls://{PASSWORD}@h2:2",
        f"postgresql://h/db?user=u&password={PASSWORD}&x=1",
        f'host=h password="{PASSWORD}" user=u',
        f"http://h/v1?api_key={PASSWORD}",
        f"HTTPS://{PASSWORD}@h/",
    ],
)
def test_credentials_of_urls_are_left_out_and_hosts_stay(text: str) -> None:
    shown = without_credentials(text)
    assert PASSWORD not in shown
    assert "***" in shown
    assert "h" in shown.rpartition("***")[2] or "h" in shown.partition("***")[0]
    if "h1" in text:
        assert "h1:1" in shown
        assert "h2:2" in shown


@pytest.mark.parametrize(
    "text", ["http://host:80/v1/models", "mail a@b.c", "tokens=12", "w@1/0 is exact"]
)
def test_what_has_no_credentials_stays(text: str) -> None:
    assert without_credentials(text) == text


# --- logs ---------------------------------------------------------------------------------------


def logged(message: str, *args: object, exc_info: object = None) -> str:
    record = logging.LogRecord("kvatlas", logging.ERROR, "f", 1, message, args, None)
    record.exc_info = exc_info  # type: ignore[assignment]
    return LineFormatter("%(levelname)s %(message)s").format(record)


def test_a_message_is_one_line_whatever_it_repeats() -> None:
    line = logged("%s: gone", HOSTILE)
    assert line.isprintable()
    assert line.startswith("ERROR w\\x1b[2J\\u202e\\u2066\\n2026")


def test_a_traceback_has_no_line_that_could_be_one_of_the_log() -> None:
    try:
        raise ValueError(f"{HOSTILE} nats://u:{PASSWORD}@h")
    except ValueError:
        text = logged("a part ended", exc_info=sys.exc_info())
    first, *others = text.splitlines()
    assert first == "ERROR a part ended"
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert PASSWORD not in text


def test_within_an_engine_messages_are_printable_too(caplog: pytest.LogCaptureFixture) -> None:
    log = printable_log("vllm.kvatlas")
    log.error("kvatlas: %s speaks to %s", HOSTILE, f"nats://u:{PASSWORD}@h")
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert record.getMessage().endswith("speaks to nats://***@h")
    assert record.filename == "test_printable.py"


def test_the_name_of_a_worker_may_have_a_percent_sign() -> None:
    code = (
        "import logging; from kvatlas.worker_hooks.log_lines import write_log_lines as write;"
        " write('worker 100%s\\x1b'); logging.getLogger('kvatlas').info('up')"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert ended.stderr.endswith(" worker 100%s\\x1b INFO up\n")


# --- commands -----------------------------------------------------------------------------------


def test_what_commands_say_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE, "second")
    say_json(json.dumps({"name": HOSTILE}, ensure_ascii=False))
    say_error(ValueError(HOSTILE))
    said = capsys.readouterr()
    assert [line.isprintable() for line in said.out.split("\n")] == [True] * 4
    assert said.err.removesuffix("\n").isprintable()


@pytest.mark.parametrize("as_json", [True, False])
def test_an_announcement_has_no_password(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    Announcement(as_json).now(archive=f"postgresql://u:{PASSWORD}@h/db", nats="nats://h:4222")
    said = capsys.readouterr().out
    assert PASSWORD not in said
    assert "@h/db" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["router", f"nats://kv:{PASSWORD}@h"],
        ["router", "--port", f"nats://kv:{PASSWORD}@h"],
        ["explain", "--archive", f"postgresql://u:a@{PASSWORD}@h/db"],
        ["explain", "--archive", f"postgresql://u:x@h:{PASSWORD}/db"],
        ["explain", "--archive", f"mysql://u:{PASSWORD}@h/db"],
        ["replay", "--archive", f"sqlite:///{PASSWORD}.db?password={PASSWORD}", "x"],
    ],
)
def test_a_wrong_command_line_is_not_repeated_with_its_password(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run_command(arguments) in (1, 2)
    said = capsys.readouterr()
    if arguments[0] != "replay":
        assert PASSWORD not in said.out + said.err
    assert "Traceback" not in said.err


def test_an_error_of_the_program_itself_has_no_password() -> None:
    code = (
        "import sys, kvatlas.cli.commands as commands\n"
        f"def fails(_): raise RuntimeError('nats://u:{PASSWORD}@h\\x1b')\n"
        "commands.run_command = fails\n"
        "from kvatlas.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "RuntimeError: nats://***@h\\x1b" in ended.stderr


def test_the_demo_shows_what_it_was_given_as_it_is() -> None:
    out = io.StringIO()
    report = DemoReport(
        trace="[red]t",
        requests=1,
        workers=1,
        policies={},
        events={"published": 0, "applied": 0, "gaps": 0, "rejected": 0},
        convergence_ms={"p50": 0.0, "p99": 0.0},
        pull=PullFigures(0, 0, 0, 0, "nixl"),
        digest={"equal": True, "workers": 1},
        replay={"batches": 0, "digest_equal": True},
        seconds=1.0,
        archive=f"postgresql://u:{PASSWORD}@h/[bold]db",
    )
    print_report(Console(file=out, width=200), report)
    assert "[red]t" in out.getvalue()
    assert "***@h/[bold]db" in out.getvalue()
    assert PASSWORD not in out.getvalue()


# --- everywhere ---------------------------------------------------------------------------------

SOURCES = Path(kvatlas.__file__).parent
PRINTING = ("print", "write_line")
#: calls that make what is printed printable
SAFE = ("printable", "printable_lines", "printable_json")


def prints_of(file: Path) -> list[str]:
    """Return the calls that print what is neither constant nor made printable."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTING:
            texts = [ast.unparse(each) for each in node.args if not isinstance(each, ast.Constant)]
            texts = [each for each in texts if each not in ("sys.stdout", "sys.stderr")]
            if any(not any(f"{safe}(" in text for safe in SAFE) for text in texts):
                found.append(f"{file.relative_to(SOURCES)}: {ast.unparse(node)}")
    return found


def test_nothing_is_printed_that_is_not_made_printable() -> None:
    """Use `say`, `say_json` or `say_error` of cli/options.py."""
    found = [each for file in sorted(SOURCES.rglob("*.py")) for each in prints_of(file)]
    formatted = "write_line(sys.stderr, text.removesuffix"  # by LineFormatter
    assert [each for each in found if "__version__" not in each and formatted not in each] == []
