"""Who may serve a prompt and how much of it they hold.

    model --serving--> instances --namespace--> groups --hash once--> chains --held--> table

Instances that cut and name blocks alike form a group: the prompt is hashed and matched once for
each group, and compared in tokens across them. A prompt that comes as hashes belongs to one group.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.reader import IndexReader, InstanceSelection, InstanceView
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.candidate_set import (
    CandidateSet,
    GroupKey,
    candidate_set_of,
    recorded_groups,
)
from kvatlas.router.decision.candidate_table import CandidateTable
from kvatlas.router.decision.loads import LoadTracker
from kvatlas.router.decision.predictions import PredictedBlocks
from kvatlas.router.decision.requests import HashedPrompt, ScoreRequest
from kvatlas.router.decision.served_models import ServedModels
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidRequest, NoCandidate
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm
from kvatlas.schemas.ids import NUM_TIERS, InstanceId

__all__ = [
    "CandidateFinder",
    "CandidateSet",
    "FoundCandidates",
    "candidate_set_of",
    "recorded_groups",
]

MAX_CACHED_MODELS = 256
MAX_CACHED_HASHERS = 1024
#: of a question to a fleet that changes meanwhile; the last answer stands
MAX_REPEATS = 4

U32 = NDArray[np.uint32]


class FoundCandidates(NamedTuple):
    """All about the candidates of a request but what the policy draws with."""

    candidates: CandidateSet
    table: CandidateTable
    #: of each group, the prompt's chain; not to be recorded if the prompt is salted
    chains: tuple[bytes, ...]
    #: whose engine gives no sign of life and is left out, and since when
    stalled: Mapping[InstanceId, str]


class _CachedSet(NamedTuple):
    """A candidate set, the fleet's version that it is of, and those that it was made from."""

    version: int
    serving: list[InstanceView]
    candidate_set: CandidateSet


class _NumHeld(Mapping[InstanceId, int]):
    """Blocks held by name, looked up where they stand."""

    def __init__(self, candidate_set: CandidateSet, held: U32) -> None:
        self._candidate_set, self._held = candidate_set, held

    def __getitem__(self, instance: InstanceId) -> int:
        return int(self._held[self._candidate_set.row_of[instance]].sum())

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self._candidate_set.row_of)

    def __len__(self) -> int:
        return len(self._candidate_set)


