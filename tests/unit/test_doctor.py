"""The doctor's checks: facts in, findings out; and how facts are read from what engines answer."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.doctor import checks
from kvatlas.doctor.checks import Finding, Status
from kvatlas.doctor.engine_events import Heard, check_endpoint, find_first_hash, listening
from kvatlas.doctor.engine_hashes import matched_hash
from kvatlas.doctor.facts import (
    UNREADABLE,
    Arrival,
    EngineKind,
    Probe,
    ProbedFacts,
    SeenHash,
    Texts,
    engine_facts,
)
from kvatlas.doctor.local_text import LocalTokenizer
from kvatlas.doctor.run import DoctorOptions, run_doctor
from kvatlas.router.answers import WorkerAnswer, WorkersAnswer
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import Trust

VLLM = ProbedFacts(
    kind=EngineKind.vllm,
    models=("m",),
    block_tokens=16,
    prefix_caching=True,
    hash_algorithm="sha256",
)
SGLANG = ProbedFacts(kind=EngineKind.sglang, models=("m",))
MODELS = b'{"data": [{"id": "m", "parent": null}, {"id": "a", "parent": "m"}]}'
METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="64",enable_prefix_caching="True",hash_block_size="16",\
prefix_caching_hash_algo="sha256_cbor",engine="0"} 1.0
"""
#: facts of vLLM 0.32: tokens 0..31, block 32, seed vllm-none-hash
FIRST_HASH = 0xC102464DBE767670


def a_rank(rank: int = 0, **more: Any) -> WorkerAnswer:
    facts: dict[str, Any] = {
        "epoch": 1, "seq": 1, "trust": Trust.exact, "trust_reasons": (), "num_blocks": 0,
        "blocks_by_tier": {}, "digests": {}, "base_url": "http://e", "models": ("m",),
        "adapters": {}, "block_tokens": 16, "hash_algorithm": "xxh3_128", "role": "both",
        "last_event_age_ms": 1.0, "load": None,
    }  # fmt: skip
    return WorkerAnswer(worker="w", rank=rank, **{**facts, **more})


def said(finding: Finding) -> tuple[Status, str]:
    return finding.status, finding.change


class TestTheWorker:
    def test_a_known_and_exact_worker_is_healthy(self) -> None:
        assert checks.check_worker("w", [a_rank()], ["w"]).status is Status.ok

    def test_a_worker_that_nobody_knows_fails_and_the_known_are_named(self) -> None:
        finding = checks.check_worker("w", [], ["x", "y", "x"])
        assert finding.status is Status.fail
        assert "it knows 'x', 'y'" in finding.says

    def test_the_worst_rank_decides(self) -> None:
        degraded = a_rank(1, trust=Trust.degraded, trust_reasons=("a gap",))
        assert checks.check_worker("w", [a_rank(), degraded], []).status is Status.warn
        assert "a gap" in checks.check_worker("w", [a_rank(), degraded], []).says
        stale = a_rank(1, trust=Trust.stale)
        assert checks.check_worker("w", [a_rank(), stale], []).status is Status.fail

    def test_a_router_without_its_broker_fails(self) -> None:
        away = WorkersAnswer((), 0, 5_000.0, False)
        assert said(checks.check_router(away)) == (Status.fail, "--nats of the router")

    @pytest.mark.parametrize(
        ("url", "status"),
        [("http://e", Status.ok), ("http://f", Status.warn), ("", Status.fail)],
    )
    def test_requests_have_to_reach_the_engine(self, url: str, status: Status) -> None:
        assert checks.check_url([a_rank(base_url=url)], "http://e").status is status

    def test_the_model_has_to_be_known_on_both_sides(self) -> None:
        assert checks.check_model("m", [a_rank()], VLLM).status is Status.ok
        other = checks.check_model("m", [a_rank(models=("path/m",))], VLLM)
        assert other.status is Status.fail
        assert "--served-model-name" in other.change
        assert checks.check_model("n", [a_rank()], VLLM).status is Status.fail


