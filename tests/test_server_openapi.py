"""The OpenAPI document tells the truth: whatever is sent, answers are as it says, and nothing is a 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.result import Ok

from helpers_server import make_server

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_request_makes_the_server_fail_or_answer_otherwise_than_documented() -> None:
    server = make_server(num_blocks=4096, engine={"max_num_seqs": 64})
    check(schemathesis.openapi.from_asgi("/openapi.json", server.app), max_examples=60)
    server.serving.close()


def check(schema: schemathesis.BaseSchema, *, max_examples: int, headers: dict[str, str] | None = None) -> None:
    """Send each operation what its schema allows, and what it forbids."""
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) >= 9
    for operation in operations:
        _check_operation(operation, max_examples, headers)


def _check_operation(operation: schemathesis.APIOperation, max_examples: int, headers: dict[str, str] | None) -> None:
    @given(data=st.data())
    @settings(
        max_examples=max_examples,
        database=None,
        phases=(Phase.generate,),
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    def send(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from([*schemathesis.GenerationMode]))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.call_and_validate(checks=CHECKS, headers=headers)

    send()
