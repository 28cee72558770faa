"""What the lines look like that a role logs, and whose are written."""

import logging
import re
import subprocess
import sys

import pytest

from kvatlas.indexer.reports import EffectLog
from kvatlas.indexer.stimuli import Effect, ReportRejected, ReportTrust
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId

LOGGING = """
import logging
from kvatlas.worker_hooks.log_lines import write_log_lines

write_log_lines("router")
for name in ("kvatlas.events.nats_connection", "uvicorn.error", "asyncio"):
    logging.getLogger(name).info("news of %s", name)
logging.getLogger("asyncio").warning("slow")
"""


def test_a_line_says_when_who_and_how_bad_and_good_news_of_others_are_left_out() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True
    )
    ours, others = ended.stderr.splitlines()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(f"{when} router INFO news of kvatlas.events.nats_connection", ours)
    assert re.fullmatch(f"{when} router WARNING slow", others)


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
