"""OpenAI's error body, and which status, type and code each of our errors gets in it."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from vllm_metal.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineUnavailable,
    InsufficientMemory,
    InvalidRequest,
    MetalError,
    ModelNotFound,
    PromptTooLong,
    ResponseNotFound,
)

#: What requests said may stand in a message or in the name of a field.
_MAX_LENGTH = 1000


class ErrorKind(NamedTuple):
    status: int
    type: str
    code: str | None


KINDS: dict[type[MetalError], ErrorKind] = {
    InvalidRequest: ErrorKind(400, "invalid_request_error", None),
    PromptTooLong: ErrorKind(400, "invalid_request_error", PromptTooLong.code),
    ResponseNotFound: ErrorKind(404, "invalid_request_error", ResponseNotFound.code),
    ModelNotFound: ErrorKind(404, "invalid_request_error", "model_not_found"),
    DeadlineExceeded: ErrorKind(408, "timeout_error", "deadline_exceeded"),
    EngineBusy: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    EngineUnavailable: ErrorKind(503, "server_error", "service_unavailable"),
    InsufficientMemory: ErrorKind(507, "server_error", "insufficient_memory"),
    MetalError: ErrorKind(500, "server_error", "internal_error"),
}

# Errors of HTTP itself.
HTTP_CODES: dict[int, str] = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    error: ErrorDetail


def kind(exc: MetalError) -> ErrorKind:
    return next(KINDS[cls] for cls in type(exc).__mro__ if cls in KINDS)


def body(exc: MetalError) -> ErrorBody:
    message = _shortened(exc.message)
    if exc.hint:
        message = f"{message}; {exc.hint}"
    _, error_type, code = kind(exc)
    param = getattr(exc, "param", None)
    return ErrorBody(ErrorDetail(message, error_type, param and _shortened(param), code))


def http_body(status: int, message: str) -> ErrorBody:
    error_type = "invalid_request_error" if status < 500 else "server_error"
    return ErrorBody(ErrorDetail(_shortened(message), error_type, None, HTTP_CODES.get(status)))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"
