"""Who may serve a prompt and how much of it they hold.

    model --serving--> instances --namespace--> groups --hash once--> chains --match--> candidates

Instances that cut and name blocks alike form a group: the prompt is hashed and matched once for
each group, and compared in tokens across them. A prompt that comes as hashes belongs to one group.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.reader import IndexReader, InstanceView
from kvatlas.router.loads import Loads
from kvatlas.router.overlay import Life, Overlay
from kvatlas.router.pricing import NOTHING_HELD
from kvatlas.router.requests import HashedPrompt, ScoreRequest
from kvatlas.schemas.errors import InvalidRequest, NoCandidate, UnknownModel
from kvatlas.schemas.fleet import NamespaceDescriptor, Role, Trust, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Candidate, ChainGroup

MAX_CACHED_MODELS = 256
MAX_CACHED_HASHERS = 1024

_BETTER_THAN_DEGRADED = (Trust.exact, Trust.catching_up)

#: of each holder of a chain, its leading blocks by tier
Held = dict[InstanceId, tuple[int, int, int, int, int]]


class GroupKey(NamedTuple):
    """What candidates of a group have in common: with a salt, their namespace."""

    model: str
    descriptor: NamespaceDescriptor
    lora: str | None


class Seat(NamedTuple):
    """What of a candidate holds as long as the fleet stands."""

    instance: InstanceId
    epoch: int
    model: str
    worker: str
    rank: int
    trust: Trust
    group: int
    block_tokens: int
    kv_class: int
    #: roots of which it holds more than it says -> why
    muted: Mapping[bytes, str]


class Lineup(NamedTuple):
    """The instances that may serve a model or adapter; holds as long as the fleet stands."""

    views: tuple[InstanceView, ...]
    infos: tuple[WorkerInfo, ...]
    groups: tuple[GroupKey, ...]
    #: of each view, its position in `groups`
    group_of: tuple[int, ...]
    #: of each view, equal where KV may be exchanged; 0 where it may not
    kv_class_of: tuple[int, ...]
    #: the same, by view, so that a request need not gather it
    seats: tuple[Seat, ...]
    #: whether any of them may have muted namespaces
    has_mutes: bool

    @classmethod
    def of(
        cls,
        views: tuple[InstanceView, ...],
        infos: tuple[WorkerInfo, ...],
        groups: tuple[GroupKey, ...],
        group_of: tuple[int, ...],
        kv_class_of: tuple[int, ...],
    ) -> "Lineup":
        """Return the lineup of these."""
        seats = tuple(
            Seat(
                view.instance,
                view.epoch,
                info.model,
                view.instance.worker,
                view.instance.rank,
                view.trust,
                group,
                info.descriptor.block_tokens,
                kv_class,
                view.muted,
            )
            for view, info, group, kv_class in zip(views, infos, group_of, kv_class_of, strict=True)
        )
        has_mutes = any(view.muted for view in views)
        return cls(views, infos, groups, group_of, kv_class_of, seats, has_mutes)

    def without(self, avoided: frozenset[InstanceId]) -> "Lineup":
        """Return the lineup less those, unless nobody would be left."""
        kept = [n for n, view in enumerate(self.views) if view.instance not in avoided]
        if not kept or len(kept) == len(self.views):
            return self
        return self._replace(
            views=tuple(self.views[n] for n in kept),
            infos=tuple(self.infos[n] for n in kept),
            group_of=tuple(self.group_of[n] for n in kept),
            kv_class_of=tuple(self.kv_class_of[n] for n in kept),
            seats=tuple(self.seats[n] for n in kept),
        )

    def naming(self, prompt: HashedPrompt) -> "Lineup":
        """Return the lineup of those who cut and name blocks as the hashes of a prompt say.

        Raises InvalidRequest where nobody does, or where several groups might be meant.
        """
        meant = [n for n, key in enumerate(self.groups) if _may_name(key.descriptor, prompt)]
        if len(meant) != 1:
            raise _unclear(self.groups, [self.groups[n] for n in meant], prompt)
        if len(self.groups) == 1:
            return self
        kept = [n for n, group in enumerate(self.group_of) if group == meant[0]]
        return Lineup.of(
            views=tuple(self.views[n] for n in kept),
            infos=tuple(self.infos[n] for n in kept),
            groups=(self.groups[meant[0]],),
            group_of=(0,) * len(kept),
            kv_class_of=tuple(self.kv_class_of[n] for n in kept),
        )


class Gathered(NamedTuple):
    """All about the candidates of a request; the tuples are in one order."""

    lineup: Lineup
    candidates: tuple[Candidate, ...]
    #: of each group, the prompt's chain; not to be recorded if the prompt is salted
    chains: tuple[bytes, ...]
    prompt_tokens: int
    #: who holds more of the request's namespace than it says, and why
    mutes: Mapping[InstanceId, str]


class Candidates:
    """Finds the candidates of requests, over an index that somebody else keeps up to date."""

    def __init__(
        self, index: IndexReader, loads: Loads, overlay: Overlay, fleet_key: bytes
    ) -> None:
        self._index, self._loads, self._overlay = index, loads, overlay
        self._fleet_key = fleet_key
        self._fleet_version = -1
        self._lineups: dict[tuple[str, str | None], Lineup] = {}
        #: without a salt only, so that no salt outlives its request
        self._hashers: OrderedDict[GroupKey, BlockHasher] = OrderedDict()

    def gather(
        self, request: ScoreRequest, now: float, avoided: frozenset[InstanceId] = frozenset()
    ) -> Gathered:
        """Return who may serve the request, less the avoided if others are left.

        Raises UnknownModel, InvalidRequest (an adapter that nobody has, hashes of unclear blocks)
        and NoCandidate (all only decode, or nobody is exact where that is required).
        """
        lineup = self._lineup(request.model, request.lora)
        prompt_tokens, hashed = request.num_tokens, request.hashed
        if hashed is not None:
            lineup = lineup.naming(hashed)
            prompt_tokens = _prompt_tokens(hashed, lineup.groups[0].descriptor)
        mutes = self._mutes(lineup, request) if lineup.has_mutes else {}
        if request.requires_exact:
            inexact = (v.instance for v in lineup.views if v.trust is not Trust.exact)
            doubtful = frozenset([*inexact, *mutes])
            if len(doubtful) == len(lineup.views):
                raise NoCandidate(request.model, "none of its workers is exact")
            lineup = lineup.without(doubtful)
        if avoided:
            lineup = lineup.without(avoided)
        if hashed is not None:
            chains: tuple[bytes, ...] = (hashed.hashes,)
        else:
            chains = tuple(self._chain(key, request) for key in lineup.groups)
        candidates = self._candidates(lineup, *self._found(chains, now), mutes, now)
        return Gathered(lineup, candidates, chains, prompt_tokens, mutes)

    def _mutes(self, lineup: Lineup, request: ScoreRequest) -> dict[InstanceId, str]:
        """Return whose answer about the request's namespace is not all that it holds, and why.

        Hashes name no namespace: then any muted one of an instance may be meant.
        """
        muted = [seat for seat in lineup.seats if seat.muted]
        if request.hashed is not None:
            return {seat.instance: _muted_for(next(iter(seat.muted.values()))) for seat in muted}
        roots = [self._hasher(key, request.cache_salt).root for key in lineup.groups]
        return {
            seat.instance: _muted_for(seat.muted[roots[seat.group]])
            for seat in muted
            if roots[seat.group] in seat.muted
        }

    def _found(self, chains: tuple[bytes, ...], now: float) -> tuple[list[Held], dict[Life, int]]:
        """Return what is held of each chain, and what is expected beyond it, in blocks."""
        held: list[Held] = []
        predicted: dict[Life, int] = {}
        for chain in chains:
            matches = self._index.match(chain)
            held.append({match.instance: match.by_tier for match in matches})
            if len(self._overlay):
                num_held = {match.instance: match.num_blocks for match in matches}
                predicted |= self._overlay.beyond(chain, num_held, now)
        return held, predicted

    def _candidates(
        self,
        lineup: Lineup,
        held: list[Held],
        predicted: dict[Life, int],
        mutes: Mapping[InstanceId, str],
        now: float,
    ) -> tuple[Candidate, ...]:
        load_of = self._loads.of
        candidates = []
        for seat in lineup.seats:
            instance, epoch, model, worker, rank, trust, group, block_tokens, kv_class, _ = seat
            if mutes and instance in mutes and trust in _BETTER_THAN_DEGRADED:
                trust = Trust.degraded
            load = load_of(instance, epoch, model, now)
            candidates.append(
                Candidate(
                    worker,
                    rank,
                    trust,
                    group,
                    block_tokens,
                    kv_class,
                    held[group].get(instance, NOTHING_HELD),
                    predicted.get((instance, epoch), 0) if predicted else 0,
                    load.in_flight,
                    load.queued_ms,
                    load.work_ms,
                    load.compute_ms_per_token,
                    load.pull_ms_per_token,
                )
            )
        return tuple(candidates)

    def _lineup(self, model: str, lora: str | None) -> Lineup:
        if self._fleet_version != self._index.fleet_version:
            self._fleet_version = self._index.fleet_version
            self._lineups.clear()
        lineup = self._lineups.get((model, lora))
        if lineup is None:
            if len(self._lineups) >= MAX_CACHED_MODELS:
                self._lineups.clear()
            lineup = self._lineups[model, lora] = line_up(self._index.serving(model), model, lora)
        return lineup

    def _chain(self, key: GroupKey, request: ScoreRequest) -> bytes:
        hasher = self._hasher(key, request.cache_salt)
        is_plain = key.descriptor.algorithm is HashAlgorithm.xxh3_128 and not request.extras
        if is_plain and prompt_kernel.IS_FAST:
            return prompt_kernel.hash_chain(
                hasher.root, request.tokens, key.descriptor.block_tokens
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


def line_up(serving: Iterable[InstanceView], model: str, lora: str | None) -> Lineup:
    """Sort out who may serve `model`, which may be an adapter's name.

    Raises UnknownModel, InvalidRequest (an adapter that nobody has) and NoCandidate.
    """
    known = [(view, view.info) for view in serving if view.info is not None]
    if not known:
        raise UnknownModel(model)
    able = [(view, info, key) for view, info in known if (key := _group_key(info, model, lora))]
    if not able:
        raise InvalidRequest("lora", "no worker of the model has this adapter")
    chosen = [(view, info, key) for view, info, key in able if info.role is not Role.decode]
    if not chosen:
        raise NoCandidate(model, "all of its workers only decode")
    groups: dict[GroupKey, int] = {}
    kv_classes: dict[tuple[int, bytes], int] = {}
    group_of, kv_class_of = [], []
    for _, info, key in chosen:
        group_of.append(group := groups.setdefault(key, len(groups)))
        exchange = group, info.kv_fingerprint
        kv_class_of.append(
            kv_classes.setdefault(exchange, len(kv_classes) + 1) if info.kv_fingerprint else 0
        )
    return Lineup.of(
        views=tuple(view for view, _, _ in chosen),
        infos=tuple(info for _, info, _ in chosen),
        groups=tuple(groups),
        group_of=tuple(group_of),
        kv_class_of=tuple(kv_class_of),
    )


def recorded_groups(
    lineup: Lineup, chains: tuple[bytes, ...], salted: bool
) -> tuple[ChainGroup, ...]:
    """Return the groups as decisions keep them: without hashes if the prompt is salted."""
    return tuple(
        ChainGroup(
            key.model,
            key.descriptor.block_tokens,
            key.descriptor.algorithm,
            key.lora,
            salted,
            b"" if salted else chain,
        )
        for key, chain in zip(lineup.groups, chains, strict=True)
    )


def _group_key(info: WorkerInfo, model: str, lora: str | None) -> GroupKey | None:
    """Return the namespace of a request at a worker, None if the worker lacks the adapter."""
    if model in info.models:
        if lora is not None and info.adapters.get(lora) not in info.models:
            return None
        return GroupKey(info.model, info.descriptor, lora)
    if lora not in (None, model):
        raise InvalidRequest("lora", "the model is an adapter itself")
    return GroupKey(info.model, info.descriptor, model)


def _muted_for(reason: str) -> str:
    return f"namespace_muted: {reason}"


def _may_name(descriptor: NamespaceDescriptor, prompt: HashedPrompt) -> bool:
    return prompt.block_tokens in (None, descriptor.block_tokens) and (
        prompt.algorithm in (None, descriptor.algorithm)
    )


def _unclear(
    groups: Iterable[GroupKey], meant: Iterable[GroupKey], prompt: HashedPrompt
) -> InvalidRequest:
    """Return what is wrong with hashes that no group, or more than one, may have named."""
    known = ", ".join(
        f"{key.descriptor.block_tokens} ({key.descriptor.algorithm})" for key in groups
    )
    sizes = {key.descriptor.block_tokens for key in meant}
    algorithms = {key.descriptor.algorithm for key in meant}
    if not sizes:
        field = "algorithm" if prompt.block_tokens is None else "block_tokens"
        return InvalidRequest(field, f"no worker names blocks so; known block sizes: {known}")
    if len(sizes) > 1:
        return InvalidRequest("block_tokens", f"expected one of several block sizes: {known}")
    if len(algorithms) > 1:
        return InvalidRequest("algorithm", f"expected one of several: {known}")
    return InvalidRequest("model", "its workers name blocks after several models: ask for one")


def _prompt_tokens(prompt: HashedPrompt, descriptor: NamespaceDescriptor) -> int:
    """Return the prompt's length, which its full blocks are a part of."""
    in_blocks = prompt.num_blocks * descriptor.block_tokens
    if prompt.num_tokens is None:
        return in_blocks
    if prompt.num_tokens < in_blocks:
        problem = f"{prompt.num_tokens}, less than the {in_blocks} of the hashed blocks"
        raise InvalidRequest("num_tokens", problem)
    return prompt.num_tokens
