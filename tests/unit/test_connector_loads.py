"""Loads against a sidecar: every load ends, and what did not come is said to have failed."""

from pathlib import Path

import pytest

from kvatlas.schemas.ids import InstanceId
from kvatlas.worker_hooks.channel import Answer, ChannelServer, PullBlocks, PullEnded, Question
from kvatlas.worker_hooks.connector.loads import Loads
from kvatlas.worker_hooks.connector.orders import Load, Run
from kvatlas.worker_hooks.connector.slots import PoolSlots
from kvatlas.worker_hooks.pool import ServePool
from testkit.sidecars import until

X, Y = (bytes([n]) * 16 for n in (1, 2))
LOAD = Load("r", (10, 11), (X, Y), (Run(0, 2, (InstanceId("a", 0),)),))


@pytest.mark.parametrize("behaviour", ["held", "missing", "closes", "gone", "own"])
async def test_a_load_always_ends(tmp_path: Path, behaviour: str) -> None:
    asked: list[Question] = []

    async def answer(question: Question) -> Answer:
        asked.append(question)
        assert isinstance(question, PullBlocks)
        if behaviour == "closes":
            raise ConnectionError  # the server closes the connection without an answer
        held = (0, 1) if behaviour == "held" else ()
        missing = () if held else ((0, "not_found"), (1, "not_found"))
        return PullEnded(question.id, held, missing)

    filled: list[int] = []
    finished: set[str] = set()
    path = tmp_path / "s"
    with ServePool.create("p", 4, 64, folder=tmp_path) as pool:
        slots = PoolSlots(pool)
        if behaviour == "own":
            slots.save(X, bytes(64))
            slots.save(Y, bytes(64))
        async with ChannelServer(tmp_path / "other" if behaviour == "gone" else path, answer):
            loads = Loads(str(path), slots, lambda block, slot: filled.append(block), 0.2)
            try:
                loads.start(LOAD)

                def has_ended() -> bool:
                    finished.update(loads.finished())
                    return finished == {"r"}

                await until(has_ended)
                failed = loads.failed()
            finally:
                loads.close()
    came = behaviour in ("held", "own")
    assert failed == (set() if came else {10, 11})
    assert filled == ([10, 11] if came else [])
    assert len(asked) == (behaviour not in ("own", "gone"))
