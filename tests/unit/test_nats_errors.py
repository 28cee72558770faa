"""The table of driver errors is complete, and answers of the broker are read in every form."""

import inspect

import nats.errors
import nats.js.errors
import pytest

from kvatlas.events.nats.errors import TABLE, translate
from kvatlas.events.nats.reading.consumer import parse_reply
from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidSubject,
    KvatlasError,
    NoResponder,
    RequestTimedOut,
    StreamRefused,
)

DRIVER_CLASSES = {
    found
    for module in (nats.errors, nats.js.errors)
    for _, found in inspect.getmembers(module, inspect.isclass)
    if issubclass(found, nats.errors.Error)
}


def test_each_class_of_the_driver_has_its_line() -> None:
    assert DRIVER_CLASSES - set(TABLE) == set()


def test_several_replicas_of_one_node_are_told_with_the_setting() -> None:
    error = nats.js.errors.ServerError(code=500, err_code=10074)
    says = "set log.replicas to 1, or name a cluster with --nats"
    assert str(translate(error, "declare")).endswith(says)


@pytest.mark.parametrize("found", sorted(DRIVER_CLASSES, key=str))
def test_each_class_becomes_one_of_ours(found: type[nats.errors.Error]) -> None:
    error = found.__new__(found)
    error.args = ()
    for name in ("code", "err_code", "description", "stream", "seq", "key", "message"):
        setattr(error, name, None)
    for name in ("subject", "reply", "sid", "sub", "_msg"):
        setattr(error, name, "")
    for name in ("last_consumer_sequence", "consumer_sequence", "stream_resume_sequence"):
        setattr(error, name, 0)
    translated = translate(error, "publish to a")
    assert isinstance(translated, KvatlasError)
    assert "publish to a" in str(translated) or isinstance(translated, InvalidSubject)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (nats.errors.TimeoutError(), RequestTimedOut),
        (TimeoutError(), RequestTimedOut),
        (ConnectionResetError(104, "reset"), BusUnavailable),
        (nats.errors.NoRespondersError(), NoResponder),
        (nats.errors.MaxPayloadError(), StreamRefused),
        (nats.js.errors.APIError(code=400, err_code=10052), StreamRefused),
        (nats.js.errors.APIError(code=408), BusUnavailable),
        (nats.js.errors.APIError(code=429), BusUnavailable),
        (nats.js.errors.ServiceUnavailableError(code=503), BusUnavailable),
        (nats.js.errors.ServerError(code=500, err_code=10074), BusUnavailable),
    ],
)
def test_what_may_pass_is_told_from_what_will_not(
    error: Exception, ours: type[KvatlasError]
) -> None:
    assert type(translate(error, "x")) is ours


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.TEST.c1.1.17.5.1796003096803314187.3",
        "$JS.ACK.hub.ABCDEF.TEST.c1.1.17.5.1796003096803314187.3",
        "$JS.ACK._.ABCDEF.TEST.c1.1.17.5.1796003096803314187.3.rAnDoM",
    ],
)
def test_a_delivery_is_read_with_and_without_a_domain(reply: str) -> None:
    assert parse_reply(reply) == (17, 5, 1796003096803314187, 3)
