"""Requests made from /openapi.json: none is the server's fault, and every answer is as described.

A few of each, beside somebody else's stream; tests/e2e/test_openapi_fuzz sends many.
"""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS

# Answers are compared with the document; that every odd request is refused is not asked for, because fields
# that nobody knows are ignored.
WANTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
FEW = 4
# Has no end: each example would be waited for until the client has had enough.
ENDLESS = "/dashboard/events"


def settings_for(num_examples):
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check_operations(server, num_examples):
    """Sends examples of every operation that is described."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks = [CHECKS.get_one(name) for name in WANTED]
    num_sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == ENDLESS:
            continue

        @operation_test(operation, num_examples)
        def send(case):
            nonlocal num_sent
            num_sent += 1
            if isinstance(case.body, dict):
                # Bounded work; that long answers end is not the question here.
                for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], 8)
                # Whose queue time is over at once is answered 503, and should be.
                case.body.pop("max_queue_time", None)
                case.body.setdefault("max_tokens", 4)
                case.body.setdefault("max_output_tokens", 4)
            response = case.call(timeout=300)
            case.validate_response(response, checks=checks)

        send()
    return num_sent


def operation_test(operation, num_examples):
    """A Hypothesis test of one operation."""

    def decorate(function):
        return settings_for(num_examples)(given(case=operation.as_strategy())(function))

    return decorate


def test_a_few_of_each(tiny_server, untouched):
    assert check_operations(tiny_server, FEW) > 20
