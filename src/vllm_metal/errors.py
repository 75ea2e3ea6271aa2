"""Errors a user can act on. Each carries its own hint; one renderer in `cli/` prints both.

MetalError                    exit 1: the user's to mend
├── ConfigError               a TOML file, flag or environment variable
├── ModelError
│   ├── ModelNotFound         no such model here or on the hub
│   ├── NotAModel             a path that holds no model
│   └── UnsupportedModel      a model this version cannot run
├── DownloadError             network, hub, checksum, disk space
├── SetupError                the venv cannot be made
├── PortInUse
├── ServiceError              launchd refused, or the service did not come up
├── ServerUnreachable         raised by the client side
├── InvalidRequest            HTTP 400; knows the field
│   ├── PromptTooLong
│   └── ResponseNotFound      HTTP 404: no response of the client's by that id
├── EngineBusy                HTTP 429: the queue is full
│   └── RateLimited           this client asks for more than it may
├── DeadlineExceeded          HTTP 408: the request's own time limit
├── EngineUnavailable         HTTP 503: loading, draining or failed
├── InsufficientMemory        HTTP 507: a model larger than the memory it may take
└── EngineError               exit 3, HTTP 500: ours
"""

from __future__ import annotations

from typing import Self


class MetalError(Exception):
    """`message` is one line in the user's words; `hint` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(MetalError):
    pass


class ModelError(MetalError):
    pass


class ModelNotFound(ModelError):
    pass


class NotAModel(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class _RetryableError(MetalError):
    """`retryable` is true when the same call may succeed later: no network, hub down, disk full."""

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable


class DownloadError(_RetryableError):
    pass


class SetupError(_RetryableError):
    pass


class PortInUse(MetalError):
    pass


class ServiceError(MetalError):
    pass


class ServerUnreachable(MetalError):
    pass


class InvalidRequest(MetalError):
    """A request that can never be served as it stands. `param` is the JSON path of the field."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class PromptTooLong(InvalidRequest):
    """`excess` is what the prompt has and what the model takes, as a comparison."""

    code = "context_length_exceeded"
    excess: str | None = None

    @classmethod
    def of_size(cls, size: str, max_tokens: int, *, param: str) -> Self:
        # Some clients know the case by the first words, and go on with another model or a shorter prompt.
        exc = cls(
            f"this model's maximum context length is {max_tokens} tokens, prompt and answer together; "
            f"the prompt has {size}",
            param=param,
        )
        exc.excess = f"{size} > {max_tokens} maximum"
        return exc


class ResponseNotFound(InvalidRequest):
    code = "response_not_found"


class EngineBusy(MetalError):
    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(EngineBusy):
    pass


class DeadlineExceeded(MetalError):
    """`why` says what the request was waiting for, where that is known."""

    def __init__(self, why: str | None = None) -> None:
        message = "the request did not end within its time limit"
        super().__init__(
            f"{message}: {why}" if why else message,
            hint="give it a longer `timeout`, or raise `server.request_timeout` for those that bring none",
        )


class EngineUnavailable(MetalError):
    def __init__(self, message: str, *, hint: str | None = None, retry_after_s: int = 5) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class InsufficientMemory(MetalError):
    pass


class EngineError(MetalError):
    exit_code = 3
