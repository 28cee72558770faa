"""Facts in, findings out: one function a check, each in the order in which they are told. Pure."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from kvatlas.doctor import flags
from kvatlas.doctor.engine_hashes import MatchedHash, matched_hash
from kvatlas.doctor.facts import Arrival, EngineKind, Probe, ProbedFacts, SeenHash, Texts
from kvatlas.router.answers import WorkerAnswer, WorkersAnswer
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import MAX_BLOCK_TOKENS


class Status(StrEnum):
    """What a finding asks for: nothing, a look, a change; or it could not be found out."""

    ok = "ok"
    warn = "warn"
    fail = "fail"
    skipped = "skipped"


class Finding(Struct, frozen=True):
    """One check in one line; `change` names the flag to change, if anything is to be."""

    check: str
    status: Status
    says: str
    change: str = ""

    def line(self) -> str:
        """Return it as text."""
        change = f" -> {self.change}" if self.change else ""
        return f"{self.status:<7} {self.check:<14} {self.says}{change}"


def no_answer(check: str, problem: str, change: str) -> Finding:
    """Return that a server which is needed does not answer."""
    return Finding(check, Status.fail, problem, change)


def check_engine(engine: ProbedFacts) -> Finding:
    """Say which engine answers."""
    what = f"{engine.kind} {engine.version}".strip()
    return Finding("engine", Status.ok, f"{what} serves {_names(engine.models)}")


def check_router(workers: WorkersAnswer) -> Finding:
    """Does the router follow the log?"""
    age = f"{workers.index_age_ms:.0f} ms"
    if not workers.connected:
        says = f"the router has no broker: its index is {age} old"
        return Finding("router", Status.fail, says, "--nats of the router")
    return Finding("router", Status.ok, f"connected, its index is {age} old")


def check_worker(worker: str, ranks: Sequence[WorkerAnswer], known: Sequence[str]) -> Finding:
    """Is the worker known to the router, and how far is it believed?"""
    if not ranks:
        says = f"the router does not know {worker!r}; it knows {_names(sorted(set(known)))}"
        return Finding("worker", Status.fail, says, flags.WORKER)
    trusts = {rank.trust for rank in ranks}
    reasons = "; ".join(dict.fromkeys(why for rank in ranks for why in rank.trust_reasons))
    shown = ", ".join(f"rank {rank.rank} is {rank.trust}" for rank in ranks)
    says = f"{shown} ({reasons})" if reasons else shown
    if trusts & {Trust.gone, Trust.stale}:
        return Finding("worker", Status.fail, says, "the sidecar or bridge: it says nothing")
    if trusts != {Trust.exact}:
        return Finding("worker", Status.warn, says)
    return Finding("worker", Status.ok, says)


def check_url(ranks: Sequence[WorkerAnswer], engine_url: str) -> Finding:
    """Do requests that are routed to the worker reach this engine?"""
    urls = {rank.base_url for rank in ranks}
    if urls == {engine_url}:
        return Finding("base_url", Status.ok, f"requests go to {engine_url}")
    if "" in urls:
        says = "the worker does not say where it takes requests"
        return Finding("base_url", Status.fail, says, flags.BASE_URL)
    says = f"requests go to {_names(sorted(urls))}, the doctor asked {engine_url}"
    return Finding("base_url", Status.warn, says, flags.BASE_URL)


def check_model(model: str, ranks: Sequence[WorkerAnswer], engine: ProbedFacts) -> Finding:
    """Do router and engine mean the same by the model's name?"""
    served = (*engine.models, *engine.adapters)
    if model not in served:
        says = f"the engine does not serve {model!r} but {_names(served)}"
        return Finding("model", Status.fail, says, flags.MODEL[engine.kind])
    told = {name for rank in ranks for name in (*rank.models, *rank.adapters)}
    if model not in told:
        says = f"the worker is known for {_names(sorted(told))}, the engine serves {model!r}"
        return Finding("model", Status.fail, says, flags.MODEL[engine.kind])
    return Finding("model", Status.ok, f"both know {model!r}")


def check_block_size(ranks: Sequence[WorkerAnswer], engine: ProbedFacts) -> Finding:
    """Does the worker cut prompts as its engine does?"""
    told = {rank.block_tokens for rank in ranks}
    shown = ", ".join(str(tokens) for tokens in sorted(told))
    if engine.odd_block_tokens:
        says = f"the engine says {engine.odd_block_tokens!r} tokens, not 1 to {MAX_BLOCK_TOKENS}"
        return Finding("block_size", Status.fail, says, flags.BLOCK_TOKENS[engine.kind])
    if engine.block_tokens is None:
        says = f"the engine does not say; the worker says {shown}"
        return Finding("block_size", Status.skipped, says)
    if told != {engine.block_tokens}:
        says = f"the worker says {shown} tokens, the engine has {engine.block_tokens}"
        return Finding("block_size", Status.fail, says, flags.BLOCK_TOKENS[engine.kind])
    return Finding("block_size", Status.ok, f"{engine.block_tokens} tokens on both sides")


