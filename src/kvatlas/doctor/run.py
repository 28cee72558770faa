"""Asks engine and router what the checks need, and tells each finding as it comes."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import SystemRandom

from msgspec import Struct

from kvatlas.doctor import checks
from kvatlas.doctor.checks import Finding, Status
from kvatlas.doctor.clients import EngineClient, RouterClient, doctor_session
from kvatlas.doctor.engine_events import Heard, listening
from kvatlas.doctor.facts import Arrival, Probe, ProbedFacts, Texts
from kvatlas.doctor.local_text import LocalTokenizer
from kvatlas.router.answers import WorkerAnswer
from kvatlas.schemas.errors import KeyRefused, NoAnswer
from kvatlas.schemas.hashing import MAX_BLOCK_TOKENS

#: a probe is at least so many tokens, and at least two blocks: fewer might be known by chance
MIN_PROBE_TOKENS = 32
MIN_PROBE_BLOCKS = 2
#: ids that any vocabulary has and that are seldom special ones
PROBE_IDS = range(16, 240)
POLL_SECONDS = 0.05

PROBE_TEXT = "t1 t2 t3 Zwölf Boxkämpfer,\n\tjagen  Viktor: 3.14159 + 2^10 = 1_027; 你好 🙂 <s> </s>"

Tell = Callable[[Finding], None]


class DoctorOptions(Struct, frozen=True, kw_only=True):
    """Whom to look at, and how far."""

    engine_url: str
    router_url: str
    worker: str
    #: empty takes the first that the engine serves
    model: str = ""
    #: folder or tokenizer.json; None leaves texts uncompared
    tokenizer: Path | None = None
    api_key: str = ""
    #: of several data-parallel ranks; None takes the first
    rank: int | None = None
    #: where an engine publishes its own events over ZMQ; empty leaves its hashes unseen
    events_endpoint: str = ""
    #: how long a computed prompt may take to be known
    wait_seconds: float = 10.0


async def run_doctor(options: DoctorOptions, tell: Tell) -> list[Finding]:
    """Return all findings; each is told as soon as it is there. Raises InvalidSetting."""
    findings: list[Finding] = []

    def found(*news: Finding) -> None:
        for finding in news:
            findings.append(finding)
            tell(finding)

    local = None if options.tokenizer is None else LocalTokenizer(options.tokenizer)
    async with doctor_session() as session:
        asked = EngineClient(session, options.engine_url.rstrip("/"), options.api_key)
        router = RouterClient(session, options.router_url.rstrip("/"))
        try:
            engine = await asked.facts()
        except NoAnswer as error:
            flag = "--api-key" if isinstance(error, KeyRefused) else "--engine-url"
            found(checks.no_answer("engine", str(error), f"{flag} of the doctor"))
            return findings
        found(checks.check_engine(engine))
        try:
            workers = await router.workers()
        except NoAnswer as error:
            found(checks.no_answer("router", str(error), "--router-url of the doctor"))
            return findings
        found(checks.check_router(workers))
        ranks = [view for view in workers.workers if view.worker == options.worker]
        model = options.model or next(iter(engine.models), "")
        known = [view.worker for view in workers.workers]
        found(checks.check_worker(options.worker, ranks, known))
        found(checks.check_prefix_caching(engine))
        found(*await _texts(asked, model, local))
        if not ranks:
            return findings
        found(checks.check_url(ranks, asked.url))
        named = checks.check_model(model, ranks, engine)
        block_size = checks.check_block_size(ranks, engine)
        found(named, checks.check_adapters(ranks, engine), block_size, checks.check_names(ranks))
        if named.status is Status.fail:
            return findings
        view = _view(ranks, options.rank)
        if not 1 <= _block_tokens(engine, view) <= MAX_BLOCK_TOKENS:
            found(checks.unknown_block_size())
            return findings
        try:
            rank = view.rank if len(ranks) > 1 else None
            probed = EngineClient(session, asked.url, options.api_key, rank)
            async with listening(options.events_endpoint) as heard:
                await _Probing(options, model, engine, probed, router, view, heard).run(
                    block_size, found
                )
        except NoAnswer as error:
            found(checks.no_answer("probe", str(error), "see the log of the server"))
    return findings


def _block_tokens(engine: ProbedFacts, view: WorkerAnswer) -> int:
    """Return how long a probe's blocks are; the worker says 0 before it has introduced itself."""
    return engine.block_tokens or view.block_tokens


def _view(ranks: Sequence[WorkerAnswer], rank: int | None) -> WorkerAnswer:
    chosen = next((view for view in ranks if view.rank == rank), None)
    if chosen is None:
        chosen = min(ranks, key=lambda view: view.rank)
    return chosen