class TestTheEngine:
    def test_f51_block_sizes_that_differ_fail_and_name_the_flag(self) -> None:
        finding = checks.check_block_size([a_rank(block_tokens=32)], VLLM)
        assert finding.status is Status.fail
        assert finding.says == "the worker says 32 tokens, the engine has 16"
        assert "--block-size" in finding.change
        assert checks.check_block_size([a_rank()], VLLM).status is Status.ok
        assert checks.check_block_size([a_rank()], SGLANG).status is Status.skipped

    @pytest.mark.parametrize("said", ["0", "9" * 5000, "65537", "-1", "16.0"])
    def test_a_size_that_no_block_has_is_named_with_its_flag(self, said: str) -> None:
        vllm = engine_facts(MODELS, f'vllm:cache_config_info{{block_size="{said}"}} 1.0')
        info = f'{{"page_size": {said}}}'.encode()
        for facts in (vllm, engine_facts(MODELS, "sglang:x 0", info)):
            assert facts.block_tokens is None
            finding = checks.check_block_size([a_rank()], facts)
            assert finding.status is Status.fail
            assert said[:20] in finding.says
            assert len(finding.says) < 100
            assert "--block-tokens" in finding.change

    def test_an_engine_without_prefix_caching_fails(self) -> None:
        off = msgspec.structs.replace(VLLM, prefix_caching=False)
        assert said(checks.check_prefix_caching(off)) == (
            Status.fail,
            "--enable-prefix-caching",
        )
        assert checks.check_prefix_caching(VLLM).status is Status.ok
        assert checks.check_prefix_caching(SGLANG).status is Status.skipped

    def test_adapters_have_to_be_known_on_both_sides(self) -> None:
        engine = msgspec.structs.replace(VLLM, adapters={"a": "m"})
        assert checks.check_adapters([a_rank(adapters={"a": "m"})], engine).status is Status.ok
        assert "'a'" in checks.check_adapters([a_rank()], engine).says
        assert checks.check_adapters([a_rank(adapters={"a": "m"})], VLLM).status is Status.fail
        assert checks.check_adapters([a_rank()], VLLM).status is Status.ok


class TestEvents:
    BLOCK_SIZE = Finding("block_size", Status.ok, "")

    def test_a_probe_that_becomes_known_is_healthy(self) -> None:
        arrival = Arrival(0.1, 32, 32, True)
        assert checks.check_events(arrival, VLLM, self.BLOCK_SIZE).status is Status.ok

    def test_f52_no_events_names_the_flag_that_is_missing(self) -> None:
        finding = checks.check_events(Arrival(10.0, 32, 0, False), VLLM, self.BLOCK_SIZE)
        assert finding.status is Status.fail
        assert "--kv-events-config" in finding.change

    def test_events_of_something_else_are_told_apart_from_none(self) -> None:
        finding = checks.check_events(Arrival(10.0, 32, 0, True), VLLM, self.BLOCK_SIZE)
        assert finding.says.startswith("events arrive, but 0 of 32 tokens")

    def test_f51_a_block_size_that_differs_explains_missing_events(self) -> None:
        differs = checks.check_block_size([a_rank(block_tokens=32)], VLLM)
        finding = checks.check_events(Arrival(10.0, 32, 0, False), VLLM, differs)
        assert said(finding) == (Status.fail, differs.change)


class TestNames:
    def test_workers_that_name_blocks_alike_are_healthy(self) -> None:
        finding = checks.check_names([a_rank(0, lookahead_tokens=1), a_rank(1, lookahead_tokens=1)])
        assert finding.status is Status.ok
        assert "16 tokens, xxh3_128, lookahead 1" in finding.says

    def test_ranks_that_differ_are_told_apart(self) -> None:
        finding = checks.check_names([a_rank(0), a_rank(1, hash_algorithm="sha256_128")])
        assert finding.status is Status.fail
        assert "rank 1: 16 tokens, sha256_128" in finding.says
        assert "fleet.block_hash" in finding.change

    def test_other_workers_that_differ_are_named(self) -> None:
        finding = checks.check_names([a_rank(names_differ=("w2/0: 16 tokens, sha256_128",))])
        assert finding.status is Status.fail
        assert "w2/0: 16 tokens, sha256_128" in finding.says