def unknown_block_size() -> Finding:
    """Return that no probe can be cut, for neither side says how long a block is."""
    says = "neither the engine nor the worker says how many tokens a block has"
    return Finding("probe", Status.fail, says, "--block-tokens of the bridge or sidecar")


def check_prefix_caching(engine: ProbedFacts) -> Finding:
    """Does the engine reuse anything at all?"""
    if engine.prefix_caching is None:
        return Finding("prefix_caching", Status.skipped, "the engine does not say")
    if not engine.prefix_caching:
        change = flags.PREFIX_CACHING[engine.kind]
        return Finding("prefix_caching", Status.fail, "the engine caches no prefixes", change)
    return Finding("prefix_caching", Status.ok, "the engine caches prefixes")


def check_hashing(engine: ProbedFacts, seen: SeenHash, python_hash_seed: str | None) -> Finding:
    """Informative: how the engine itself names blocks; nothing of ours depends on it."""
    algorithm = engine.hash_algorithm
    if engine.kind is not EngineKind.vllm or algorithm is None:
        return Finding("engine_hashes", Status.skipped, "the engine does not say how it hashes")
    if seen.engine_hash is None:
        return Finding("engine_hashes", Status.skipped, f"{algorithm}; {seen.missing}")
    match matched_hash(algorithm, seen.engine_hash, seen.tokens, python_hash_seed):
        case MatchedHash(seed) if seed is not None:
            says = f"{algorithm} with seed {seed!r}, recomputed for the probe's first block"
            return Finding("engine_hashes", Status.ok, says)
        case MatchedHash(missing=missing) if missing:
            return Finding("engine_hashes", Status.skipped, f"{algorithm}; {missing}")
        case _:
            says = f"{algorithm} with a seed of its own: its hashes differ from other engines'"
            return Finding("engine_hashes", Status.warn, says, flags.NONE_HASH)


def check_events(arrival: Arrival, engine: ProbedFacts, block_size: Finding) -> Finding:
    """Has what the engine just computed become known?"""
    within = f"{arrival.waited_seconds:.1f} s"
    if arrival.matched_tokens >= arrival.expected_tokens:
        says = f"a probe's {arrival.expected_tokens} tokens were known within {within}"
        return Finding("events", Status.ok, says)
    known = f"{arrival.matched_tokens} of {arrival.expected_tokens}"
    if block_size.status is Status.fail:
        says = f"{known} tokens of a probe known after {within}: blocks of another size are dropped"
        return Finding("events", Status.fail, says, block_size.change)
    if arrival.has_changed:
        says = f"events arrive, but {known} tokens of a probe are known after {within}"
        return Finding("events", Status.fail, says, flags.MODEL[engine.kind])
    says = f"no event of a computed probe has arrived within {within}"
    return Finding("events", Status.fail, says, flags.EVENTS[engine.kind])


def check_tokenizer(texts: Texts) -> Finding:
    """Do the local tokenizer's files give the engine's ids?"""
    return _check_texts("tokenizer", texts)


def check_chat_template(texts: Texts) -> Finding:
    """Does the local chat template give the engine's prompt?"""
    return _check_texts("chat_template", texts)


