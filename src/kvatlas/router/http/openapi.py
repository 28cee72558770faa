"""The OpenAPI document: FastAPI's for the control routes, the hot ones, and our types."""

from typing import Any, cast

import msgspec
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from kvatlas import __version__
from kvatlas.router.answers import ReportAnswer, RouteAnswer, ScoreAnswer
from kvatlas.router.http.bodies.bodies import (
    OCTETS_TYPE,
    SALT_HEADER,
    PackedScoreBody,
    ScoreBody,
    ScoreQuery,
)
from kvatlas.router.http.bodies.decoding import ReportBody
from kvatlas.router.http.control_api import ANSWERS, PROBLEM_RESPONSE, control_routes
from kvatlas.router.http.hot_routes import DONE, PREFILLED, REPORTS, ROUTE, SCORE
from kvatlas.router.http.problems import Problem
from kvatlas.router.replicas.signals import MAX_DECISION_ID
from kvatlas.router.service import RouterService
from kvatlas.schemas.conditions import Conditions

_REFERENCE = "#/components/schemas/{name}"

#: what the document says of the application
ABOUT: dict[str, str] = {
    "title": "kvatlas router",
    "version": __version__,
    "summary": "Which worker holds how much of a prompt, and where a request goes",
}


def document(decides: bool) -> dict[str, Any]:
    """Return the document of an application that is not there yet."""
    app = FastAPI(title=ABOUT["title"], version=ABOUT["version"], summary=ABOUT["summary"])
    nobody = cast(RouterService, None)  # the routes are described, none is asked
    app.include_router(control_routes(nobody, CollectorRegistry(), None, Conditions()))
    return complete(app.openapi(), decides)


def complete(document: dict[str, Any], decides: bool) -> dict[str, Any]:
    """Return FastAPI's document with the hot routes, and problems where it has its own errors."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"].setdefault("400", PROBLEM_RESPONSE)
    types: tuple[type, ...] = (
        *ANSWERS,
        Problem,
        ScoreBody,
        PackedScoreBody,
        ScoreAnswer,
        RouteAnswer,
        ReportBody,
        ReportAnswer,
    )
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    document["components"] = {"schemas": schemas}
    scoring = _scoring("Score the candidates of a prompt", ScoreAnswer)
    document["paths"][SCORE] = {"post": scoring}
    if not decides:
        return document
    document["paths"] |= {
        ROUTE: {"post": _scoring("Choose a worker for a prompt", RouteAnswer)},
        f"{REPORTS}{{decision_id}}{PREFILLED}": {"post": _reporting("A prefill has ended")},
        f"{REPORTS}{{decision_id}}{DONE}": {"post": _reporting("A request has ended")},
    }
    return document


def _scoring(summary: str, answer: type) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": _beside_octets(),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _ref(ScoreBody)},
                "application/x-msgpack": {"schema": _ref(PackedScoreBody)},
                OCTETS_TYPE: {
                    "schema": {
                        "type": "string",
                        "format": "binary",
                        "description": "token ids as u32, little-endian; with prompt=block_hashes "
                        "hashes of full blocks, 16 bytes each; the rest is in the query",
                    }
                },
            },
        },
        "responses": _responses(answer, (400, 404, 413, 415, 503)),
    }


def _beside_octets() -> list[dict[str, Any]]:
    """Return what says the rest where the body is a prompt only; refused beside any other body."""
    text = f"beside {OCTETS_TYPE} only"
    schema = msgspec.json.schema(ScoreQuery)
    fields = schema["$defs"][ScoreQuery.__name__]["properties"]
    query = [
        {"name": name, "in": "query", "description": text, "schema": _without_null(field)}
        for name, field in fields.items()
    ]
    salt = {"type": "string", "maxLength": 4096}
    return [*query, {"name": SALT_HEADER, "in": "header", "description": text, "schema": salt}]


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter, which is left out instead of being null."""
    found: dict[str, Any] = next(
        (each for each in field.get("anyOf", []) if each.get("type") != "null"), field
    )
    return found


def _reporting(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": [
            {
                "name": "decision_id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1, "maxLength": MAX_DECISION_ID},
            }
        ],
        "requestBody": {
            "required": False,
            "content": {
                "application/json": {"schema": _ref(ReportBody)},
                "application/x-msgpack": {"schema": _ref(ReportBody)},
            },
        },
        "responses": _responses(ReportAnswer, (400, 404, 413, 415)),
    }


def _responses(answer: type, problems: tuple[int, ...]) -> dict[str, Any]:
    good = {"description": "OK", "content": {"application/json": {"schema": _ref(answer)}}}
    return {"200": good} | {str(status): PROBLEM_RESPONSE for status in problems}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
