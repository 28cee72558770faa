"""The instances that may serve a model: what holds of them as long as the fleet stands.

Instances that cut and name blocks alike form a group. What a decision looks at is kept in columns,
so that a request costs no object per instance.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvatlas.indexer.reader import InstanceSelection, InstanceView
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.loads import LoadKey, LoadSelection
from kvatlas.router.decision.pricing import OWNER_TRUST
from kvatlas.router.decision.requests import HashedPrompt
from kvatlas.schemas.errors import InvalidRequest, NoCandidate, UnknownModel
from kvatlas.schemas.fleet import NamespaceDescriptor, Trust, WorkerInfo, WorkerRole
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier
from kvatlas.schemas.known_names import MAX_NAME_CHARS, few_names
from kvatlas.schemas.routing import ChainGroup

#: parts of a candidate set that are kept, such as those without who failed lately
MAX_SUBSETS = 16
#: columns that stand while the same instances describe themselves alike
_LASTING = frozenset(
    ["num_classes", "selections", "row_of", "tie_break_keys", "leasable", "all_lend_every_tier"]
)
_LASTING |= {"unreusable", "has_unreusable"}
_BETTER_THAN_DEGRADED = (Trust.exact, Trust.catching_up)


class GroupKey(NamedTuple):
    """What candidates of a group have in common: with a salt, their namespace."""

    model: str
    descriptor: NamespaceDescriptor
    lora: str | None


class CandidateRow(NamedTuple):
    """What of a candidate holds as long as the fleet stands, as Candidate begins."""

    worker: str
    rank: int
    trust: Trust
    group: int
    block_tokens: int
    kv_class: int


class CandidateSet:
    """The instances that may serve a model or adapter; holds as long as the fleet stands."""

    def __init__(
        self,
        views: Iterable[InstanceView],
        infos: Iterable[WorkerInfo],
        groups: Iterable[GroupKey],
        group_of: Iterable[int],
        kv_class_of: Iterable[int],
        mutes: Mapping[InstanceId, str] | None = None,
    ) -> None:
        self.views, self.infos, self.groups = tuple(views), tuple(infos), tuple(groups)
        #: of each view, its position in `groups`
        self.group_of = tuple(group_of)
        #: of each view, equal where KV may be exchanged; 0 where it may not
        self.kv_class_of = tuple(kv_class_of)
        #: who holds more of a request's namespace than it says, and why
        self.over_budget: Mapping[InstanceId, str] = mutes or {}
        self._parts: dict[object, CandidateSet] = {}

    def __len__(self) -> int:
        return len(self.views)

    # --- columns, by view, so that a request need not gather them --------------------------------

    @cached_property
    def rows(self) -> tuple[CandidateRow, ...]:
        """What each candidate begins with."""
        each = zip(self.views, self.infos, self.group_of, self.kv_class_of, strict=True)
        return tuple(
            CandidateRow(
                *view.instance,
                self._trust(view),
                group,
                info.descriptor.block_tokens,
                kv_class,
            )
            for view, info, group, kv_class in each
        )

    @cached_property
    def answer_fields(self) -> tuple[tuple[str, int, str, Trust, int], ...]:
        """What answers say of each: worker, rank, its address, trust, and the tokens of a block."""
        return tuple(map(_answer_fields, self.rows, self.infos))

    def _trust(self, view: InstanceView) -> Trust:
        is_muted = view.instance in self.over_budget and view.trust in _BETTER_THAN_DEGRADED
        return Trust.degraded if is_muted else view.trust

    @cached_property
    def traits(self) -> k.I64:
        """Return what prices depend on, a line each."""
        lines = [(s.block_tokens, s.kv_class, _trust_number(s.trust)) for s in self.rows]
        return _read_only_i64(lines).reshape(len(lines), k.NUM_TRAITS)

    @cached_property
    def num_classes(self) -> int:
        """The highest number of a KV class."""
        return max(self.kv_class_of, default=0)

    @cached_property
    def selections(self) -> tuple[tuple[InstanceSelection, k.I64], ...]:
        """Return, for each group, who is asked about its chain, and their lines."""
        lines: list[list[int]] = [[] for _ in self.groups]
        for line, group in enumerate(self.group_of):
            lines[group].append(line)
        return tuple(
            (InstanceSelection(self.views[line].instance for line in each), _read_only_i64(each))
            for each in lines
        )

    @cached_property
    def loads(self) -> LoadSelection:
        """Whose loads are asked for."""
        each = zip(self.views, self.infos, strict=True)
        return LoadSelection(LoadKey(view.instance, view.epoch, info.model) for view, info in each)

    @cached_property
    def row_of(self) -> dict[InstanceId, int]:
        """The line of each instance."""
        return {view.instance: line for line, view in enumerate(self.views)}

    @cached_property
    def tie_break_keys(self) -> tuple[bytes, ...]:
        """What of each instance is drawn with, see policies.draw."""
        return tuple(
            tie_break_key(candidate_row.worker, candidate_row.rank) for candidate_row in self.rows
        )

    @cached_property
    def leasable(self) -> tuple[frozenset[Tier], ...]:
        """The tiers whose blocks peers can have from each."""
        return tuple(frozenset(info.leasable_tiers) for info in self.infos)

    @cached_property
    def all_lend_every_tier(self) -> bool:
        """Whether everybody lends all tiers."""
        return all(len(tiers) == NUM_TIERS for tiers in self.leasable)

    @cached_property
    def unreusable(self) -> k.I64:
        """Blocks at the end of a match that each computes again."""
        return _read_only_i64([info.num_unreusable_trailing_blocks for info in self.infos])

    @cached_property
    def has_unreusable(self) -> bool:
        """Whether anybody reuses less than it holds."""
        return bool(self.unreusable.any())

    # --- as the fleet changes --------------------------------------------------------------------

    def revised(
        self, before: Sequence[InstanceView], now: Sequence[InstanceView]
    ) -> "CandidateSet | None":
        """Return the candidate set for those that serve now, made from this one for those before.

        It has to be whole, as `line_up` makes it, not `without` or `muting` anybody.
        Only what hangs on trust, epoch and mutes is made anew, and only for whom it has changed.
        None where that is not enough: somebody has come, gone, or describes itself otherwise.
        """
        if len(before) != len(now):
            return None
        changed: dict[int, InstanceView] = {}
        for was, view in zip(before, now, strict=True):
            if view is was:
                continue
            if view.instance != was.instance or view.info != was.info:
                return None
            line = self.row_of.get(view.instance)
            if line is not None and _changing_facts(view) != _changing_facts(self.views[line]):
                changed[line] = view
        return self._with_changed_views(changed) if changed else self

    def _with_changed_views(self, changed: Mapping[int, InstanceView]) -> "CandidateSet":
        views = list(self.views)
        for line, view in changed.items():
            views[line] = view
        made = CandidateSet(views, self.infos, self.groups, self.group_of, self.kv_class_of)
        candidate_rows, shown, traits = (
            list(self.rows),
            list(self.answer_fields),
            self.traits.copy(),
        )
        for line, view in changed.items():
            candidate_rows[line] = candidate_rows[line]._replace(trust=view.trust)
            shown[line] = _answer_fields(candidate_rows[line], self.infos[line])
            traits[line, k.TRUST] = _trust_number(view.trust)
        traits.flags.writeable = False
        kept = {name: column for name, column in vars(self).items() if name in _LASTING}
        if all(view.epoch == self.views[line].epoch for line, view in changed.items()):
            kept["loads"] = self.loads
        # where cached properties look first
        vars(made).update(
            kept, rows=tuple(candidate_rows), answer_fields=tuple(shown), traits=traits
        )
        return made

    # --- parts -----------------------------------------------------------------------------------

    @cached_property
    def not_exact(self) -> frozenset[InstanceId]:
        """Who is not exact."""
        each = zip(self.views, self.rows, strict=True)
        return frozenset(
            view.instance for view, candidate_row in each if candidate_row.trust is not Trust.exact
        )

    @cached_property
    def stalled(self) -> Mapping[InstanceId, str]:
        """Whose engine gives no sign of life, and since when."""
        return {view.instance: view.stall for view in self.views if view.stall}

    @cached_property
    def with_over_budget_namespaces(self) -> tuple[tuple[InstanceView, int], ...]:
        """Who has muted namespaces, and their groups."""
        each = zip(self.views, self.group_of, strict=True)
        return tuple((view, group) for view, group in each if view.muted)

    def degrading(self, mutes: Mapping[InstanceId, str]) -> "CandidateSet":
        """Return the candidate set for a namespace of which those hold more than they say."""
        if not mutes:
            return self
        key = frozenset(mutes.items())
        found = self._parts.get(key)
        return self._remember(key, self._degrading(mutes)) if found is None else found

    def _degrading(self, mutes: Mapping[InstanceId, str]) -> "CandidateSet":
        columns = self.views, self.infos, self.groups, self.group_of, self.kv_class_of
        return CandidateSet(*columns, mutes)

    def without(self, avoided: frozenset[InstanceId]) -> "CandidateSet":
        """Return the candidate set less those, unless nobody would be left."""
        found = self._parts.get(avoided)
        return self._remember(avoided, self._without(avoided)) if found is None else found

    def _without(self, avoided: frozenset[InstanceId]) -> "CandidateSet":
        kept = [n for n, view in enumerate(self.views) if view.instance not in avoided]
        if not kept or len(kept) == len(self.views):
            return self
        return self._subset(kept, self.groups, [self.group_of[n] for n in kept])

    def for_hashes(self, prompt: HashedPrompt) -> "CandidateSet":
        """Return the candidate set of those who cut and name blocks as the hashes of a prompt say.

        Raises InvalidRequest where nobody does, or where several groups might be meant.
        """
        key = prompt.block_tokens, prompt.algorithm, prompt.lookahead_tokens
        found = self._parts.get(key)
        return self._remember(key, self._for_hashes(prompt)) if found is None else found

    def _for_hashes(self, prompt: HashedPrompt) -> "CandidateSet":
        meant = [n for n, key in enumerate(self.groups) if _may_name(key.descriptor, prompt)]
        if len(meant) != 1:
            raise _ambiguous_hashes(self.groups, [self.groups[n] for n in meant], prompt)
        if len(self.groups) == 1:
            return self
        kept = [n for n, group in enumerate(self.group_of) if group == meant[0]]
        return self._subset(kept, (self.groups[meant[0]],), [0] * len(kept))

    def _subset(
        self, kept: Sequence[int], groups: tuple[GroupKey, ...], group_of: Sequence[int]
    ) -> "CandidateSet":
        views, infos = (self.views[n] for n in kept), (self.infos[n] for n in kept)
        kv_class_of = (self.kv_class_of[n] for n in kept)
        return CandidateSet(views, infos, groups, group_of, kv_class_of, self.over_budget)

    def _remember(self, key: object, part: "CandidateSet") -> "CandidateSet":
        if len(self._parts) >= MAX_SUBSETS:
            self._parts.clear()
        self._parts[key] = part
        return part


def _answer_fields(
    candidate_row: CandidateRow, info: WorkerInfo
) -> tuple[str, int, str, Trust, int]:
    return (
        candidate_row.worker,
        candidate_row.rank,
        info.base_url,
        candidate_row.trust,
        candidate_row.block_tokens,
    )


def _changing_facts(view: InstanceView) -> tuple[int, Trust, Mapping[bytes, str], str]:
    """Return what of a view a candidate set depends on, beside its name and description."""
    return view.epoch, view.trust, view.muted, view.stall


def tie_break_key(worker: str, rank: int) -> bytes:
    """Return what of an instance is drawn with."""
    return f"{rank}/{worker}".encode()


def candidate_set_of(serving: Iterable[InstanceView], model: str, lora: str | None) -> CandidateSet:
    """Sort out who may serve `model`, which may be an adapter's name.

    Raises UnknownModel, InvalidRequest (an adapter that nobody has) and NoCandidate.
    """
    known = [(view, view.info) for view in serving if view.info is not None]
    if not known:
        raise UnknownModel(model)
    able = [(view, info, key) for view, info in known if (key := _group_key(info, model, lora))]
    if not able:
        adapters = {name for _, info in known for name in info.adapters}
        raise InvalidRequest("lora", _no_adapter(lora or "", adapters))
    chosen = [(view, info, key) for view, info, key in able if info.role is not WorkerRole.decode]
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
    return CandidateSet(
        views=tuple(view for view, _, _ in chosen),
        infos=tuple(info for _, info, _ in chosen),
        groups=tuple(groups),
        group_of=tuple(group_of),
        kv_class_of=tuple(kv_class_of),
    )


def recorded_groups(
    candidate_set: CandidateSet, chains: tuple[bytes, ...], salted: bool
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
            key.descriptor.lookahead_tokens,
        )
        for key, chain in zip(candidate_set.groups, chains, strict=True)
    )


def _read_only_i64(numbers: object) -> k.I64:
    """Return numbers as kernels want their input."""
    made = np.array(numbers, np.int64)
    made.flags.writeable = False
    return made


def _trust_number(trust: Trust) -> int:
    if trust is Trust.exact:
        return k.EXACT
    return k.OWNER if trust in OWNER_TRUST else k.DOUBTFUL


def _group_key(info: WorkerInfo, model: str, lora: str | None) -> GroupKey | None:
    """Return the namespace of a request at a worker, None if the worker lacks the adapter."""
    if model in info.models:
        if lora is not None and info.adapters.get(lora) not in info.models:
            return None
        return GroupKey(info.model, info.descriptor, lora)
    if lora not in (None, model):
        raise InvalidRequest("lora", "the model is an adapter itself")
    return GroupKey(info.model, info.descriptor, model)


def _no_adapter(lora: str, known: Iterable[str]) -> str:
    problem = f"no worker of the model has adapter {lora[:MAX_NAME_CHARS]!r}"
    names = few_names(sorted(known))
    return f"{problem}; known are {names}" if names else f"{problem}, nor any other"


def _may_name(descriptor: NamespaceDescriptor, prompt: HashedPrompt) -> bool:
    return (
        prompt.block_tokens in (None, descriptor.block_tokens)
        and prompt.algorithm in (None, descriptor.algorithm)
        and prompt.lookahead_tokens in (None, descriptor.lookahead_tokens)
    )


def _naming_of(descriptor: NamespaceDescriptor) -> str:
    ahead = descriptor.lookahead_tokens
    behind = f", lookahead_tokens {ahead}" if ahead else ""
    return f"{descriptor.block_tokens} ({descriptor.algorithm}{behind})"


def _ambiguous_hashes(
    groups: Iterable[GroupKey], meant: Iterable[GroupKey], prompt: HashedPrompt
) -> InvalidRequest:
    """Return what is wrong with hashes that no group, or more than one, may have named."""
    known = ", ".join(dict.fromkeys(_naming_of(key.descriptor) for key in groups))
    sizes = {key.descriptor.block_tokens for key in meant}
    algorithms = {key.descriptor.algorithm for key in meant}
    lookaheads = {key.descriptor.lookahead_tokens for key in meant}
    if not sizes:
        given = ("block_tokens", "algorithm", "lookahead_tokens")
        field = next((name for name in given if getattr(prompt, name) is not None), given[0])
        return InvalidRequest(field, f"no worker names blocks so; known block sizes: {known}")
    if len(sizes) > 1:
        return InvalidRequest("block_tokens", f"expected one of several block sizes: {known}")
    if len(algorithms) > 1:
        return InvalidRequest("algorithm", f"expected one of several: {known}")
    if len(lookaheads) > 1:
        return InvalidRequest("lookahead_tokens", f"expected one of several: {known}")
    return InvalidRequest("model", "its workers name blocks after several models: ask for one")