class TestOverlap:
    COLD = Probe(40, 0, 0)

    def test_equal_prediction_and_report_is_healthy(self) -> None:
        finding = checks.check_overlap(self.COLD, Probe(40, 32, 32), VLLM)
        assert (finding.status, finding.says) == (
            Status.ok,
            "0 and 32 tokens predicted and reused",
        )

    def test_f52_a_silent_miss_is_named(self) -> None:
        finding = checks.check_overlap(self.COLD, Probe(40, 0, 32), VLLM)
        assert finding.status is Status.fail
        assert finding.says.startswith("silent miss")

    def test_too_little_and_too_much_are_told_apart(self) -> None:
        little = checks.check_overlap(self.COLD, Probe(40, 16, 32), VLLM)
        much = checks.check_overlap(self.COLD, Probe(40, 32, 0), VLLM)
        assert little.says.startswith("known too little")
        assert much.says.startswith("believed too much")

    def test_an_engine_that_reports_nothing_is_asked_to(self) -> None:
        unreported = Probe(40, 32, None)
        assert said(checks.check_overlap(self.COLD, unreported, VLLM)) == (
            Status.warn,
            "--enable-prompt-tokens-details",
        )
        assert checks.check_overlap(self.COLD, unreported, SGLANG).change == "--enable-cache-report"

    def test_an_engine_may_leave_out_a_report_of_nothing(self) -> None:
        cold = Probe(40, 0, None)
        assert checks.check_overlap(cold, Probe(40, 32, 32), VLLM).status is Status.ok

    def test_blocks_that_the_engine_drops_are_found_with_the_flag_to_set(self) -> None:
        finding = checks.check_overlap(self.COLD, Probe(40, 32, 16), VLLM, a_rank())
        assert finding.status is Status.fail
        assert "computes the last 1 matched blocks again, configured are 0" in finding.says
        assert "--unreusable-blocks 1" in finding.change
        assert "unreusable_blocks=1 in the plugin's endpoint" in finding.change

    def test_blocks_that_it_is_said_to_drop_and_does_not_are_found_too(self) -> None:
        told = a_rank(num_unreusable_trailing_blocks=1)
        finding = checks.check_overlap(self.COLD, Probe(56, 32, 48), VLLM, told)
        assert "--unreusable-blocks 0" in finding.change
        right = checks.check_overlap(self.COLD, Probe(56, 32, 32), VLLM, told)
        assert right.status is Status.ok

    @pytest.mark.parametrize("warm", [Probe(40, 32, 0), Probe(40, 32, 20), Probe(40, 0, 32)])
    def test_other_differences_are_no_dropped_block(self, warm: Probe) -> None:
        finding = checks.check_overlap(self.COLD, warm, VLLM, a_rank())
        assert finding.status is Status.fail
        assert "--unreusable-blocks" not in finding.change

    def test_an_engine_that_drops_blocks_reuses_less_of_a_conversation(self) -> None:
        assert checks.check_chat(Probe(33, 32, 16), 16, VLLM).status is Status.fail
        assert checks.check_chat(Probe(33, 32, 16), 16, VLLM, 1).status is Status.ok

    def test_f50_salted_roots_of_another_key_name_the_key(self) -> None:
        finding = checks.check_salt(self.COLD, Probe(40, 0, 32), VLLM)
        assert finding.status is Status.fail
        assert "fleet.key" in finding.change

    def test_f49_an_sglang_that_does_not_tell_salts_is_named(self) -> None:
        finding = checks.check_salt(self.COLD, Probe(40, 0, 32), SGLANG)
        assert finding.status is Status.fail
        assert "SGLang 0.5.20" in finding.change

    def test_f49_an_engine_that_takes_no_salt_is_no_miss(self) -> None:
        refused = Probe(40, 0, None, refused="400 unknown field cache_salt")
        assert checks.check_salt(self.COLD, refused, SGLANG).status is Status.skipped

    def test_a_conversation_that_ends_with_a_block_costs_that_block(self) -> None:
        assert checks.check_chat(Probe(32, 32, 16), 16, VLLM).status is Status.ok
        assert checks.check_chat(Probe(33, 32, 32), 16, VLLM).status is Status.ok
        assert checks.check_chat(Probe(33, 0, 32), 16, VLLM).status is Status.fail


