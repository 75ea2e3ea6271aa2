"""The hub library's many exceptions, told in our own few."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TYPE_CHECKING

from vllm_metal.errors import DownloadError, MetalError, ModelNotFound
from vllm_metal.hub.names import HubSource

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_NEEDS_NO_HUB = "`smollm2`, which needs no hub: `metal serve smollm2`, `metal chat --local smollm2`"


@contextmanager
def in_our_words(source: HubSource) -> Iterator[None]:
    """Raises `ModelNotFound` or `DownloadError` in place of what the hub's library raises in the block."""
    from httpx2 import HTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError, JSONDecodeError) as exc:
        raise _translate(exc, source) from exc


def _translate(exc: Exception, source: HubSource) -> MetalError:
    from httpx2 import TransportError
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # A fall-back to the cache that fails hides the reason behind it.
    for cause in _chain(exc):
        match cause:
            case OfflineModeIsEnabled():
                return DownloadError(
                    f"`{source}` is not on disk, and `HF_HUB_OFFLINE` forbids fetching it",
                    hint=f"unset it, or take {_NEEDS_NO_HUB}",
                )
            case HfHubHTTPError():
                return _refusal(cause, source)
            case TransportError():
                return DownloadError(
                    f"the model hub can't be reached: {_one_line(cause)}",
                    hint=f"check the network, or take {_NEEDS_NO_HUB}",
                    retryable=True,
                )
            case JSONDecodeError():
                return DownloadError(
                    f"`{constants.ENDPOINT}` does not answer as a model hub",
                    hint="check `HF_ENDPOINT`, and whether this network wants you to sign in first",
                    retryable=True,
                )
            case OSError(errno=errno.ENOSPC):
                return DownloadError(
                    f"the disk is full; `{source}` is not complete", hint="free some space and run again"
                )
            case PermissionError() if cause.filename:
                return DownloadError(
                    f"`{cause.filename}` cannot be written: permission denied",
                    hint="set `HF_HOME` to a folder of yours, or change the owner of this one",
                )
    return DownloadError(
        f"the download of `{source}` failed: {_one_line(exc)}",
        hint="run it again: it goes on where it was",
        retryable=True,
    )


def _refusal(exc: HfHubHTTPError, source: HubSource) -> MetalError:
    """What an HTTP status of the hub means for the user."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = exc.response.status_code
    page = f"{constants.ENDPOINT}/{source.repo}"
    match exc:
        case RevisionNotFoundError():
            return ModelNotFound(
                f"`{source.repo}` has no revision `{source.revision or 'main'}`",
                hint=f"see its branches and tags at {page}",
            )
        case GatedRepoError():
            return DownloadError(
                f"`{source.repo}` is given only to users who accepted its licence",
                hint=f"accept it at {page}, then set `HF_TOKEN` to a token of that account",
            )
        case RepositoryNotFoundError():
            return ModelNotFound(
                f"`{source.repo}` is not on the model hub, or is private",
                hint="check the spelling; for a private model set `HF_TOKEN`",
            )
    if status in (401, 403):
        return DownloadError(
            f"the model hub refuses access to `{source.repo}` (HTTP {status})",
            hint=f"check `HF_TOKEN`, and that its account may read {page}",
        )
    if status == 404:
        return ModelNotFound(f"`{source.repo}` is not on the model hub", hint="check the spelling")
    return DownloadError(
        f"the model hub answered HTTP {status} for `{source.repo}`", hint="try again later", retryable=True
    )


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__