class _Probing:
    """Prompts of random tokens, asked for at the router and served by the engine."""

    def __init__(
        self,
        options: DoctorOptions,
        model: str,
        engine: ProbedFacts,
        client: EngineClient,
        router: RouterClient,
        view: WorkerAnswer,
        heard: Heard,
    ) -> None:
        self._options, self._model, self._engine = options, model, engine
        self._client, self._router, self._view, self._heard = client, router, view, heard
        self._random = SystemRandom()
        block_tokens = _block_tokens(engine, view)
        num_blocks = max(MIN_PROBE_BLOCKS, -(-MIN_PROBE_TOKENS // block_tokens))
        # equal names need equal tokens behind the last block, and some engines drop blocks there
        num_blocks += view.num_unreusable_trailing_blocks
        self._shared = self._tokens(num_blocks * block_tokens + view.lookahead_tokens)
        #: the last token is computed in any case: it must not cost a block
        self._tail_tokens = max(block_tokens // 2, 1)

    async def run(self, block_size: Finding, found: Callable[..., None]) -> None:
        prompt = self._prompt()
        cold = await self._probe(prompt)
        again = self._prompt()
        arrival = await self._arrival(again, None)
        warm = await self._probe(again)
        found(checks.check_events(arrival, self._engine, block_size))
        seen = self._heard.first_hash(str(self._engine.kind), prompt)
        found(checks.check_hashing(self._engine, seen, os.environ.get("PYTHONHASHSEED")))
        overlap = checks.check_overlap(cold, warm, self._engine, self._view)
        found(overlap)
        if overlap.status is not Status.ok:
            for check in ("cache_salt", "chat"):
                found(Finding(check, Status.skipped, "overlap has to agree first"))
            return
        salt = self._random.randbytes(16).hex()
        cold = await self._probe(self._prompt(), salt)
        again = self._prompt()
        await self._arrival(again, salt)
        warm = await self._probe(again, salt)
        found(checks.check_salt(cold, warm, self._engine), await self._chat())

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(PROBE_IDS, k=count)

    def _prompt(self) -> list[int]:
        return self._shared + self._tokens(self._tail_tokens)

    async def _match(self, prompt: Sequence[int], salt: str | None) -> int:
        return await self._router.match(
            self._model, prompt, self._view.worker, self._view.rank, salt
        )

    async def _probe(self, prompt: Sequence[int], salt: str | None = None) -> Probe:
        predicted = await self._match(prompt, salt)
        done = await self._client.complete(self._model, prompt, salt)
        return Probe(len(prompt), predicted, done.reported_tokens, done.refused)

    async def _arrival(self, prompt: Sequence[int], salt: str | None) -> Arrival:
        """Wait until the router knows the blocks that all probes share, or for long enough."""
        block_tokens = self._view.block_tokens or 1
        num_named = (len(self._shared) - self._view.lookahead_tokens) // block_tokens
        num_expected = max(num_named - self._view.num_unreusable_trailing_blocks, 0)
        expected = num_expected * block_tokens
        started = time.monotonic()
        while True:
            matched = await self._match(prompt, salt)
            waited = time.monotonic() - started
            if matched >= expected or waited > self._options.wait_seconds:
                break
            await asyncio.sleep(POLL_SECONDS)
        has_changed = matched > 0 or await self._has_changed()
        return Arrival(waited, expected, matched, has_changed)

    async def _has_changed(self) -> bool:
        """Whether the worker holds other blocks now than at the beginning."""
        for view in (await self._router.workers()).workers:
            if (view.worker, view.rank) == (self._view.worker, self._view.rank):
                return view.digests != self._view.digests
        return False

    async def _chat(self) -> Finding:
        """Compare a conversation as the engine tokenises it for others and for itself."""
        text = " ".join(f"t{token}" for token in self._shared)
        messages = [{"role": "user", "content": text}]
        tokens = await self._client.tokenize(self._model, messages)
        if tokens is None:
            says = "the engine tokenises no conversations for others"
            return Finding("chat", Status.skipped, says)
        first = await self._client.chat(self._model, messages)
        if first.refused:
            return Finding("chat", Status.skipped, f"the engine refused the probe: {first.refused}")
        await self._arrival(tokens, None)
        predicted = await self._match(tokens, None)
        done = await self._client.chat(self._model, messages)
        probe = Probe(len(tokens), predicted, done.reported_tokens, done.refused)
        block_tokens = self._view.block_tokens or _block_tokens(self._engine, self._view)
        unreusable = self._view.num_unreusable_trailing_blocks
        return checks.check_chat(probe, block_tokens, self._engine, unreusable)


async def _texts(
    client: EngineClient, model: str, local: LocalTokenizer | None
) -> tuple[Finding, Finding]:
    if local is None:
        missing = Texts(missing="no --tokenizer to compare with")
        return checks.check_tokenizer(missing), checks.check_chat_template(missing)
    messages = [{"role": "user", "content": PROBE_TEXT}]
    return (
        checks.check_tokenizer(
            _compared(await client.tokenize(model, PROBE_TEXT), local.encode(PROBE_TEXT))
        ),
        checks.check_chat_template(
            _compared(await client.tokenize(model, messages), local.chat(messages))
        ),
    )


def _compared(engine: tuple[int, ...] | None, local: tuple[int, ...] | str) -> Texts:
    if isinstance(local, str):
        return Texts(missing=local)
    if engine is None:
        return Texts(missing="the engine does not tokenise for others (/tokenize)")
    return Texts(engine, local)
