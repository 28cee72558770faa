"""The control API: what people, load balancers and dashboards ask. All of it only reads."""

import functools
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.routing import APIRoute
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from kvatlas import __version__
from kvatlas.indexer.reader import IndexStats, InstanceView, TreeRun
from kvatlas.router.answers import (
    DigestAnswer,
    IndexAge,
    LoadAnswer,
    ReplacedAnswer,
    WorkerAnswer,
    WorkersAnswer,
    encoded,
)
from kvatlas.router.decision.loads import InstanceLoad
from kvatlas.router.http.bodies.bodies import refuse_unknown
from kvatlas.router.http.exposition import Exposition, Slices, in_slices
from kvatlas.router.http.problems import MEDIA_TYPE, headers_of, problem
from kvatlas.router.http.trees import Trees
from kvatlas.router.replicas.replicas import RouterReplicas
from kvatlas.router.replicas.signals import MAX_DECISION_ID
from kvatlas.router.service import RouterService
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.errors import UnknownDecision
from kvatlas.schemas.fleet import NamespaceDescriptor, Trust, WorkerInfo
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Decision

#: the page loads nothing from elsewhere and runs nothing that is not in it
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


#: workers with other names for blocks that an answer lists
MAX_UNLIKE = 8


class Health(Struct, frozen=True):
    """The process runs."""

    status: str
    version: str


class Readiness(Struct, frozen=True):
    """The index has caught up with what the stream held when it started.

    `conditions` are what is wrong while answers go on: name -> reason.
    """

    status: str
    stream_sequence: int
    index_age_ms: float
    connected: bool
    conditions: dict[str, str]


class StatsAnswer(Struct, frozen=True):
    """Counters of the index, and how far it may be believed."""

    index: IndexStats
    rejected_total: int
    #: equal for readers at the same stream sequence, replays included
    state_digest: str
    #: from the broker's store to the index, of the latest messages; empty before any
    convergence_ms: dict[str, float]
    sequences_behind: int
    stream_sequence: int
    index_age_ms: float
    connected: bool


class TreeNodeAnswer(Struct, frozen=True):
    """A run of blocks without a branch; `hash_key` is the index key of its first block, in hex."""

    hash_key: str
    depth: int
    num_blocks: int
    holders: tuple[InstanceId, ...]
    num_pairs: int
    num_children: int
    children: tuple["TreeNodeAnswer", ...]


class TreeAnswer(Struct, frozen=True):
    """The top of the radix tree, the hottest first."""

    runs: tuple[TreeNodeAnswer, ...]
    stream_sequence: int


#: what the routes answer, for the OpenAPI document
ANSWERS = (Health, Readiness, WorkersAnswer, StatsAnswer, TreeAnswer, Decision)


