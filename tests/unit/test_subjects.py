import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.streams import decisions_stream, events_stream, subject_matches
from kvatlas.events.subjects import (
    control_subject,
    decisions_subject,
    escape_token,
    events_subject,
    inventory_subject,
    lease_subject,
    parse_events_subject,
    parse_instance_subject,
    unescape_token,
)
from kvatlas.schemas.errors import InvalidSubject
from kvatlas.schemas.ids import InstanceId

names = st.text(max_size=30)
instances = st.builds(InstanceId, names, st.integers(0, 2**32 - 1))


def test_plain_names_stay_readable() -> None:
    subject = events_subject("Llama-3_1", InstanceId("gpu-07", 3))
    assert subject == "kv.events.Llama-3_1.gpu-07.3"


@pytest.mark.parametrize(
    ("name", "token"),
    [("", "="), ("a.b", "a=2Eb"), ("a b", "a=20b"), ("=", "=3D"), ("é", "=C3=A9"), (">", "=3E")],
)
def test_every_other_byte_is_escaped(name: str, token: str) -> None:
    assert escape_token(name) == token
    assert unescape_token(token) == name


@given(names)
def test_a_token_is_one_word_that_stands_for_its_name(name: str) -> None:
    token = escape_token(name)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token)
    assert unescape_token(token) == name


@given(names, names)
def test_two_names_never_share_a_token(one: str, other: str) -> None:
    assert (escape_token(one) == escape_token(other)) == (one == other)


@given(names, instances)
def test_event_subjects_are_read_back(model: str, instance: InstanceId) -> None:
    assert parse_events_subject(events_subject(model, instance)) == (model, instance)


@given(instances)
def test_instance_subjects_are_read_back(instance: InstanceId) -> None:
    for make in (control_subject, lease_subject, inventory_subject):
        assert parse_instance_subject(make(instance)) == instance


@given(names, instances)
def test_the_streams_hold_what_is_published(model: str, instance: InstanceId) -> None:
    def holds(subjects: tuple[str, ...], subject: str) -> bool:
        return any(subject_matches(pattern, subject) for pattern in subjects)

    events, decisions = events_stream().subjects, decisions_stream().subjects
    assert holds(events, events_subject(model, instance))
    assert holds(events, control_subject(instance))
    assert holds(decisions, decisions_subject(model))
    assert not holds(events, lease_subject(instance))


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "kv.events.m.w",
        "kv.events.m.w.0.1",
        "kv.events.m.w.x",
        "kv.events.m.w.-1",
        "kv.events.m.w.²",
        "kv.events.m.w.",
        "kv.events.m..0",
        "kv.events.m.a=2.0",
        "kv.events.m.a=2e.0",
        "kv.events.m.=FF.0",
        "kv.control.w.0",
        "KV.events.m.w.0",
    ],
)
def test_a_subject_outside_the_grammar_is_named(subject: str) -> None:
    with pytest.raises(InvalidSubject) as refused:
        parse_events_subject(subject)
    assert refused.value.subject in subject


@pytest.mark.parametrize("subject", ["", "kv.control.w", "kv.events.m.w.0", "kv.lease.w.x"])
def test_an_instance_subject_outside_the_grammar_is_named(subject: str) -> None:
    with pytest.raises(InvalidSubject):
        parse_instance_subject(subject)
