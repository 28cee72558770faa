"""A burst of messages lets others on the event loop have their turn."""

import asyncio

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.nats.reading import consumer as nats_consumer
from kvatlas.events.nats.reading.consumer import _Deliveries

NUM_MESSAGES = 20


def a_delivery(number: int) -> Msg:
    reply = f"$JS.ACK.KV_EVENTS.c.1.{number}.{number}.1000.0"
    return Msg(Client(), "kv.events.m.w.0", reply, b"")


async def turns_within_a_burst() -> tuple[list[int], int]:
    """Return what was delivered, and how often another task ran before the last of it."""
    delivered, turns = list[int](), 0
    deliveries = _Deliveries(
        Client(), lambda _, at, *__: delivered.append(at), lambda: None, lambda: None, 0
    )

    async def other() -> None:
        nonlocal turns
        while len(delivered) < NUM_MESSAGES:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    for number in range(1, NUM_MESSAGES + 1):
        # as the driver's task does it, which waits for nothing while messages are there
        await deliveries.on_message(a_delivery(number))
    await running
    return delivered, turns


@pytest.mark.parametrize(("turn_seconds", "expected"), [(0.0, NUM_MESSAGES - 1), (1e9, 0)])
async def test_others_run_between_messages_that_take_long(
    turn_seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_consumer, "TURN_SECONDS", turn_seconds)
    delivered, turns = await turns_within_a_burst()
    assert delivered == list(range(1, NUM_MESSAGES + 1)), "in order, each once"
    assert turns == expected