def control_routes(
    service: RouterService,
    registry: CollectorRegistry,
    replicas: RouterReplicas | None,
    conditions: Conditions,
) -> APIRouter:
    """Return the routes of the control API; what router replicas decided is found through them."""
    exposition = Exposition(registry)

    @functools.cache
    def trees() -> Trees:
        # made when it is first asked for: the OpenAPI document is also made without a service
        return Trees(service.index, service.feed.still)

    routes = APIRouter(default_response_class=Response, dependencies=[Depends(known_query)])

    @routes.get("/", summary="Live page", responses={200: {"content": {"text/html": {}}}})
    async def page() -> Response:
        return Response(
            (files("kvatlas.router.http") / "page.html").read_bytes(),
            media_type="text/html",
            headers={"content-security-policy": PAGE_POLICY, "cache-control": "no-store"},
        )

    @routes.get("/healthz", summary="The process runs", responses=_json_of(Health))
    async def healthz() -> Response:
        return _json(Health("ok", __version__))

    @routes.get(
        "/readyz", summary="The index has caught up", responses=_json_of(Readiness, problems=[503])
    )
    async def readyz() -> Response:
        feed = service.feed
        if feed.is_ready and not conditions.why_not_ready:
            age = _age(service)
            return _json(
                Readiness(
                    "ready",
                    age.stream_sequence,
                    age.index_age_ms,
                    age.connected,
                    conditions.reasons,
                )
            )
        catching_up = [] if feed.is_ready else [feed.why_not_ready]
        why = problem(503, "; ".join([*catching_up, *conditions.reasons.values()]))
        return Response(why.encoded(), 503, headers_of(503), MEDIA_TYPE)

    @routes.get("/metrics", summary="Prometheus metrics", responses=_text())
    async def metrics() -> Response:
        return Response(await exposition.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @routes.get("/v1/workers", summary="All workers", responses=_json_of(WorkersAnswer))
    async def workers() -> Response:
        # a fleet of thousands takes longer than others should wait, see exposition.py
        views, age = await _views_of_one_sequence(service)
        naming, pause, broker_ns = Namings(), Slices(), service.feed.broker_ns()
        for view in views:
            naming.add(view)
            await pause.when_due()
        parts = []
        for view in views:
            parts.append(msgspec.json.encode(_worker(service, view, naming, broker_ns)))
            await pause.when_due()
        around = WorkersAnswer((), age.stream_sequence, age.index_age_ms, age.connected)
        body = encoded(around).replace(b"[]", b"[" + b",".join(parts) + b"]", 1)
        return Response(body, media_type="application/json")

    @routes.get("/v1/index/stats", summary="Counters of the index", responses=_json_of(StatsAnswer))
    async def stats() -> Response:
        async with service.feed.still():
            digest = await in_slices(service.index.digest_steps())
            age, behind = _age(service), service.feed.lag.stream_sequences
            index = service.index.stats()
        return _json(
            StatsAnswer(
                index,
                index.rejected_total,
                digest,
                service.feed.convergence_ms(),
                behind,
                age.stream_sequence,
                age.index_age_ms,
                age.connected,
            )
        )

    @routes.get(
        "/v1/index/tree",
        summary="The top of the radix tree",
        responses=_json_of(TreeAnswer, problems=[400]),
    )
    async def tree(
        depth: Annotated[int, Query(ge=1, le=16)] = 3,
        width: Annotated[int, Query(ge=1, le=64)] = 8,
    ) -> Response:
        stream_sequence, runs = await trees().view(depth, width)
        return _json(TreeAnswer(tuple(map(_node, runs)), stream_sequence))

    @routes.get(
        "/v1/decisions/{decision_id}",
        summary="A recent decision with everything that it was made of",
        responses=_json_of(Decision, problems=[404]),
    )
    async def decision(
        decision_id: Annotated[str, Path(max_length=MAX_DECISION_ID)],
    ) -> Response:
        try:
            return _json(service.decision(decision_id))
        except UnknownDecision:
            if replicas is None:
                raise
            return _json(await replicas.decision(decision_id))

    return routes


async def known_query(request: Request) -> None:
    """Refuse what a route of the API does not know in a query, instead of ignoring it.

    Probes, scrapers and browsers put things of their own behind the other ones.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if not route.path.startswith("/v1/"):
        return
    known = [each.alias for each in route.dependant.query_params]
    refuse_unknown(request.scope["query_string"], known)


def _age(service: RouterService) -> IndexAge:
    lag = service.feed.lag
    return IndexAge(
        service.index.stream_sequence, 1000 * lag.seconds_since_contact, service.feed.connected
    )


class Namings:
    """How instances name the blocks of each model; equal tokens match only where that is equal.

    Those that are gone name none. `unlike` lists at most MAX_UNLIKE of those that differ.
    """

    def __init__(self) -> None:
        #: model of the namespaces -> descriptor -> the first instances that name blocks so
        self._by_model: dict[str, dict[NamespaceDescriptor, list[InstanceId]]] = {}

    def add(self, view: InstanceView) -> None:
        """Take an instance in. O(1)."""
        if view.info is not None and view.trust is not Trust.gone:
            of_model = self._by_model.setdefault(view.info.model, {})
            instances = of_model.setdefault(view.info.descriptor, [])
            if len(instances) < MAX_UNLIKE:
                instances.append(view.instance)

    def unlike(self, info: WorkerInfo) -> list[str]:
        """Return instances of the same model that name blocks otherwise, and how."""
        found = [
            f"{instance}: {descriptor}"
            for descriptor, instances in self._by_model.get(info.model, {}).items()
            if descriptor != info.descriptor
            for instance in instances
        ]
        return found[:MAX_UNLIKE]


async def _views_of_one_sequence(service: RouterService) -> tuple[list[InstanceView], IndexAge]:
    """Return all instances and the stream sequence that all of them are of.

    Gathered in slices while the fold stands still. An index that another process writes does not
    stand still; its views are made already, and listing them takes no time to speak of.
    """
    pause = Slices()
    async with service.feed.still():
        age, views = _age(service), list[InstanceView]()
        for name in service.index.names():
            if (view := service.index.instance(name)) is not None:
                views.append(view)
            await pause.when_due()
        while age.stream_sequence != service.index.stream_sequence:
            age, views = _age(service), service.index.instances()
    return views, age


def _worker(
    service: RouterService, view: InstanceView, naming: Namings, broker_ns: int
) -> WorkerAnswer:
    info, load = view.info, service.load_shown(view)
    return WorkerAnswer(
        worker=view.instance.worker,
        rank=view.instance.rank,
        epoch=view.epoch,
        seq=view.seq,
        trust=view.trust,
        trust_reasons=(*view.trust_reasons, *filter(None, [service.overdue_at(view.instance)])),
        num_blocks=view.num_blocks,
        blocks_by_tier={tier.name: d.count for tier, d in view.digests.items() if d.count},
        digests={
            tier.name: DigestAnswer(digest.count, f"{digest.xor:016x}")
            for tier, digest in view.digests.items()
            if digest.count
        },
        base_url=info.base_url if info else "",
        models=info.models if info else (),
        adapters=info.adapters if info else {},
        block_tokens=info.descriptor.block_tokens if info else 0,
        hash_algorithm=info.descriptor.algorithm if info else "",
        role=info.role if info else "",
        last_event_age_ms=_age_ms(view.last_event_ns, broker_ns),
        load=None if load is None else _load(load),
        replaced=_replaced(view, broker_ns),
        muted_namespaces={root.hex(): why for root, why in sorted(view.muted.items())},
        lookahead_tokens=info.descriptor.lookahead_tokens if info else 0,
        num_unreusable_trailing_blocks=info.num_unreusable_trailing_blocks if info else 0,
        names_differ=() if info is None else tuple(naming.unlike(info)),
    )


def _replaced(view: InstanceView, broker_ns: int) -> ReplacedAnswer | None:
    was = view.replaced
    if was is None:
        return None
    return ReplacedAnswer(was.epoch, was.base_url, _age_ms(was.last_event_ns, broker_ns))


def _age_ms(at_ns: int, broker_ns: int) -> float:
    """Return how long ago something was, both by the broker's clock."""
    return max((broker_ns - at_ns) / 1e6, 0.0)


def _load(load: InstanceLoad) -> LoadAnswer:
    return LoadAnswer(
        load.in_flight,
        load.queued_ms,
        load.work_ms,
        1000 / load.compute_ms_per_token,
        1000 / load.pull_ms_per_token,
    )


def _node(run: TreeRun) -> TreeNodeAnswer:
    return TreeNodeAnswer(
        f"{run.hash_key:016x}",
        run.depth,
        run.num_blocks,
        run.holders,
        run.num_pairs,
        run.num_children,
        tuple(_node(child) for child in run.children),
    )


def _json(answer: Struct) -> Response:
    return Response(encoded(answer), media_type="application/json")


def _json_of(answer: type[Struct], problems: list[int] | None = None) -> dict[int | str, Any]:
    reference = {"$ref": f"#/components/schemas/{answer.__name__}"}
    responses: dict[int | str, Any] = {
        200: {"description": "OK", "content": {"application/json": {"schema": reference}}}
    }
    return responses | {status: PROBLEM_RESPONSE for status in problems or []}


def _text() -> dict[int | str, Any]:
    return {200: {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}}


PROBLEM_RESPONSE: dict[str, Any] = {
    "description": "A problem document (RFC 9457)",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