class CandidateFinder:
    """Finds the candidates of requests, over an index that somebody else keeps up to date."""

    def __init__(
        self, index: IndexReader, loads: LoadTracker, overlay: PredictedBlocks, fleet_key: bytes
    ) -> None:
        self._index, self._loads, self._overlay = index, loads, overlay
        self._fleet_key = fleet_key
        #: of the index, when who may serve was looked up last
        self._fleet_version = -1
        self._candidate_sets: dict[tuple[str, str | None], _CachedSet] = {}
        self._served = ServedModels(index)
        #: without a salt only, so that no salt outlives its request
        self._hashers: OrderedDict[GroupKey, BlockHasher] = OrderedDict()

    def gather(
        self, request: ScoreRequest, now: float, avoided: frozenset[InstanceId] = frozenset()
    ) -> FoundCandidates:
        """Return who may serve the request, less the avoided if others are left.

        Raises UnknownModel, InvalidRequest (an adapter that nobody has, hashes of unclear blocks)
        and NoCandidate (all are gone or only decode, or nobody is exact where that is required).
        """
        gathered = self._gather(request, now, avoided)
        for _ in range(MAX_REPEATS):
            # an index that another process writes may have changed between who and how much:
            # its writer may even have died in between, and nobody be exact any more
            if self._index.fleet_version == self._fleet_version:
                break
            gathered = self._gather(request, now, avoided)
        return gathered

    def _gather(
        self, request: ScoreRequest, now: float, avoided: frozenset[InstanceId]
    ) -> FoundCandidates:
        candidate_set = self._candidate_set(request.model, request.lora)
        prompt_tokens, hashed = request.num_tokens, request.hashed
        if hashed is not None:
            candidate_set = candidate_set.for_hashes(hashed)
            prompt_tokens = _prompt_tokens(hashed, candidate_set.groups[0].descriptor)
        if candidate_set.with_over_budget_namespaces:
            candidate_set = candidate_set.degrading(self._over_budget(candidate_set, request))
        if request.requires_exact:
            if len(candidate_set.not_exact) == len(candidate_set):
                raise NoCandidate(request.model, "none of its workers is exact")
            candidate_set = candidate_set.without(candidate_set.not_exact)
        stalled = candidate_set.stalled
        if stalled:
            candidate_set = candidate_set.without(frozenset(stalled))
        if avoided:
            candidate_set = candidate_set.without(avoided)
        if hashed is not None:
            chains: tuple[bytes, ...] = (hashed.hashes,)
        else:
            chains = tuple(self._chain(key, request) for key in candidate_set.groups)
        held = self._held(candidate_set, chains)
        candidate_table = CandidateTable(
            candidate_set, self._reused(candidate_set, chains, held), prompt_tokens
        )
        self._fill(candidate_table, held, chains, now)
        if stalled:
            left = candidate_set.row_of
            stalled = {who: why for who, why in stalled.items() if who not in left}
        return FoundCandidates(candidate_set, candidate_table, chains, stalled)

    def _over_budget(
        self, candidate_set: CandidateSet, request: ScoreRequest
    ) -> dict[InstanceId, str]:
        """Return whose answer about the request's namespace is not all that it holds, and why.

        Hashes name no namespace: then any muted one of an instance may be meant.
        """
        if request.hashed is not None:
            return {
                view.instance: _over_budget_reason(next(iter(view.muted.values())))
                for view, _ in candidate_set.with_over_budget_namespaces
            }
        roots = [self._hasher(key, request.cache_salt).root for key in candidate_set.groups]
        return {
            view.instance: _over_budget_reason(view.muted[roots[group]])
            for view, group in candidate_set.with_over_budget_namespaces
            if roots[group] in view.muted
        }

    def _fill(
        self, candidate_table: CandidateTable, held: U32, chains: tuple[bytes, ...], now: float
    ) -> None:
        """Put in loads, and what is expected beyond what is held."""
        candidate_set = candidate_table.candidate_set
        self._loads.fill(candidate_set.loads, now, candidate_table.columns)
        if len(self._overlay):
            num_held = _NumHeld(candidate_set, held)
            for chain in chains:
                for life, num_blocks in self._overlay.predicted_beyond(
                    chain, num_held, now
                ).items():
                    instance, epoch = life
                    line = candidate_set.row_of.get(instance)
                    if line is not None and candidate_set.views[line].epoch == epoch:
                        # of what is expected in all, the engine reuses so many blocks less
                        least = int(candidate_set.unreusable[line]) - num_held[instance]
                        candidate_table.columns[line, k.PREDICTED] = max(
                            num_blocks - max(least, 0), 0
                        )

    def _held(self, candidate_set: CandidateSet, chains: tuple[bytes, ...]) -> U32:
        """Return what is held, a line each; what of it is reused may be less (`_reused`)."""
        if len(chains) == 1:
            return self._index.held(chains[0], candidate_set.selections[0][0])
        held = np.zeros((len(candidate_set), NUM_TIERS), np.uint32)
        for chain, (selection, lines) in zip(chains, candidate_set.selections, strict=True):
            held[lines] = self._index.held(chain, selection)
        return held

    def _reused(self, candidate_set: CandidateSet, chains: tuple[bytes, ...], held: U32) -> U32:
        """Return what of `held` the engines reuse: some compute the last blocks of it again."""
        if not candidate_set.has_unreusable:
            return held
        num_held = held.sum(axis=1, dtype=np.int64)
        num_reused = np.maximum(num_held - candidate_set.unreusable, 0)
        reused = held.copy()
        for line in np.flatnonzero(num_reused < num_held).tolist():
            if np.count_nonzero(held[line]) == 1:  # as a rule all of it is in one tier
                reused[line] = np.where(held[line], num_reused[line], 0)
            else:
                reused[line] = self._held_of(candidate_set, chains, line, int(num_reused[line]))
        return reused

    def _held_of(
        self, candidate_set: CandidateSet, chains: tuple[bytes, ...], line: int, num_blocks: int
    ) -> U32:
        """Return how the first blocks of a candidate's match are spread over the tiers."""
        chain = chains[candidate_set.group_of[line]][: num_blocks * BLOCK_HASH_BYTES]
        found: U32 = self._index.held(
            chain, InstanceSelection([candidate_set.views[line].instance])
        )[0]
        return found

    def _candidate_set(self, model: str, lora: str | None) -> CandidateSet:
        version = self._index.fleet_version
        self._fleet_version = version
        known = self._candidate_sets.get((model, lora))
        if known is not None and known.version == version:
            return known.candidate_set
        serving = self._index.serving(model)
        self._candidate_sets.pop((model, lora), None)
        if not serving:
            raise self._served.no_worker_error(model)
        self._served.note(model, serving)
        candidate_set = known and known.candidate_set.revised(known.serving, serving)
        if candidate_set is None:
            candidate_set = candidate_set_of(serving, model, lora)
        if len(self._candidate_sets) >= MAX_CACHED_MODELS:
            self._candidate_sets.clear()
        self._candidate_sets[model, lora] = _CachedSet(version, serving, candidate_set)
        return candidate_set

    def _chain(self, key: GroupKey, request: ScoreRequest) -> bytes:
        hasher = self._hasher(key, request.cache_salt)
        is_plain = key.descriptor.algorithm is HashAlgorithm.xxh3_128 and not request.extras
        if is_plain and prompt_kernel.IS_FAST:
            return prompt_kernel.hash_chain(
                hasher.root,
                request.tokens,
                key.descriptor.block_tokens,
                key.descriptor.lookahead_tokens,
            )
        return hasher.chain(request.tokens, request.extras)

    def _hasher(self, key: GroupKey, cache_salt: str | None) -> BlockHasher:
        namespace = key.descriptor.namespace(key.model, key.lora, cache_salt)
        if cache_salt is not None:
            return BlockHasher(namespace, self._fleet_key)
        hasher = self._hashers.get(key)
        if hasher is None:
            hasher = self._hashers[key] = BlockHasher(namespace, self._fleet_key)
            if len(self._hashers) > MAX_CACHED_HASHERS:
                self._hashers.popitem(last=False)
        return hasher


def _prompt_tokens(prompt: HashedPrompt, descriptor: NamespaceDescriptor) -> int:
    """Return the prompt's length, which the windows of its hashed blocks are a part of."""
    in_blocks = prompt.num_blocks * descriptor.block_tokens
    if in_blocks:
        in_blocks += descriptor.lookahead_tokens
    if prompt.num_tokens is None:
        return in_blocks
    if prompt.num_tokens < in_blocks:
        problem = f"{prompt.num_tokens}, less than the {in_blocks} that the hashed blocks cover"
        raise InvalidRequest("num_tokens", problem)
    return prompt.num_tokens


def _over_budget_reason(reason: str) -> str:
    return f"namespace_muted: {reason}"