def _check_texts(check: str, texts: Texts) -> Finding:
    if texts.missing:
        return Finding(check, Status.skipped, texts.missing)
    if texts.engine == texts.local:
        return Finding(check, Status.ok, f"{len(texts.engine)} equal tokens on both sides")
    pairs = zip(texts.engine, texts.local, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        at = min(len(texts.engine), len(texts.local))
    says = (
        f"{len(texts.engine)} tokens of the engine, {len(texts.local)} here; "
        f"they differ from token {at} on"
    )
    return Finding(check, Status.fail, says, flags.TOKENIZER)


def check_names(ranks: Sequence[WorkerAnswer]) -> Finding:
    """Do all workers of the model name blocks alike? What one has, no other finds otherwise."""
    named = {rank.rank: _naming(rank) for rank in ranks if rank.block_tokens}
    if len(set(named.values())) > 1:
        shown = ", ".join(f"rank {rank}: {says}" for rank, says in named.items())
        return Finding("block_names", Status.fail, f"its ranks differ: {shown}", flags.NAMES)
    own = next(iter(named.values()), "not known yet")
    if differ := sorted({each for rank in ranks for each in rank.names_differ}):
        says = f"it names blocks by {own}; others do not: {'; '.join(differ)}"
        return Finding("block_names", Status.fail, says, flags.NAMES)
    return Finding("block_names", Status.ok, f"all workers of its model name blocks by {own}")


def _naming(rank: WorkerAnswer) -> str:
    ahead = f", lookahead {rank.lookahead_tokens}" if rank.lookahead_tokens else ""
    return f"{rank.block_tokens} tokens, {rank.hash_algorithm}{ahead}"


def check_overlap(
    cold: Probe, warm: Probe, engine: ProbedFacts, rank: WorkerAnswer | None = None
) -> Finding:
    """Does the engine reuse as much as the router predicts, of an unknown and of a known prompt?"""
    dropped = None if rank is None else _dropped_blocks((cold, warm), rank)
    if rank is None or dropped is None:
        return _check_probes("overlap", (cold, warm), engine, flags.EVENTS[engine.kind])
    told = rank.num_unreusable_trailing_blocks
    says = (
        f"of {warm.prompt_tokens} tokens the router predicted {warm.predicted_tokens}, the engine "
        f"reused {warm.reported_tokens}: it computes the last {dropped} matched blocks again, "
        f"configured are {told}"
    )
    return Finding("overlap", Status.fail, says, flags.UNREUSABLE[engine.kind].format(dropped))


def _dropped_blocks(probes: Sequence[Probe], rank: WorkerAnswer) -> int | None:
    """Return how many matched blocks the engine drops; None if as configured, or unclear.

    Only whole blocks less or more, in every probe in which anything was predicted, look so; and one
    that has computed a prompt itself has the blocks that its events say.
    """
    block_tokens, told = rank.block_tokens, rank.num_unreusable_trailing_blocks
    found = set()
    for probe in probes:
        if probe.refused or (probe.predicted_tokens and probe.reported_tokens is None):
            return None
        more = probe.predicted_tokens - (probe.reported_tokens or 0)
        if not probe.predicted_tokens and not more:
            continue
        if not block_tokens or more % block_tokens or abs(more) > block_tokens:
            return None
        found.add(more // block_tokens)
    dropped = told + found.pop() if len(found) == 1 else told
    return dropped if 0 <= dropped != told else None


def check_salt(cold: Probe, warm: Probe, engine: ProbedFacts) -> Finding:
    """The same with a cache_salt, of a prompt that is known without one."""
    return _check_probes("cache_salt", (cold, warm), engine, flags.SALT[engine.kind])


def check_chat(
    probe: Probe, block_tokens: int, engine: ProbedFacts, unreusable_blocks: int = 0
) -> Finding:
    """Does a conversation come out as the tokens that its engine tells others that it is?"""
    # The last token is computed in any case, and with it its block.
    whole = max((probe.prompt_tokens - 1) // block_tokens - unreusable_blocks, 0)
    reusable = whole * block_tokens
    probe = replace(probe, predicted_tokens=min(probe.predicted_tokens, reusable))
    return _check_probes("chat", (probe,), engine, flags.TOKENIZER)


def _check_probes(check: str, probes: Sequence[Probe], engine: ProbedFacts, miss: str) -> Finding:
    refused = next((probe.refused for probe in probes if probe.refused), "")
    if refused:
        return Finding(check, Status.skipped, f"the engine refused the probe: {refused}")
    # An engine that had nothing cached may leave it out; later ones say how much they had.
    if probes[-1].reported_tokens is None:
        says = "the engine does not report cached tokens"
        return Finding(check, Status.warn, says, flags.CACHED_TOKENS[engine.kind])
    for probe in probes:
        reported = probe.reported_tokens or 0
        told = (
            f"of {probe.prompt_tokens} tokens the router predicted {probe.predicted_tokens}, "
            f"the engine reused {reported}"
        )
        if probe.predicted_tokens == 0 and reported:
            return Finding(check, Status.fail, f"silent miss: {told}", miss)
        if probe.predicted_tokens < reported:
            return Finding(check, Status.fail, f"known too little: {told}", miss)
        if probe.predicted_tokens > reported:
            says = f"believed too much: {told}"
            return Finding(check, Status.fail, says, flags.PREFIX_CACHING[engine.kind])
    equal = " and ".join(str(probe.predicted_tokens) for probe in probes)
    return Finding(check, Status.ok, f"{equal} tokens predicted and reused")


def check_adapters(ranks: Sequence[WorkerAnswer], engine: ProbedFacts) -> Finding:
    """Are the engine's LoRA adapters those that requests can be routed for?"""
    told = {name for rank in ranks for name in rank.adapters}
    if told == set(engine.adapters):
        says = _names(sorted(told)) if told else "none on both sides"
        return Finding("adapters", Status.ok, says)
    change = flags.ADAPTERS[engine.kind]
    if missing := sorted(set(engine.adapters) - told):
        says = f"the router does not know {_names(missing)}: requests for it are refused"
        return Finding("adapters", Status.fail, says, change)
    gone = _names(sorted(told - set(engine.adapters)))
    return Finding("adapters", Status.fail, f"the engine does not serve {gone}", change)


def _names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
