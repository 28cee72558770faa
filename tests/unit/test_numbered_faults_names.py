"""Faults that others had, by number: what is taken for the same, and what is told to whom."""

import json
import secrets
from pathlib import Path

import pytest

from kvatlas.events.bus import Message
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.hashing import BlockHasher, Namespace, pack_tokens
from kvatlas.schemas.settings import RouterSettings, load_settings, settings_by_key
from testkit.sidecars import beside, sidecar_options
from testkit.waiting import until


def chain_of(tokens: list[int], **namespace: object) -> bytes:
    return BlockHasher(Namespace("m", 4, **namespace)).chain(tokens)  # type: ignore[arg-type]


def test_f47_a_key_covers_all_that_comes_before_its_block() -> None:
    """Equal last blocks, equal lengths: other prompts, adapters and tenants have other keys."""
    ends_alike = [[1, 2, 3, 4, 9, 9, 9, 9], [5, 6, 7, 8, 9, 9, 9, 9]]
    chains = [chain_of(tokens) for tokens in ends_alike]
    chains += [chain_of(ends_alike[0], lora="a"), chain_of(ends_alike[0], cache_salt="a")]
    assert len({chain[-8:] for chain in chains}) == 4  # what the index keeps of the last block


def test_f53_a_misspelt_key_is_an_error_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    for key in settings_by_key():
        section, _, name = key.partition(".")
        with pytest.raises(InvalidSetting) as caught:
            load_settings(environment={}, flags=[(f"{key}_", "1")])
        assert caught.value.key == f"{key}_"
        variable = f"KVATLAS_{section.upper()}__{name.upper()}_"
        with pytest.raises(InvalidSetting, match=variable):
            load_settings(environment={variable: "1"})
        file.write_text(f"[{section}]\n{name}_ = 1\n")
        with pytest.raises(InvalidSetting, match=f"{name}_"):
            load_settings(file, {})


def test_f55_names_come_from_fields_and_never_from_text() -> None:
    """Text of a request that looks like a field of it changes neither its tokens nor its model."""
    inside = '", "token_ids": [7, 7, 7, 7], "user": "me", "model": "other'
    asked = {"model": inside, "lora": inside, "cache_salt": inside, "token_ids": [1, 2, 3, 4]}
    for body in (asked, dict(reversed(asked.items()))):
        raw = json.dumps(body).encode()
        request = decode_score_request(raw, "application/json", RouterSettings())
        assert request.tokens == pack_tokens([1, 2, 3, 4])
        assert (request.model, request.lora, request.cache_salt) == (inside, inside, inside)
    assert chain_of([1, 2, 3, 4]) != chain_of([4, 3, 2, 1])


async def test_f79_no_token_and_no_salt_leaves_a_worker(tmp_path: Path) -> None:
    """And nothing listens beyond loopback unless it is told to."""
    tokens, salt = secrets.token_bytes(32), secrets.token_hex(16)
    broker, log = MemoryBroker(), list[Message]()
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        await bus.follow(KV_EVENTS, 1, log.append)
        async with beside(sidecar_options(tmp_path), broker.connect()) as one:
            for secret in (None, salt):
                one.hook.stored([f"{secret}1".encode(), b"2"], None, tokens, cache_salt=secret)
            await one.channel.flush()
            assert (await one.channel.status()).num_blocks > 0
        last = await bus.last_sequence(KV_EVENTS)
        await until(lambda: bool(log) and log[-1].stream_sequence == last)
    said = b"".join(message.payload for message in log)
    assert not any(tokens[at : at + 4] in said for at in range(0, 32, 4))
    assert salt.encode() not in said
    assert RouterSettings().host == "127.0.0.1"