class TestTexts:
    def test_equal_ids_are_healthy(self) -> None:
        assert checks.check_tokenizer(Texts((1, 2), (1, 2))).status is Status.ok

    @pytest.mark.parametrize(
        ("local", "at"), [((1, 3), "token 1 on"), ((1,), "token 1 on"), ((), "token 0 on")]
    )
    def test_f54_the_first_difference_is_named(self, local: tuple[int, ...], at: str) -> None:
        finding = checks.check_chat_template(Texts((1, 2), local))
        assert (finding.status, finding.check) == (Status.fail, "chat_template")
        assert at in finding.says

    def test_what_cannot_be_compared_is_skipped_with_its_reason(self) -> None:
        finding = checks.check_tokenizer(Texts(missing="no --tokenizer"))
        assert (finding.status, finding.says) == (Status.skipped, "no --tokenizer")

    def test_a_tokenizer_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidSetting, match="tokenizer"):
            LocalTokenizer(tmp_path)

    def test_a_folder_without_a_template_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        local = LocalTokenizer(tmp_path)
        assert local.chat([{"role": "user", "content": "x"}]) == (
            "no chat template beside the local tokenizer"
        )

    def test_what_is_not_installed_is_named_with_its_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        (tmp_path / "chat_template.jinja").write_text("x")
        for name in ("tokenizers", "jinja2.exceptions"):
            monkeypatch.setitem(sys.modules, name, None)
        local = LocalTokenizer(tmp_path)
        for said in (local.encode("x"), local.chat([])):
            assert "pip install 'kvatlas[tokenizer]'" in said

    @pytest.mark.parametrize(
        "template", ["{{ 1 / 0 }}", "{{ messages.x.y }}", "{{ messages + 1 }}", "{% if", "\udcff"]
    )
    def test_files_that_are_no_tokenizer_are_no_end(self, tmp_path: Path, template: str) -> None:
        pytest.importorskip("jinja2", reason="renders chat templates")
        pytest.importorskip("tokenizers", reason="reads tokenizer.json")
        (tmp_path / "tokenizer.json").write_text("{}")
        content = template.encode(errors="surrogateescape")
        (tmp_path / "chat_template.jinja").write_bytes(content)
        local = LocalTokenizer(tmp_path)
        assert "--tokenizer" in str(local.encode("x"))
        assert isinstance(local.chat([]), str)

    def test_text_and_conversations_are_read_as_an_engine_reads_them(self, tmp_path: Path) -> None:
        pytest.importorskip("jinja2", reason="renders chat templates")
        tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
        model = tokenizers.models.WordLevel({"<u>": 0, "a": 1, "b": 2, "?": 3}, unk_token="<u>")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ '?' }}"
        (tmp_path / "tokenizer_config.json").write_bytes(
            msgspec.json.encode({"chat_template": template})
        )
        local = LocalTokenizer(tmp_path / "tokenizer.json")
        assert local.encode("a b c") == (1, 2, 0)
        assert local.chat([{"role": "user", "content": "b a"}]) == (2, 1, 3)


class TestEngineHashes:
    PROMPT = tuple(range(64))

    def test_a_known_seed_is_recognised(self) -> None:
        seen = SeenHash(FIRST_HASH, self.PROMPT[:32])
        finding = checks.check_hashing(VLLM, seen, None)
        assert finding.status is Status.ok
        assert "'vllm-none-hash'" in finding.says

    def test_f50_another_seed_is_told_and_is_no_miss(self) -> None:
        finding = checks.check_hashing(VLLM, SeenHash(1, self.PROMPT[:32]), "42")
        assert finding.status is Status.warn
        assert "PYTHONHASHSEED" in finding.change

    def test_the_seed_of_the_environment_is_tried(self) -> None:
        cbor2 = pytest.importorskip("cbor2", reason="one of vLLM's encodings")
        import hashlib

        def hashed(value: Any) -> bytes:
            return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

        whole = hashed((hashed("42"), self.PROMPT[:32], None))
        assert matched_hash("sha256_cbor", whole, self.PROMPT[:32], "42").seed == "42"
        low = int.from_bytes(whole[-8:], "big")
        assert matched_hash("sha256_cbor", low, self.PROMPT[:32], "42").seed == "42"

    def test_what_cannot_be_recomputed_is_skipped(self) -> None:
        engine = msgspec.structs.replace(VLLM, hash_algorithm="xxhash")
        finding = checks.check_hashing(engine, SeenHash(1, self.PROMPT[:32]), None)
        assert finding.status is Status.skipped
        unseen = checks.check_hashing(VLLM, SeenHash(None, missing="not seen"), None)
        assert (unseen.status, unseen.says) == (Status.skipped, "sha256; not seen")
        assert checks.check_hashing(SGLANG, SeenHash(None), None).status is Status.skipped

    def test_the_first_block_is_found_among_the_events(self) -> None:
        store = {
            "type": "BlockStored", "block_hashes": [FIRST_HASH, 7], "parent_block_hash": None,
            "token_ids": list(self.PROMPT), "block_size": 32, "lora_id": None, "medium": "GPU",
            "lora_name": None,
        }  # fmt: skip
        batch = msgspec.msgpack.encode([0.0, [store], None])
        assert find_first_hash("vllm", [b"\xc1", batch], self.PROMPT) == SeenHash(
            FIRST_HASH, self.PROMPT[:32]
        )
        assert find_first_hash("vllm", [batch], range(1, 65)).engine_hash is None


