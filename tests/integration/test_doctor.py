"""The doctor at a real router, log, sidecar and engine, which does wrong one thing at a time."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvatlas.doctor.checks import Finding, Status
from kvatlas.doctor.run import DoctorOptions, run_doctor
from testkit.commands import run_command, running
from testkit.front_engine import FrontEngine, front_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER = "w0"
#: for what never comes, where what comes before it may take as long
MISS_SECONDS = 2.0
MODEL = "reference"


class Fleet:
    """A router and the engine in front of its one worker."""

    def __init__(self, router_url: str, engine: FrontEngine) -> None:
        self.router_url, self.engine = router_url, engine

    async def diagnose(self, **more: Any) -> dict[str, Finding]:
        """Return the findings by check; what is told is what is returned."""
        told: list[Finding] = []
        options: dict[str, Any] = {
            "engine_url": self.engine.url,
            "router_url": self.router_url,
            "worker": WORKER,
            "wait_seconds": 30.0,
        }
        findings = await run_doctor(DoctorOptions(**options | more), told.append)
        assert told == findings
        return {finding.check: finding for finding in findings}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[Fleet]:
    async with running("serve", "--port", "0", "--json", "--workers", "1") as serving:
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"{serving['router']}/v1/workers") as answer,
        ):
            [worker] = (await answer.json())["workers"]
        assert worker["worker"] == WORKER
        async with front_engine(worker["base_url"], MODEL) as engine:
            yield Fleet(serving["router"], engine)


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    started.engine.behave()
    return started


def failed(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.status is Status.fail}


async def test_a_healthy_engine_has_nothing_to_change(fleet: Fleet) -> None:
    findings = await fleet.diagnose()
    assert failed(findings) == set()
    for check in ("events", "overlap", "cache_salt", "chat", "block_size", "adapters", "worker"):
        assert findings[check].status is Status.ok, findings[check]
    assert findings["tokenizer"].status is Status.skipped
    # The requests of a router go past the front, which the doctor says.
    assert findings["base_url"].status is Status.warn


async def test_f52_an_engine_that_tells_no_events_is_a_silent_miss(fleet: Fleet) -> None:
    fleet.engine.tells_events = False
    findings = await fleet.diagnose(wait_seconds=0.5)
    assert failed(findings) == {"events", "overlap"}
    assert findings["overlap"].says.startswith("silent miss")
    assert "--kv-events-config" in findings["events"].change


async def test_f51_a_wrong_block_size_is_named_with_its_flag(fleet: Fleet) -> None:
    fleet.engine.block_tokens = 32
    findings = await fleet.diagnose()
    assert failed(findings) == {"block_size"}
    assert findings["block_size"].says == "the worker says 16 tokens, the engine has 32"
    assert "--block-size" in findings["block_size"].change


async def test_a_size_that_no_block_has_is_named_and_ends_nothing(fleet: Fleet) -> None:
    fleet.engine.block_tokens = 0
    findings = await fleet.diagnose()
    assert failed(findings) == {"block_size"}
    assert findings["overlap"].status is Status.ok


async def test_f54_a_conversation_that_is_other_tokens_is_named(fleet: Fleet) -> None:
    fleet.engine.tokenizes_truly = False
    findings = await fleet.diagnose(wait_seconds=MISS_SECONDS)
    assert failed(findings) == {"chat"}
    assert findings["chat"].says.startswith("silent miss")


async def test_f54_other_tokenizer_files_are_named(fleet: Fleet, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    model = tokenizers.models.WordLevel({"<u>": 0}, unk_token="<u>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    findings = await fleet.diagnose(tokenizer=tmp_path)
    assert failed(findings) == {"tokenizer"}
    assert "--tokenizer" in findings["tokenizer"].change
    assert findings["chat_template"].status is Status.skipped


@pytest.mark.parametrize(
    ("go_wrong", "check", "names"),
    [
        (lambda e: setattr(e, "prefix_caching", False), "prefix_caching", "--enable-prefix"),
        (lambda e: setattr(e, "prefix_caching", False), "overlap", "--enable-prefix"),
        (lambda e: setattr(e, "adapters", {"a": MODEL}), "adapters", "--lora-modules"),
        (lambda e: setattr(e, "minds_salts", False), "cache_salt", "fleet.key"),
        (lambda e: setattr(e, "api_key", "k"), "engine", "--api-key"),
        (lambda e: setattr(e, "model", "other"), "model", "--served-model-name"),
    ],
)
async def test_every_other_fault_is_found_and_its_flag_named(
    fleet: Fleet, go_wrong: Callable[[FrontEngine], None], check: str, names: str
) -> None:
    model = fleet.engine.model
    go_wrong(fleet.engine)
    findings = await fleet.diagnose(wait_seconds=MISS_SECONDS)
    fleet.engine.model = model
    assert findings[check].status is Status.fail
    assert names in findings[check].change


async def test_an_engine_that_reports_nothing_is_a_warning_with_its_flag(fleet: Fleet) -> None:
    fleet.engine.reports_cached_tokens = False
    findings = await fleet.diagnose()
    assert failed(findings) == set()
    assert findings["overlap"].status is Status.warn
    assert findings["overlap"].change == "--enable-prompt-tokens-details"


async def test_who_is_not_there_is_named(fleet: Fleet) -> None:
    assert failed(await fleet.diagnose(worker="w9")) == {"worker"}
    nobody = "http://127.0.0.1:1"
    assert failed(await fleet.diagnose(engine_url=nobody)) == {"engine"}
    assert failed(await fleet.diagnose(router_url=nobody)) == {"router"}
    assert failed(await fleet.diagnose(router_url=fleet.engine.url)) == {"router"}


async def test_the_command_prints_a_line_a_check_and_fails_with_a_failure(fleet: Fleet) -> None:
    asked = ["--engine-url", fleet.engine.url, "--router-url", fleet.router_url, "--json"]
    healthy = await run_command("doctor", "--worker", WORKER, *asked)
    assert healthy.status == 0, healthy
    *lines, last = healthy.out.splitlines()
    report = json.loads(last)
    assert report["healthy"]
    assert [line.split()[1] for line in lines] == [f["check"] for f in report["findings"]]
    ill = await run_command("doctor", "--worker", "w9", *asked)
    assert ill.status == 1
    assert not json.loads(ill.out.splitlines()[-1])["healthy"]
    wrong = await run_command("doctor", "--worker", WORKER, "--engine-url", "x", *asked[2:])
    assert wrong.status == 1
    assert "engine_url" in wrong.err
    deaf = await run_command("doctor", "--worker", WORKER, *asked, "--events-endpoint", "foo")
    assert deaf.status == 1
    (line,) = deaf.err.splitlines()
    assert "--events-endpoint" in line
