"""The HTTP surface against its own OpenAPI document, with generated requests."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from kvatlas.router.http.app import create_app
from testkit.fleet import Fleet, a_prompt, a_request

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
PLAIN = ["/", "/healthz", "/readyz", "/metrics", "/v1/workers", "/v1/index/stats"]
WITH_PARAMETERS = ["/v1/index/tree", "/v1/decisions/{decision_id}"]
WITH_BODY = [
    "/v1/score",
    "/v1/route",
    "/v1/requests/{decision_id}/prefilled",
    "/v1/requests/{decision_id}/done",
]
OPERATIONS = [
    *(("GET", path, GenerationMode.POSITIVE) for path in [*PLAIN, *WITH_PARAMETERS]),
    *(("GET", path, GenerationMode.NEGATIVE) for path in WITH_PARAMETERS),
    *(("POST", path, mode) for path in WITH_BODY for mode in GenerationMode),
]


@pytest.fixture(scope="module")
def document() -> Any:
    fleet = Fleet()
    fleet.up("w1")
    fleet.holds("w1", a_prompt(64))
    router = fleet.router()
    router.route(a_request(a_prompt(64)))
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(router))


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_a_route_keeps_to_its_document(document: Any, method: str, path: str, mode: Any) -> None:
    operation = document[path][method]
    # A schema cannot say all that a prompt has to be: one of two fields, integers without a point.
    excluded = [checks.positive_data_acceptance] if method == "POST" else []

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, suppress_health_check=SLOW)
    def keeps_to_it(case: Any) -> None:
        case.call_and_validate(excluded_checks=excluded)

    keeps_to_it()
