"""Reads a request trace in the Mooncake open format, whole, before anything is played.

One JSON object a line: `timestamp` ms, `input_length`, `output_length` tokens, `hash_ids` of
512-token blocks; equal ids mean an equal prefix up to that block.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.demo.prompts import TRACE_BLOCK_TOKENS, PlayedRequest
from kvatlas.schemas.errors import InvalidTrace


class _Row(Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]


_rows = msgspec.json.Decoder(_Row)


def read_trace(file: Path, limit: int | None = None) -> list[PlayedRequest]:
    """Return the first `limit` requests in order of arrival; raises InvalidTrace with the line."""
    requests: list[PlayedRequest] = []
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_request(file, number, line))
    except OSError as error:
        raise InvalidTrace(file, 0, error.strerror or str(error)) from error
    if not requests:
        raise InvalidTrace(file, 1, "no request in it")
    return sorted(requests, key=lambda request: request.arrival_ms)


def _request(file: Path, number: int, line: bytes) -> PlayedRequest:
    try:
        row = _rows.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidTrace(file, number, str(error)) from error
    needed = -(-row.input_length // TRACE_BLOCK_TOKENS)
    if len(row.hash_ids) != needed:
        problem = f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, expected {needed}"
        raise InvalidTrace(file, number, problem)
    return PlayedRequest(row.timestamp, row.hash_ids, row.input_length, row.output_length)
