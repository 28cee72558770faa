"""What the lines look like that a role logs, and whose are written."""

import logging
import re
import subprocess
import sys

import pytest

from kvatlas.indexer.fold.stimuli import Effect, ReportRejected, ReportTrust
from kvatlas.indexer.service.fold_log import EffectLog
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.worker_hooks.log_lines import FewAlike

LOGGING = """
import logging
from kvatlas.worker_hooks.log_lines import write_log_lines

write_log_lines("router")
for name in ("kvatlas.events.nats.connection", "uvicorn.error", "asyncio"):
    logging.getLogger(name).info("news of %s", name)
logging.getLogger("asyncio").warning("slow")
"""


def test_a_line_says_when_who_and_how_bad_and_good_news_of_others_are_left_out() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True
    )
    ours, others = ended.stderr.splitlines()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(f"{when} router INFO news of kvatlas.events.nats.connection", ours)
    assert re.fullmatch(f"{when} router WARNING slow", others)


REPEATING = """
import logging
from kvatlas.worker_hooks.log_lines import write_log_lines

write_log_lines("router")
for _ in range(200):
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("kvatlas.router").warning("ours")
logging.getLogger("uvicorn.error").warning("another")
"""


def test_of_lines_of_libraries_that_repeat_few_are_written_with_their_number() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REPEATING], capture_output=True, text=True, check=True
    )
    lines = [line.partition("WARNING ")[2] for line in ended.stderr.splitlines()]
    assert lines.count("ours") == 200
    theirs = [line for line in lines if line != "ours"]
    assert theirs[:3] == ["Invalid HTTP request received."] * 3
    assert [line[:42] for line in theirs[3:]] == [
        "Invalid HTTP request received. (10 alike i",
        "Invalid HTTP request received. (100 alike ",
        "another",
    ]


def test_a_minute_later_the_first_line_says_how_many_were_left_out() -> None:
    now = 0.0
    few = FewAlike(lambda: now)

    def written() -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "no %s", ("room",), None)
        return record.getMessage() if few.filter(record) else None

    assert [written() for _ in range(9)] == ["no room"] * 3 + [None] * 6
    now = 61.0
    assert written() == "no room (6 alike of 61 s ago were left out)"


@pytest.mark.parametrize(
    ("effect", "line"),
    [
        (
            ReportRejected("w1", "payload", "malformed"),
            "w1: skipped payload in message 123 of KV_EVENTS (see `kvatlas dead-letters`):"
            " malformed",
        ),
        (
            ReportRejected("w1", "unknown", "tag 'x'"),
            "w1: skipped unknown in message 123 of KV_EVENTS: tag 'x'",
        ),
        (
            ReportTrust(InstanceId("w1", 0), 7, Trust.gone, ("down: signal SIGTERM",)),
            "w1: w1/0, epoch 7: gone (down: signal SIGTERM)",
        ),
        (ReportTrust(InstanceId("w1", 0), 7, Trust.exact, ()), "w1: w1/0, epoch 7: exact"),
    ],
)
def test_what_an_index_logs_of_a_message_says_where_to_look(
    caplog: pytest.LogCaptureFixture, effect: Effect, line: str
) -> None:
    caplog.set_level("INFO")
    EffectLog(logging.getLogger("kvatlas.test")).report(effect, 123, is_history=False)
    assert caplog.messages == [line]
