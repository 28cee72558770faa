"""Who may serve a prompt and how much of it they hold.

    model --serving--> instances --namespace--> groups --hash once--> chains --held--> slate

Instances that cut and name blocks alike form a group: the prompt is hashed and matched once for
each group, and compared in tokens across them. A prompt that comes as hashes belongs to one group.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.reader import IndexReader, InstanceView, Roll
from kvatlas.router import price_kernel as k
from kvatlas.router.lineup import GroupKey, Lineup, line_up, recorded_groups
from kvatlas.router.loads import Loads
from kvatlas.router.overlay import Overlay
from kvatlas.router.requests import HashedPrompt, ScoreRequest
from kvatlas.router.served_models import ServedModels
from kvatlas.router.slate import Slate
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidRequest, NoCandidate
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm
from kvatlas.schemas.ids import NUM_TIERS, InstanceId

__all__ = ["Candidates", "Gathered", "Lineup", "line_up", "recorded_groups"]

MAX_CACHED_MODELS = 256
MAX_CACHED_HASHERS = 1024
#: of a question to a fleet that changes meanwhile; the last answer stands
MAX_REPEATS = 4

U32 = NDArray[np.uint32]


class Gathered(NamedTuple):
    """All about the candidates of a request but what the policy draws with."""

    lineup: Lineup
    slate: Slate
    #: of each group, the prompt's chain; not to be recorded if the prompt is salted
    chains: tuple[bytes, ...]
    #: whose engine gives no sign of life and is left out, and since when
    stalled: Mapping[InstanceId, str]


class _Known(NamedTuple):
    """A lineup, the fleet's version that it is of, and those that it was made from."""

    version: int
    serving: list[InstanceView]
    lineup: Lineup


class _NumHeld(Mapping[InstanceId, int]):
    """Blocks held by name, looked up where they stand."""

    def __init__(self, lineup: Lineup, held: U32) -> None:
        self._lineup, self._held = lineup, held

    def __getitem__(self, instance: InstanceId) -> int:
        return int(self._held[self._lineup.line_of[instance]].sum())

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self._lineup.line_of)

    def __len__(self) -> int:
        return len(self._lineup)


