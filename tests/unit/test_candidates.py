"""Who may serve a prompt: models, adapters, groups, ranks."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvatlas.indexer.reader import InstanceSelection
from kvatlas.router.decision import candidates as candidates_module
from kvatlas.router.decision import served_models
from kvatlas.router.decision.candidate_set import CandidateSet
from kvatlas.router.decision.candidates import candidate_set_of
from kvatlas.router.decision.requests import HashedPrompt, Report, ScoreRequest
from kvatlas.schemas.errors import InvalidRequest, NoCandidate, PromptTooLarge, UnknownModel
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerRole
from kvatlas.schemas.hashing import BlockHasher, Extra, HashAlgorithm
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.routing import CandidateScore
from testkit.fleet import MODEL, Fleet, a_prompt, a_request


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def matches(scores: tuple[CandidateScore, ...]) -> dict[str, int]:
    return {f"{score.worker}/{score.rank}": score.match_tokens for score in scores}


def test_two_block_sizes_are_compared_in_tokens(fleet: Fleet) -> None:
    prompt = a_prompt(1_000)
    fleet.up("small", block_tokens=16)
    fleet.up("large", block_tokens=64)
    fleet.holds("small", prompt, num_blocks=20)
    fleet.holds("large", prompt, num_blocks=6)
    answer = fleet.router().score(a_request(prompt))
    assert matches(answer.candidates) == {"large/0": 384, "small/0": 320}
    assert answer.chosen == InstanceId("large", 0)


def test_two_hash_algorithms_serve_one_model(fleet: Fleet) -> None:
    prompt = a_prompt(64)
    fleet.up("w1", algorithm=HashAlgorithm.xxh3_128)
    fleet.up("w2", algorithm=HashAlgorithm.sha256_128)
    fleet.holds("w1", prompt, num_blocks=1)
    fleet.holds("w2", prompt)
    answer = fleet.router().score(a_request(prompt))
    assert matches(answer.candidates) == {"w2/0": 64, "w1/0": 16}


class TestLookahead:
    def test_the_router_hashes_as_each_worker_names(self, fleet: Fleet) -> None:
        """64 tokens are four blocks, of which the last has nothing behind it yet."""
        prompt = a_prompt(65)
        for name, ahead in (("plain", 0), ("ahead", 1), ("far", 3)):
            fleet.up(name, lookahead_tokens=ahead)
            fleet.holds(name, prompt)
        answer = fleet.router().score(a_request(prompt))
        assert matches(answer.candidates) == {"plain/0": 64, "ahead/0": 64, "far/0": 48}
        shorter = fleet.router().score(a_request(prompt[:64]))
        assert matches(shorter.candidates) == {"plain/0": 64, "ahead/0": 48, "far/0": 48}

    def test_another_token_behind_the_last_block_is_another_block(self, fleet: Fleet) -> None:
        fleet.up("w1", lookahead_tokens=1)
        fleet.holds("w1", [*a_prompt(64), 7])
        router = fleet.router()
        assert router.score(a_request([*a_prompt(64), 7])).candidates[0].match_tokens == 64
        assert router.score(a_request([*a_prompt(64), 8])).candidates[0].match_tokens == 48

    def test_an_image_that_begins_behind_a_block_is_a_part_of_its_name(self, fleet: Fleet) -> None:
        fleet.up("w1", lookahead_tokens=1)
        image = (Extra(16, "mm", "cat", 4),)
        fleet.holds("w1", a_prompt(40), extras=image)
        router = fleet.router()
        with_it = router.score(a_request(a_prompt(40), extras=image))
        assert with_it.candidates[0].match_tokens == 32
        assert router.score(a_request(a_prompt(40))).candidates[0].match_tokens == 0

    def test_by_hashes_a_lookahead_is_chosen_and_counts_as_tokens(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2", lookahead_tokens=1)
        fleet.holds("w2", a_prompt(65))
        router = fleet.router()
        descriptor = NamespaceDescriptor(16, lookahead_tokens=1)
        chain = BlockHasher(descriptor.namespace(MODEL, None, None)).chain(a_prompt(65))
        with pytest.raises(InvalidRequest, match="lookahead_tokens: expected one of several: 16 "):
            router.score(by_hashes(chain, block_tokens=16))
        answer = router.score(by_hashes(chain, lookahead_tokens=1))
        assert matches(answer.candidates) == {"w2/0": 64}
        assert answer.prompt_tokens == 65
        with pytest.raises(InvalidRequest, match="num_tokens: 64, less than the 65"):
            router.score(by_hashes(chain, lookahead_tokens=1, num_tokens=64))
        with pytest.raises(
            InvalidRequest, match=r"lookahead_tokens: no worker .*lookahead_tokens 1"
        ):
            router.score(by_hashes(chain, lookahead_tokens=2))

    def test_a_decision_says_by_which_lookahead_its_chain_was_made(self, fleet: Fleet) -> None:
        fleet.up("w1", lookahead_tokens=1)
        router = fleet.router()
        routed = router.route(a_request(a_prompt(64)))
        (group,) = router.decision(routed.decision_id).groups
        assert (group.lookahead_tokens, len(group.chain)) == (1, 3 * 16)


class TestUnreusableBlocks:
    def test_a_match_is_what_the_engine_reuses(self, fleet: Fleet) -> None:
        fleet.up("w1")
        for name, dropped in (("w2", 1), ("w3", 3)):
            fleet.up(name, num_unreusable_trailing_blocks=dropped)
        for name in ("w1", "w2", "w3"):
            fleet.holds(name, a_prompt(70), num_blocks=4)
        answer = fleet.router().score(a_request(a_prompt(70)))
        assert matches(answer.candidates) == {"w1/0": 64, "w2/0": 48, "w3/0": 16}
        by_hash = fleet.router().score(by_hashes(chain_of(a_prompt(70))))
        assert matches(by_hash.candidates) == {"w1/0": 64, "w2/0": 48, "w3/0": 16}

    def test_no_match_becomes_less_than_nothing(self, fleet: Fleet) -> None:
        fleet.up("w1", num_unreusable_trailing_blocks=2)
        fleet.holds("w1", a_prompt(70), num_blocks=1)
        answer = fleet.router().score(a_request(a_prompt(70)))
        assert matches(answer.candidates) == {"w1/0": 0}

    def test_what_is_dropped_is_dropped_where_it_lies(self, fleet: Fleet) -> None:
        fleet.up("w1", num_unreusable_trailing_blocks=1)
        fleet.holds("w1", a_prompt(70), num_blocks=3)
        fleet.holds("w1", a_prompt(70), num_blocks=4, tier=Tier.dram)
        (candidate,) = fleet.router().score(a_request(a_prompt(70))).candidates
        assert candidate.match_tokens_by_tier == {"hbm": 48}

    @pytest.mark.parametrize(("num_held", "expected"), [(0, 48), (1, 48), (2, 32), (3, 16)])
    def test_what_is_expected_is_less_by_as_much(
        self, fleet: Fleet, num_held: int, expected: int
    ) -> None:
        fleet.up("w1", num_unreusable_trailing_blocks=1)
        router = fleet.router()
        router.route(a_request(a_prompt(64)))
        if num_held:
            fleet.holds("w1", a_prompt(64), num_blocks=num_held)
        (candidate,) = router.score(a_request(a_prompt(64))).candidates
        assert candidate.predicted_tokens == expected
        assert candidate.match_tokens + candidate.predicted_tokens == 48


def test_an_index_that_changes_between_who_and_how_much_is_asked_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another process writes may."""
    fleet.up("w1")
    fleet.up("w2")
    router, held, leaving = fleet.router(), fleet.state.held, ["w1"]

    def changing(chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        found = held(chain, selection)
        if leaving:
            fleet.down(leaving.pop())
        return found

    monkeypatch.setattr(fleet.state, "held", changing)
    answer = router.score(a_request(a_prompt(64)))
    assert [candidate.worker for candidate in answer.candidates] == ["w2"]


def test_a_prompt_is_hashed_once_for_each_group(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        fleet.up(f"w{n}", block_tokens=16 if n % 2 else 32)
    router = fleet.router()
    asked: list[bytes] = []
    held = fleet.state.held

    def watched(chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        asked.append(chain)
        return held(chain, selection)

    monkeypatch.setattr(fleet.state, "held", watched)
    router.score(a_request(a_prompt(64)))
    assert sorted(len(chain) // 16 for chain in asked) == [2, 4]


def test_as_many_models_as_are_kept_stay_kept_when_one_changes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(serving: Any, model: str, lora: str | None) -> CandidateSet:
        made.append(model)
        return candidate_set_of(serving, model, lora)

    monkeypatch.setattr(candidates_module, "MAX_CACHED_MODELS", 2)
    monkeypatch.setattr(candidates_module, "candidate_set_of", counted)
    fleet.up("w1", model="a")
    fleet.up("w2", model="b")
    router, prompt = fleet.router(), a_prompt(64)
    for _ in range(2):
        assert router.score(a_request(prompt, model="a")).chosen == InstanceId("w1", 0)
        assert router.score(a_request(prompt, model="b")).chosen == InstanceId("w2", 0)
        fleet.tell("w1", skip=1)
    assert made == ["a", "b"]


def test_ranks_are_candidates_of_their_own(fleet: Fleet) -> None:
    prompt = a_prompt(64)
    fleet.up("w1", rank=0)
    fleet.up("w1", rank=1)
    fleet.holds("w1", prompt, rank=1)
    answer = fleet.router().score(a_request(prompt))
    assert matches(answer.candidates) == {"w1/1": 64, "w1/0": 0}


def test_every_name_of_a_model_has_the_same_blocks(fleet: Fleet) -> None:
    fleet.up("w1", models=(MODEL, "alias"))
    fleet.holds("w1", a_prompt(64))
    answer = fleet.router().score(a_request(a_prompt(64), model="alias"))
    assert matches(answer.candidates) == {"w1/0": 64}


def test_another_model_has_other_blocks(fleet: Fleet) -> None:
    fleet.up("w1")
    fleet.up("w2", model="other")
    fleet.holds("w1", a_prompt(64))
    answer = fleet.router().score(a_request(a_prompt(64), model="other"))
    assert matches(answer.candidates) == {"w2/0": 0}


class TestAdapters:
    @pytest.fixture
    def fleet(self, fleet: Fleet) -> Fleet:
        fleet.up("w1", adapters={"style": MODEL})
        fleet.up("w2")
        fleet.holds("w1", a_prompt(64), lora="style")
        fleet.holds("w2", a_prompt(64))
        return fleet

    def test_an_adapters_name_as_model_is_resolved(self, fleet: Fleet) -> None:
        answer = fleet.router().score(a_request(a_prompt(64), model="style"))
        assert matches(answer.candidates) == {"w1/0": 64}

    def test_an_adapter_beside_its_model_says_the_same(self, fleet: Fleet) -> None:
        answer = fleet.router().score(a_request(a_prompt(64), lora="style"))
        assert matches(answer.candidates) == {"w1/0": 64}

    def test_the_base_model_does_not_share_its_blocks(self, fleet: Fleet) -> None:
        answer = fleet.router().score(a_request(a_prompt(64)))
        assert matches(answer.candidates) == {"w2/0": 64, "w1/0": 0}

    def test_an_adapter_of_an_adapter_is_refused(self, fleet: Fleet) -> None:
        with pytest.raises(InvalidRequest, match="lora: the model is an adapter itself"):
            fleet.router().score(a_request(a_prompt(64), model="style", lora="other"))

    def test_an_adapter_that_nobody_has_is_refused(self, fleet: Fleet) -> None:
        with pytest.raises(InvalidRequest, match=r"has adapter 'other'; known are 'style'$"):
            fleet.router().score(a_request(a_prompt(64), lora="other"))

    def test_of_a_model_without_adapters_that_is_said(self) -> None:
        fleet = Fleet()
        fleet.up("w1")
        with pytest.raises(InvalidRequest, match=r"has adapter 'other', nor any other$"):
            fleet.router().score(a_request(a_prompt(64), lora="other"))


def chain_of(
    tokens: list[int],
    cut: int = 16,
    named: HashAlgorithm = HashAlgorithm.xxh3_128,
    lora: str | None = None,
) -> bytes:
    return BlockHasher(NamespaceDescriptor(cut, named).namespace(MODEL, lora, None)).chain(tokens)


def by_hashes(chain: bytes, lora: str | None = None, **hashed: Any) -> ScoreRequest:
    return ScoreRequest(MODEL, b"", lora, hashed=HashedPrompt(chain, **hashed))


class TestHashes:
    def test_a_prompt_is_its_hashes(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2")
        fleet.holds("w1", a_prompt(70), num_blocks=3)
        router = fleet.router()
        answer = router.score(by_hashes(chain_of(a_prompt(70))))
        assert matches(answer.candidates) == {"w1/0": 48, "w2/0": 0}
        assert answer.prompt_tokens == 64
        assert router.score(by_hashes(chain_of(a_prompt(70)), num_tokens=70)).prompt_tokens == 70

    def test_a_routed_prompt_is_expected_at_its_worker(self, fleet: Fleet) -> None:
        fleet.up("w1")
        router = fleet.router()
        routed = router.route(by_hashes(chain_of(a_prompt(64))))
        assert router.score(a_request(a_prompt(64))).candidates[0].predicted_tokens == 64
        assert router.decision(routed.decision_id).chain == chain_of(a_prompt(64))

    def test_an_adapter_says_who_serves(self, fleet: Fleet) -> None:
        fleet.up("w1", adapters={"style": MODEL})
        fleet.up("w2")
        fleet.holds("w1", a_prompt(64), lora="style")
        answer = fleet.router().score(by_hashes(chain_of(a_prompt(64), lora="style"), lora="style"))
        assert matches(answer.candidates) == {"w1/0": 64}

    def test_among_several_block_sizes_one_is_chosen(self, fleet: Fleet) -> None:
        fleet.up("small", block_tokens=16)
        fleet.up("large", block_tokens=64)
        fleet.holds("large", a_prompt(128))
        router = fleet.router()
        with pytest.raises(InvalidRequest, match="block_tokens: expected one of several"):
            router.score(by_hashes(chain_of(a_prompt(128), 64)))
        answer = router.score(by_hashes(chain_of(a_prompt(128), 64), block_tokens=64))
        assert matches(answer.candidates) == {"large/0": 128}

    def test_among_several_algorithms_one_is_chosen(self, fleet: Fleet) -> None:
        sha = HashAlgorithm.sha256_128
        fleet.up("w1")
        fleet.up("w2", algorithm=sha)
        fleet.holds("w2", a_prompt(64))
        router, chain = fleet.router(), chain_of(a_prompt(64), 16, sha)
        with pytest.raises(InvalidRequest, match="algorithm: expected one of several: 16 "):
            router.score(by_hashes(chain, block_tokens=16))
        request = by_hashes(chain, block_tokens=16, algorithm=sha)
        assert matches(router.score(request).candidates) == {"w2/0": 64}

    def test_other_blocks_than_the_fleets_are_refused(self, fleet: Fleet) -> None:
        fleet.up("w1")
        router = fleet.router()
        with pytest.raises(InvalidRequest, match=r"block_tokens: no worker .*16 .xxh3_128"):
            router.score(by_hashes(chain_of(a_prompt(64)), block_tokens=32))

    def test_workers_named_after_several_models_are_not_guessed(self, fleet: Fleet) -> None:
        fleet.up("w1", models=("one", MODEL))
        fleet.up("w2", models=("two", MODEL))
        with pytest.raises(InvalidRequest, match="model: its workers name blocks after several"):
            fleet.router().score(by_hashes(chain_of(a_prompt(64))))

    def test_a_prompt_has_at_least_the_tokens_of_its_blocks(self, fleet: Fleet) -> None:
        fleet.up("w1")
        with pytest.raises(InvalidRequest, match="num_tokens: 63, less than the 64"):
            fleet.router().score(by_hashes(chain_of(a_prompt(64)), num_tokens=63))

    def test_the_length_in_tokens_is_limited(self, fleet: Fleet) -> None:
        fleet.up("w1")
        with pytest.raises(PromptTooLarge, match="64 tokens, the limit is 63"):
            fleet.router(max_prompt_tokens=63).score(by_hashes(chain_of(a_prompt(64))))

    def test_a_failed_worker_is_left_out(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2")
        fleet.up("w3", block_tokens=32)
        router = fleet.router()
        request = by_hashes(chain_of(a_prompt(64)), block_tokens=16)
        routed = router.route(request)
        router.done(routed.decision_id, Report(failed=True))
        [other] = router.score(request).candidates
        assert other.worker in {"w1", "w2"} - {routed.worker}


class TestSaltsAndExtras:
    def test_a_salt_sees_its_own_blocks_only(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.holds("w1", a_prompt(64), cache_salt="alice")
        router = fleet.router()
        found = {
            salt: router.score(a_request(a_prompt(64), cache_salt=salt)).candidates[0].match_tokens
            for salt in ("alice", "bob", "", None)
        }
        assert found == {"alice": 64, "bob": 0, "": 0, None: 0}

    def test_the_fleet_key_is_part_of_a_salted_name(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.holds("w1", a_prompt(64), cache_salt="alice", fleet_key=b"key")
        request = a_request(a_prompt(64), cache_salt="alice")
        assert fleet.router().score(request).candidates[0].match_tokens == 0
        assert fleet.router(fleet_key=b"key").score(request).candidates[0].match_tokens == 64

    def test_an_image_is_part_of_its_blocks_name(self, fleet: Fleet) -> None:
        image = Extra(16, "image", "cat", 16)
        fleet.up("w1")
        fleet.holds("w1", a_prompt(64), extras=[image])
        router = fleet.router()
        with_cat = router.score(a_request(a_prompt(64), extras=(image,)))
        with_dog = router.score(a_request(a_prompt(64), extras=(Extra(16, "image", "dog", 16),)))
        assert with_cat.candidates[0].match_tokens == 64
        assert with_dog.candidates[0].match_tokens == 16


class TestWhoIsACandidate:
    def test_nobody_serves_an_unknown_model(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2", adapters={"style": MODEL})
        with pytest.raises(
            UnknownModel, match=r"^no worker serves model 'x'; served are 'm', 'style'$"
        ):
            fleet.router().score(a_request(a_prompt(4), model="x"))

    def test_however_many_models_there_are_a_few_are_named(self, fleet: Fleet) -> None:
        for n in range(30):
            fleet.up(f"w{n}", model=f"{n:02}" + "x" * 200)
        with pytest.raises(UnknownModel, match=r"'00xxx.* and 22 more$") as unknown:
            fleet.router().score(a_request(a_prompt(4), model="x"))
        assert len(str(unknown.value)) < 700

    def test_a_model_whose_workers_are_all_gone_is_no_typing_error(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2")
        fleet.up("w3", model="other")
        router, asked = fleet.router(), a_request(a_prompt(4))
        router.score(asked)
        fleet.down("w1")
        router.score(asked)
        fleet.down("w2")
        for _ in range(2):
            with pytest.raises(NoCandidate, match=r"gone: w2/0 \(down: bye\)$"):
                router.score(asked)
        with pytest.raises(UnknownModel):
            fleet.router().score(asked)  # one that was started since
        fleet.up("w2", epoch=2)
        assert matches(router.score(asked).candidates) == {"w2/0": 0}

    def test_who_asks_in_vain_again_and_again_has_the_fleet_looked_at_once(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.up("w1")
        fleet.up("w2", model="other")
        router = fleet.router()
        router.score(a_request(a_prompt(4)))
        fleet.down("w1")
        looked: list[str] = []

        def watch(name: str) -> None:
            look = getattr(fleet.state, name)

            def watched(*of: Any) -> Any:
                looked.append(name)
                return look(*of)

            monkeypatch.setattr(fleet.state, name, watched)

        watch("instance")
        watch("instances")
        for _ in range(5):
            with pytest.raises(NoCandidate):
                router.score(a_request(a_prompt(4)))
            with pytest.raises(UnknownModel):
                router.score(a_request(a_prompt(4), model="x"))
        assert looked.count("instances") == 1
        assert looked.count("instance") <= 2

    def test_what_is_said_of_a_model_follows_the_fleet(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2")
        router = fleet.router()
        router.score(a_request(a_prompt(4)))
        fleet.down("w1")
        fleet.down("w2")
        with pytest.raises(NoCandidate, match=r"w1/0 .* w2/0 "):
            router.score(a_request(a_prompt(4)))
        with pytest.raises(UnknownModel, match=r"model 'x'$"):
            router.score(a_request(a_prompt(4), model="x"))
        fleet.up("w2", model="other", epoch=2)
        with pytest.raises(NoCandidate, match=r"gone: w1/0 \(down: bye\)$"):
            router.score(a_request(a_prompt(4)))
        with pytest.raises(UnknownModel, match=r"served are 'other'$"):
            router.score(a_request(a_prompt(4), model="x"))

    def test_a_model_that_its_workers_gave_up_is_unknown(self, fleet: Fleet) -> None:
        fleet.up("w1")
        router = fleet.router()
        router.score(a_request(a_prompt(4)))
        fleet.up("w1", model="other", epoch=2)
        with pytest.raises(UnknownModel, match="served are 'other'"):
            router.score(a_request(a_prompt(4)))

    def test_few_models_are_remembered(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served_models, "MAX_SERVED_MODELS", 2)
        router = fleet.router()
        for name in "abc":
            fleet.up(name, model=name)
            router.score(a_request(a_prompt(4), model=name))
        for name in "abc":
            fleet.down(name)
        for name, error in {"a": UnknownModel, "b": NoCandidate, "c": NoCandidate}.items():
            with pytest.raises(error):
                router.score(a_request(a_prompt(4), model=name))

    def test_a_gone_worker_is_none(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2")
        fleet.down("w1")
        answer = fleet.router().score(a_request(a_prompt(4)))
        assert matches(answer.candidates) == {"w2/0": 0}

    def test_a_worker_that_only_decodes_is_none(self, fleet: Fleet) -> None:
        fleet.up("w1", role=WorkerRole.decode)
        with pytest.raises(NoCandidate, match="all of its workers only decode"):
            fleet.router().score(a_request(a_prompt(4)))

    def test_a_worker_that_comes_later_is_found(self, fleet: Fleet) -> None:
        fleet.up("w1")
        router = fleet.router()
        assert router.score(a_request(a_prompt(4))).num_candidates == 1
        fleet.up("w2")
        assert router.score(a_request(a_prompt(4))).num_candidates == 2

    def test_each_tier_is_told(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.holds("w1", a_prompt(64), num_blocks=1)
        fleet.holds("w1", a_prompt(64), tier=Tier.dram)
        [score] = fleet.router().score(a_request(a_prompt(64))).candidates
        assert score.match_tokens_by_tier == {"hbm": 16, "dram": 48}


class TestKvClasses:
    def kv_classes(self, fleet: Fleet) -> tuple[int, ...]:
        return candidate_set_of(fleet.state.serving(MODEL), MODEL, None).kv_class_of

    def test_equal_fingerprints_exchange_kv(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2")
        assert self.kv_classes(fleet) == (1, 1)

    def test_an_empty_fingerprint_exchanges_with_nobody(self, fleet: Fleet) -> None:
        fleet.up("w1", kv_fingerprint=b"")
        fleet.up("w2", kv_fingerprint=b"")
        assert self.kv_classes(fleet) == (0, 0)

    def test_other_fingerprints_and_other_blocks_do_not(self, fleet: Fleet) -> None:
        fleet.up("w1")
        fleet.up("w2", kv_fingerprint=b"g" * 16)
        fleet.up("w3", block_tokens=32)
        assert self.kv_classes(fleet) == (1, 2, 3)
