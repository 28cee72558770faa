import msgspec
import pytest

from kvatlas.schemas.errors import MalformedBatch, UnsupportedVersion
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseMissing,
    LeaseRelease,
    LeaseReleased,
    LeaseRequest,
    MissingReason,
    SourceAnnounced,
    TransferAnswer,
    decode_source_announced,
    decode_transfer_answer,
    decode_transfer_request,
    encode_transfer,
)
from testkit.blocks import a_chain

REQUEST = LeaseRequest(
    fingerprint=bytes(16), hashes=a_chain(1, 2), ttl_ms=500, requester="w2/0", transports=("nixl",)
)
GRANTED = LeaseGranted(
    lease_id=2**63,
    epoch=7,
    expires_in_ms=500,
    transport="nixl",
    agent="w1/0:7",
    metadata=b"m",
    metadata_version=9,
    rows=((2**63, 4096, 0),),
    checksums=bytes(8),
    missing_from=1,
    missing_reason=MissingReason.not_held,
)
ANSWERS: list[TransferAnswer] = [
    GRANTED,
    LeaseMissing(reason=MissingReason.busy, detail="later"),
    LeaseReleased(lease_id=3, was_held=True),
]


def test_requests_come_back_as_they_were_sent() -> None:
    for request in (REQUEST, LeaseRelease(lease_id=3)):
        assert decode_transfer_request(encode_transfer(request)) == request


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: type(a).__name__)
def test_answers_come_back_as_they_were_sent(answer: TransferAnswer) -> None:
    assert decode_transfer_answer(encode_transfer(answer)) == answer


def test_an_announcement_comes_back_as_it_was_put() -> None:
    announced = SourceAnnounced(
        epoch=7, transport="nixl", agent="a", metadata=b"m", metadata_version=1
    )
    assert decode_source_announced(encode_transfer(announced)) == announced


def test_the_wire_form_is_an_array_of_tag_and_version_first() -> None:
    assert msgspec.msgpack.decode(encode_transfer(LeaseRelease(lease_id=3))) == ["release", 1, 3]


def test_fields_that_a_newer_minor_appends_are_ignored() -> None:
    payload = msgspec.msgpack.encode(["release", 1, 3, "new"])
    assert decode_transfer_request(payload) == LeaseRelease(lease_id=3)


@pytest.mark.parametrize("raw", [["release", 2, 3], ["release", 2, {"id": 3}], ["other", 9]])
def test_a_newer_major_is_refused_by_its_number(raw: list[object]) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        decode_transfer_request(msgspec.msgpack.encode(raw))
    assert caught.value.found == raw[1]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode_transfer(REQUEST)[:-1],
        msgspec.msgpack.encode(["release"]),
        msgspec.msgpack.encode({"tag": "release"}),
        encode_transfer(LeaseMissing(reason="busy")),
    ],
)
def test_what_is_no_request_is_a_typed_error(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode_transfer_request(payload)


def test_half_a_hash_is_no_request() -> None:
    raw = msgspec.msgpack.decode(encode_transfer(REQUEST))
    raw[3] = raw[3][:-1]
    with pytest.raises(MalformedBatch, match="whole number"):
        decode_transfer_request(msgspec.msgpack.encode(raw))


def test_a_grant_whose_parts_disagree_is_no_answer() -> None:
    raw = msgspec.msgpack.decode(encode_transfer(GRANTED))
    raw[10] = bytes(16)
    with pytest.raises(MalformedBatch, match="checksums"):
        decode_transfer_answer(msgspec.msgpack.encode(raw))