class Candidates:
    """Finds the candidates of requests, over an index that somebody else keeps up to date."""

    def __init__(
        self, index: IndexReader, loads: Loads, overlay: Overlay, fleet_key: bytes
    ) -> None:
        self._index, self._loads, self._overlay = index, loads, overlay
        self._fleet_key = fleet_key
        #: of the index, when who may serve was looked up last
        self._fleet_version = -1
        self._lineups: dict[tuple[str, str | None], _Known] = {}
        self._served = ServedModels(index)
        #: without a salt only, so that no salt outlives its request
        self._hashers: OrderedDict[GroupKey, BlockHasher] = OrderedDict()

    def gather(
        self, request: ScoreRequest, now: float, avoided: frozenset[InstanceId] = frozenset()
    ) -> Gathered:
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
    ) -> Gathered:
        lineup = self._lineup(request.model, request.lora)
        prompt_tokens, hashed = request.num_tokens, request.hashed
        if hashed is not None:
            lineup = lineup.naming(hashed)
            prompt_tokens = _prompt_tokens(hashed, lineup.groups[0].descriptor)
        if lineup.muted:
            lineup = lineup.muting(self._mutes(lineup, request))
        if request.requires_exact:
            if len(lineup.doubtful) == len(lineup):
                raise NoCandidate(request.model, "none of its workers is exact")
            lineup = lineup.without(lineup.doubtful)
        stalled = lineup.stalled
        if stalled:
            lineup = lineup.without(frozenset(stalled))
        if avoided:
            lineup = lineup.without(avoided)
        if hashed is not None:
            chains: tuple[bytes, ...] = (hashed.hashes,)
        else:
            chains = tuple(self._chain(key, request) for key in lineup.groups)
        held = self._held(lineup, chains)
        slate = Slate(lineup, self._reused(lineup, chains, held), prompt_tokens)
        self._fill(slate, held, chains, now)
        if stalled:
            left = lineup.line_of
            stalled = {who: why for who, why in stalled.items() if who not in left}
        return Gathered(lineup, slate, chains, stalled)

    def _mutes(self, lineup: Lineup, request: ScoreRequest) -> dict[InstanceId, str]:
        """Return whose answer about the request's namespace is not all that it holds, and why.

        Hashes name no namespace: then any muted one of an instance may be meant.
        """
        if request.hashed is not None:
            return {
                view.instance: _muted_for(next(iter(view.muted.values())))
                for view, _ in lineup.muted
            }
        roots = [self._hasher(key, request.cache_salt).root for key in lineup.groups]
        return {
            view.instance: _muted_for(view.muted[roots[group]])
            for view, group in lineup.muted
            if roots[group] in view.muted
        }

    def _fill(self, slate: Slate, held: U32, chains: tuple[bytes, ...], now: float) -> None:
        """Put in loads, and what is expected beyond what is held."""
        lineup = slate.lineup
        self._loads.fill(lineup.loads, now, slate.lines)
        if len(self._overlay):
            num_held = _NumHeld(lineup, held)
            for chain in chains:
                for life, num_blocks in self._overlay.beyond(chain, num_held, now).items():
                    instance, epoch = life
                    line = lineup.line_of.get(instance)
                    if line is not None and lineup.views[line].epoch == epoch:
                        # of what is expected in all, the engine reuses so many blocks less
                        least = int(lineup.unreusable[line]) - num_held[instance]
                        slate.lines[line, k.PREDICTED] = max(num_blocks - max(least, 0), 0)

    def _held(self, lineup: Lineup, chains: tuple[bytes, ...]) -> U32:
        """Return what is held, a line each; what of it is reused may be less (`_reused`)."""
        if len(chains) == 1:
            return self._index.held(chains[0], lineup.rolls[0][0])
        held = np.zeros((len(lineup), NUM_TIERS), np.uint32)
        for chain, (roll, lines) in zip(chains, lineup.rolls, strict=True):
            held[lines] = self._index.held(chain, roll)
        return held

    def _reused(self, lineup: Lineup, chains: tuple[bytes, ...], held: U32) -> U32:
        """Return what of `held` the engines reuse: some compute the last blocks of it again."""
        if not lineup.has_unreusable:
            return held
        num_held = held.sum(axis=1, dtype=np.int64)
        num_reused = np.maximum(num_held - lineup.unreusable, 0)
        reused = held.copy()
        for line in np.flatnonzero(num_reused < num_held).tolist():
            if np.count_nonzero(held[line]) == 1:  # as a rule all of it is in one tier
                reused[line] = np.where(held[line], num_reused[line], 0)
            else:
                reused[line] = self._held_of(lineup, chains, line, int(num_reused[line]))
        return reused

    def _held_of(
        self, lineup: Lineup, chains: tuple[bytes, ...], line: int, num_blocks: int
    ) -> U32:
        """Return how the first blocks of a candidate's match are spread over the tiers."""
        chain = chains[lineup.group_of[line]][: num_blocks * BLOCK_HASH_BYTES]
        found: U32 = self._index.held(chain, Roll([lineup.views[line].instance]))[0]
        return found

    def _lineup(self, model: str, lora: str | None) -> Lineup:
        version = self._index.fleet_version
        self._fleet_version = version
        known = self._lineups.get((model, lora))
        if known is not None and known.version == version:
            return known.lineup
        serving = self._index.serving(model)
        self._lineups.pop((model, lora), None)
        if not serving:
            raise self._served.nobody(model)
        self._served.note(model, serving)
        lineup = known and known.lineup.revised(known.serving, serving)
        if lineup is None:
            lineup = line_up(serving, model, lora)
        if len(self._lineups) >= MAX_CACHED_MODELS:
            self._lineups.clear()
        self._lineups[model, lora] = _Known(version, serving, lineup)
        return lineup

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


def _muted_for(reason: str) -> str:
    return f"namespace_muted: {reason}"
