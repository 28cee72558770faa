"""What a new user reads first: one line that says what to give."""

from collections.abc import Sequence

import httpx
import pytest
from fastapi import FastAPI, Response

from kvatlas.__main__ import main
from kvatlas.doctor.run import DoctorOptions, run_doctor
from kvatlas.reference.http import create_worker_app
from kvatlas.runtime.http_server import bound_socket
from kvatlas.schemas.errors import InvalidSetting
from testkit.server import served


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["worker", "--name", "w0"],
            "no broker: give --nats nats://HOST:4222 or KVATLAS_NATS__URL",
        ),
        (
            ["archive", "--nats", "nats://127.0.0.1:1"],
            "no archive: give --archive a database URL, such as sqlite:///kvatlas.db",
        ),
        (
            ["replay", "--archive", "nonsense"],
            "archive.url is no URL of a database: give one such as sqlite:///kvatlas.db",
        ),
        (["dead-letters", "--payload", "1"], "--payload and --out belong together"),
        (
            ["dead-letters", "--nats", "http://user:secret@a"],
            "'http://a' is no address of a broker: expected nats://HOST:4222, tls://, ws://,"
            " wss:// or HOST:4222",
        ),
    ],
)
def test_what_is_missing_is_asked_for(
    arguments: Sequence[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVATLAS_NATS__URL", raising=False)
    monkeypatch.setattr("kvatlas.cli.commands.write_log_lines", lambda _: None)
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"kvatlas: {line}\n"


def test_a_port_that_is_taken_is_named_with_the_flag() -> None:
    with bound_socket("127.0.0.1", 0, False) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidSetting) as error, bound_socket("127.0.0.1", port, False):
            pass
    assert str(error.value) == f"port {port} of 127.0.0.1 is in use: give --port"


def test_a_host_that_is_none_of_ours_is_named_with_its_setting() -> None:
    with pytest.raises(InvalidSetting) as error, bound_socket("192.0.2.1", 0, False):
        pass
    assert str(error.value) == (
        "192.0.2.1:0: Cannot assign requested address: look at router.host (a worker's --host)"
        " and --port"
    )


async def test_a_reference_engine_lists_its_model() -> None:
    app = create_worker_app(None, None, "m")  # type: ignore[arg-type] # neither is asked here
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://engine"
    ) as client:
        listed = (await client.get("/v1/models")).json()
    assert (listed["object"], listed["data"][0]["id"]) == ("list", "m")


@pytest.mark.parametrize(
    ("status", "flag"), [(404, "--engine-url of the doctor"), (401, "--api-key of the doctor")]
)
async def test_the_doctor_names_the_flag_that_the_status_calls_for(status: int, flag: str) -> None:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: Response(status_code=status))
    async with served(app) as port:
        options = DoctorOptions(
            engine_url=f"http://127.0.0.1:{port}", router_url="http://127.0.0.1:1", worker="w0"
        )
        (finding,) = await run_doctor(options, lambda _: None)
    assert (finding.check, finding.change) == ("engine", flag)
