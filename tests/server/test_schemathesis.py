"""The server against its own description: whatever the schemas allow or forbid, no surprises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from localrt.server.app import ROUTES
from localrt.server.openapi import describe
from tests.server.conftest import Running

schemathesis = pytest.importorskip("schemathesis", reason="needs the test extra")

from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

# A field may be right and its text too long, its schema no grammar, its model another.
EXCLUDED = [positive_data_acceptance]

schema = schemathesis.openapi.from_dict(describe(ROUTES))


@schema.parametrize()
@settings(
    max_examples=25,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
def test_openapi(case: Any, server: Running) -> None:
    if isinstance(case.body, dict) and case.body.get("n") in range(3, 1025):
        case.body["n"] = 2  # many answers prove nothing more
    texts = case.body.get("input") if isinstance(case.body, dict) else None
    if isinstance(texts, list) and len(texts) in range(1000, 16385):
        del texts[8:]  # nor do many vectors
    case.call_and_validate(base_url=server.url, excluded_checks=EXCLUDED, timeout=120)