class TestListening:
    @pytest.mark.parametrize(
        "endpoint",
        ["foo", "tcp://", "tcp://h", "tcp://h:x", "tcp://h:99999", "tcp://*:1", "http://h:1"],
    )
    def test_an_endpoint_that_is_none_is_named_with_its_flag(self, endpoint: str) -> None:
        with pytest.raises(InvalidSetting, match="--events-endpoint"):
            check_endpoint(endpoint)

    @pytest.mark.parametrize("endpoint", ["", "tcp://h:1", "tcp://[::1]:5557", "ipc:///tmp/x"])
    def test_other_endpoints_are_taken(self, endpoint: str) -> None:
        check_endpoint(endpoint)

    async def test_what_zmq_refuses_is_said_and_ends_nothing(self) -> None:
        async with listening("tcp://") as heard:
            assert "--events-endpoint tcp://" in heard.first_hash("vllm", [1]).missing

    def test_an_engine_whose_events_nobody_reads_is_said(self) -> None:
        assert "'other'" in Heard().first_hash("other", [1]).missing


class Silent:
    """An engine and a router that say little, and nothing of how long a block is."""

    url = "http://e"

    def __init__(self, *_: object) -> None:
        pass

    async def facts(self) -> ProbedFacts:
        return SGLANG

    async def workers(self) -> WorkersAnswer:
        return WorkersAnswer((a_rank(block_tokens=0),), 0, 1.0, True)


async def test_where_nobody_says_how_long_a_block_is_no_probe_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for client in ("EngineClient", "RouterClient"):
        monkeypatch.setattr(f"kvatlas.doctor.run.{client}", Silent)
    options = DoctorOptions(engine_url="http://e", router_url="http://r", worker="w")
    *_, last = await run_doctor(options, lambda _: None)
    assert (last.check, last.status) == ("probe", Status.fail)
    assert "--block-tokens" in last.change


class TestFacts:
    @pytest.mark.parametrize(
        "answer", [b"[" * 5000, b'{"data": 5}', b'{"page_size": ' + b"9" * 5000]
    )
    def test_answers_that_cannot_be_read_are_none(self, answer: bytes) -> None:
        with pytest.raises(UNREADABLE):
            engine_facts(answer, "")
        assert engine_facts(MODELS, "sglang:x 0", answer).block_tokens is None

    def test_vllm_tells_by_its_metrics(self) -> None:
        assert engine_facts(MODELS, METRICS, version="0.32.0") == ProbedFacts(
            kind=EngineKind.vllm,
            version="0.32.0",
            models=("m",),
            adapters={"a": "m"},
            block_tokens=16,
            prefix_caching=True,
            hash_algorithm="sha256_cbor",
        )

    def test_an_older_vllm_has_one_block_size(self) -> None:
        metrics = 'vllm:cache_config_info{block_size="64",hash_block_size="None"} 1.0'
        assert engine_facts(MODELS, metrics).block_tokens == 64

    def test_sglang_tells_by_its_server_info(self) -> None:
        info = b'{"version": "0.5.23", "page_size": 64, "disable_radix_cache": false}'
        facts = engine_facts(MODELS, "sglang:num_running_reqs 0", info)
        assert (facts.kind, facts.block_tokens, facts.prefix_caching) == (
            EngineKind.sglang,
            64,
            True,
        )

    def test_an_unknown_engine_tells_its_models(self) -> None:
        facts = engine_facts(MODELS, "")
        assert (facts.kind, facts.models) == (EngineKind.other, ("m",))
        with pytest.raises(msgspec.DecodeError):
            engine_facts(b"<html>", "")
