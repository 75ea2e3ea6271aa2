"""Every error of ours has a status and a body in OpenAI's shape."""

from __future__ import annotations

import msgspec
import pytest

from vllm_metal import errors as metal_errors
from vllm_metal.api import errors
from vllm_metal.errors import MetalError


@pytest.mark.parametrize(
    ("exc", "status", "error"),
    [
        (
            metal_errors.InvalidRequest("`n` is not supported yet", param="n"),
            400,
            {
                "message": "`n` is not supported yet",
                "type": "invalid_request_error",
                "param": "n",
                "code": None,
            },
        ),
        (
            metal_errors.PromptTooLong("too long", param="messages"),
            400,
            {
                "message": "too long",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "context_length_exceeded",
            },
        ),
        (
            metal_errors.ModelNotFound("no model `x`", hint="ask for another"),
            404,
            {
                "message": "no model `x`; ask for another",
                "type": "invalid_request_error",
                "param": None,
                "code": "model_not_found",
            },
        ),
        (
            metal_errors.EngineBusy("full"),
            429,
            {"message": "full", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"},
        ),
        (
            metal_errors.EngineUnavailable("loading"),
            503,
            {"message": "loading", "type": "server_error", "param": None, "code": "service_unavailable"},
        ),
        (
            metal_errors.EngineError("broken"),
            500,
            {"message": "broken", "type": "server_error", "param": None, "code": "internal_error"},
        ),
    ],
)
def test_status_and_body(exc: MetalError, status: int, error: dict[str, object]) -> None:
    assert errors.kind(exc).status == status
    assert msgspec.to_builtins(errors.body(exc)) == {"error": error}


def test_every_type_has_a_kind() -> None:
    def all_types(base: type[MetalError]) -> list[type[MetalError]]:
        return [base, *(found for child in base.__subclasses__() for found in all_types(child))]

    for error_type in all_types(MetalError):
        assert 400 <= errors.kind(error_type.__new__(error_type)).status < 600


def test_errors_of_http_have_codes() -> None:
    assert msgspec.to_builtins(errors.http_body(405, "no")) == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": None,
            "code": "method_not_allowed",
        }
    }


@pytest.mark.parametrize(
    "exc",
    [
        metal_errors.ModelNotFound("no model `" + "x" * 10**6, hint="ask for another"),
        metal_errors.InvalidRequest("no", param="x" * 10**6, hint="ask for another"),
    ],
)
def test_what_a_request_said_does_not_come_back_at_length(exc: MetalError) -> None:
    body = errors.body(exc)
    assert len(msgspec.json.encode(body)) < 2000
    assert body.error.message.endswith("; ask for another")
