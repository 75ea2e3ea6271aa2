"""Anthropic's error body, and which type each of our errors gets in it."""

from __future__ import annotations

from msgspec import Struct

from vllm_metal.api import errors
from vllm_metal.errors import MetalError, PromptTooLong

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageErrorDetail(Struct):
    type: str
    message: str


class MessageError(Struct, tag_field="type", tag="error"):
    error: MessageErrorDetail
    request_id: str


def type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def body(exc: MetalError, request_id: str) -> MessageError:
    message = errors.body(exc).error.message
    if isinstance(exc, PromptTooLong):
        # Anthropic's clients know the case by these words, and make the conversation shorter.
        message = f"prompt is too long: {exc.excess or message}"
    return _body(errors.kind(exc).status, message, request_id)


def http_body(status: int, message: str, request_id: str) -> MessageError:
    return _body(status, errors.http_body(status, message).error.message, request_id)


def _body(status: int, message: str, request_id: str) -> MessageError:
    return MessageError(MessageErrorDetail(type_of(status), message), request_id)
