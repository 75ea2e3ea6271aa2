"""Downloads of public models from ModelScope."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from vllm_metal.errors import DownloadError, ModelNotFound
from vllm_metal.hub import transfer
from vllm_metal.hub.disk import require_space
from vllm_metal.hub.names import HubSource
from vllm_metal.hub.progress import FileProgress, OnProgress, PullProgress
from vllm_metal.hub.repository import Repository, files_of_model
from vllm_metal.hub.transfer import RemoteFile

_DEFAULT_DOMAIN = "www.modelscope.cn"
_DEFAULT_REVISION = "master"
_CONFIG = "config.json"
_TIMEOUT_S = 30.0


def look_up(source: HubSource, on_progress: OnProgress) -> Repository:
    """Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError`."""
    on_progress(PullProgress(f"looking up `{source}` on ModelScope"))
    with _in_our_words(source):
        listed = _get(_url(source, "repo/files", Recursive="true"))
        try:
            files = {file["Path"]: file for file in listed["Data"]["Files"] if file["Type"] == "blob"}
            sizes = files_of_model(source, {path: int(file["Size"]) for path, file in files.items()})
            sha256 = {path: str(files[path]["Sha256"]) for path in sizes}
        except (KeyError, TypeError, ValueError) as exc:
            raise DownloadError(
                "ModelScope's list of files is not as it was known to be",
                hint="unset `VLLM_USE_MODELSCOPE`, or update",
            ) from exc
        config = _get(_url(source, "repo", FilePath=_CONFIG)) if _CONFIG in sizes else None
    return Repository(
        source=source,
        commit=source.revision or _DEFAULT_REVISION,
        sizes=sizes,
        sha256=sha256,
        config=config,
        architecture=None,
    )


def download(repository: Repository, folder: Path, on_progress: OnProgress) -> None:
    """Into a folder of our own. Raises as `look_up` does."""
    source = repository.source
    files = [
        RemoteFile(
            name=name,
            url=_url(source, "repo", FilePath=name),
            size_bytes=size,
            sha256=repository.sha256[name],
            path=folder / name,
        )
        for name, size in repository.sizes.items()
    ]
    total_bytes = sum(repository.sizes.values())
    require_space(folder, total_bytes - sum(map(transfer.kept_bytes, files)))
    # Without its config a folder is no model: the last to come makes it one.
    files_and_config = [
        [file for file in files if file.name != _CONFIG],
        [file for file in files if file.name == _CONFIG],
    ]
    done_before = 0

    def report(progress: list[FileProgress]) -> None:
        done_bytes = done_before + sum(file.done_bytes for file in progress)
        under_way = tuple(file for file in progress if file.done_bytes < file.total_bytes)
        on_progress(PullProgress(f"downloading `{source}`", done_bytes, total_bytes, under_way))

    from huggingface_hub import get_session

    with _in_our_words(source):
        for each in files_and_config:
            transfer.fetch(each, get_session(), {}, report)
            done_before += sum(file.size_bytes for file in each)


def _url(source: HubSource, route: str, **query: str) -> str:
    domain = os.environ.get("MODELSCOPE_DOMAIN") or _DEFAULT_DOMAIN
    endpoint = domain if "://" in domain else f"https://{domain}"
    asked = urlencode({"Revision": source.revision or _DEFAULT_REVISION, **query})
    return f"{endpoint}/api/v1/models/{source.repo}/{route}?{asked}"


def _get(url: str) -> dict[str, Any]:
    """Raises ValueError for anything but a JSON object."""
    from huggingface_hub import get_session, hf_raise_for_status

    response = get_session().get(url, timeout=_TIMEOUT_S)
    hf_raise_for_status(response)
    value = response.json()
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


@contextmanager
def _in_our_words(source: HubSource) -> Iterator[None]:
    from httpx2 import TransportError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as exc:
        raise DownloadError(
            f"`{source}` is not on disk, and `HF_HUB_OFFLINE` forbids fetching it", hint="unset it"
        ) from exc
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        if status in (401, 403, 404):
            raise ModelNotFound(
                f"`{source}` is not on ModelScope, or is not public",
                hint="check the spelling; unset `VLLM_USE_MODELSCOPE` for the Hugging Face hub",
            ) from exc
        raise DownloadError(
            f"ModelScope answered HTTP {status} for `{source}`", hint="try again later", retryable=True
        ) from exc
    except TransportError as exc:
        raise DownloadError(
            f"ModelScope can't be reached: {exc}", hint="check the network", retryable=True
        ) from exc
    except ValueError as exc:
        raise DownloadError(
            f"ModelScope's answer for `{source}` is not JSON",
            hint="check `MODELSCOPE_DOMAIN`",
            retryable=True,
        ) from exc
