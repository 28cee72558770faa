"""What a vLLM engine has told and holds still, in its own encoding.

    (group, medium) -> engine hash -> _Told(payload of the store that named it)

A store's payload is shared by its blocks, so this costs a dict entry a block and what the events
were long. Pure: the publisher says what happens, on the engine's thread.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

EngineHash = int | bytes
Place = tuple[int, str | None]

_encode = msgspec.msgpack.Encoder().encode


class _Told(NamedTuple):
    """One store as it was told."""

    payload: bytes
    hashes: tuple[EngineHash, ...]
    place: Place


class PublishedBlocks:
    """Blocks by the store that told of them last."""

    def __init__(self) -> None:
        self._held: dict[Place, dict[EngineHash, _Told]] = {}

    def stored(self, place: Place, hashes: Sequence[EngineHash], payload: bytes) -> None:
        """Note a store; `payload` is the encoded event."""
        told = _Told(payload, tuple(hashes), place)
        self._held.setdefault(place, {}).update(dict.fromkeys(hashes, told))

    def removed(self, place: Place, hashes: Sequence[EngineHash]) -> None:
        """Note blocks that are gone."""
        held = self._held.get(place, {})
        for engine_hash in hashes:
            held.pop(engine_hash, None)

    def cleared(self, media: Sequence[str | None] | None = None) -> None:
        """Note that everything is gone, or everything in these media."""
        for place in list(self._held):
            if media is None or place[1] in media:
                del self._held[place]

    def batches(self) -> Iterator[bytes]:
        """Yield batches that tell all anew, each a store and the removal of what of it is gone.

        What is told meanwhile is told besides; what goes meanwhile is left out.
        """
        stores = {id(told): told for held in self._held.values() for told in held.values()}
        for told in stores.values():
            held = self._held.get(told.place, {})
            gone = [engine_hash for engine_hash in told.hashes if engine_hash not in held]
            if len(gone) == len(told.hashes):
                continue
            events = [msgspec.Raw(told.payload)]
            if gone:
                events.append(msgspec.Raw(_encode(_removal(told.place, gone))))
            yield _encode([0.0, events, None])


def _removal(place: Place, hashes: list[EngineHash]) -> dict[str, object]:
    group, medium = place
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": medium,
        "group_idx": group,
    }
