"""Downloads of repositories from the model hub, into the cache that other programs share."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vllm_metal.errors import UnsupportedModel
from vllm_metal.hub import shared_cache, transfer
from vllm_metal.hub.disk import require_space
from vllm_metal.hub.hub_errors import in_our_words
from vllm_metal.hub.names import HubSource
from vllm_metal.hub.progress import FileProgress, OnProgress, PullProgress
from vllm_metal.hub.store import MODEL_FILES, OTHER_FILES, WEIGHTS, describe_weights
from vllm_metal.hub.transfer import RemoteFile
from vllm_metal.hub.variants import choose, variants


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub tells of a model before it is fetched.

    `sizes` are the bytes of the files that make up the model; `sha256` knows the large ones. `config` is None
    for GGUF files, of which the hub may tell the `architecture`.
    """

    source: HubSource
    commit: str
    sizes: Mapping[str, int]
    sha256: Mapping[str, str]
    config: dict[str, Any] | None
    architecture: str | None

    @property
    def weight_bytes(self) -> int:
        return sum(size for name, size in self.sizes.items() if _is_weights(name))


def look_up(source: HubSource, on_progress: OnProgress) -> Repository:
    """Raises as `download` does, and `UnsupportedModel` for a repository without a model."""
    from huggingface_hub import HfApi, constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    # Its warnings tell of each retry, over several lines.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    on_progress(PullProgress(f"looking up `{source}`"))
    with in_our_words(source):
        info = HfApi().model_info(
            source.repo,
            revision=source.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        assert info.sha is not None
        siblings = {file.rfilename: file for file in info.siblings or ()}
        sizes = files_of_model(source, {name: file.size or 0 for name, file in siblings.items()})
        return Repository(
            source=source,
            commit=info.sha,
            sizes=sizes,
            sha256={name: file.lfs.sha256 for name in sizes if (file := siblings[name]).lfs},
            config=_read_config(source.repo, info.sha) if "config.json" in sizes else None,
            architecture=(info.gguf or {}).get("architecture"),
        )


def download(repository: Repository, on_progress: OnProgress) -> Path:
    """The folder of the snapshot. Files that are in the cache already are not fetched again.

    Large files are fetched by `transfer`, which resumes; the hub's own client fetches the others, and links
    all of them into the snapshot. Raises `ModelNotFound` or `DownloadError`.
    """
    missing = {name: size for name, size in repository.sizes.items() if not _is_cached(repository, name)}
    large = [_remote_file(repository, name) for name in missing if name in repository.sha256]
    kept = sum(map(transfer.kept_bytes, large))
    total_bytes = sum(missing.values())
    require_space(shared_cache.folder(), total_bytes - kept)
    report = _Report(f"downloading `{repository.source}`", total_bytes, on_progress)
    try:
        with in_our_words(repository.source):
            _fetch_large(large, report)
            return _fetch_rest(repository, report, sum(file.size_bytes for file in large))
    except CancelledError:
        assert report.failure is not None
        raise report.failure from None


class _Report:
    """Tells how far a download is. What the listener raises ends the download and comes out as it is."""

    def __init__(self, stage: str, total_bytes: int, on_progress: OnProgress) -> None:
        self.failure: BaseException | None = None
        self._stage = stage
        self._total_bytes = total_bytes
        self._on_progress = on_progress

    def __call__(self, done_bytes: int, files: tuple[FileProgress, ...] = ()) -> None:
        if self.failure is None:
            done_bytes = min(done_bytes, self._total_bytes)
            try:
                self._on_progress(PullProgress(self._stage, done_bytes, self._total_bytes, files))
            except BaseException as exc:
                self.failure = exc
        if self.failure is not None:
            raise CancelledError


def files_of_model(source: HubSource, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those to fetch: MLX's and Hugging Face's layout at the top, or one of the GGUF files."""
    has_weights = any(fnmatchcase(name, WEIGHTS) for name in sizes if "/" not in name)
    if has_weights and "config.json" in sizes and source.quant is None:
        return {name: size for name, size in sizes.items() if _is_wanted(name)}
    if gguf := variants(sizes):
        return {name: sizes[name] for name in choose(gguf, source.quant, source.repo).files}
    if "adapter_config.json" in sizes:
        raise UnsupportedModel(
            f"`{source}` is a LoRA adapter, not a model", hint="pull the model that it was trained on"
        )
    if source.quant is not None:
        raise UnsupportedModel(
            f"`{source.repo}` holds no GGUF files to choose from", hint=f"pull it as `{source.repo}`"
        )
    raise UnsupportedModel(
        f"`{source}` {'has no `config.json`' if has_weights else f'holds {describe_weights(list(sizes))}'}",
        hint="look for the same model under `mlx-community/`",
    )


def _is_wanted(name: str) -> bool:
    def matches(patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return matches(MODEL_FILES) and not matches(OTHER_FILES)


def _is_weights(name: str) -> bool:
    return fnmatchcase(name, WEIGHTS) or name.endswith(".gguf")


def _read_config(repo: str, commit: str) -> dict[str, Any] | None:
    """`config.json`, which is small, without keeping it; None if it holds no object."""
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status

    response = get_session().get(
        hf_hub_url(repo, "config.json", revision=commit),
        headers=_headers(),
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    hf_raise_for_status(response)
    try:
        config = json.loads(response.content)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _headers() -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers: dict[str, str] = build_hf_headers()
    return headers


def _is_cached(repository: Repository, name: str) -> bool:
    return (
        shared_cache.model_folder(repository.source.repo) / "snapshots" / repository.commit / name
    ).exists()


def _remote_file(repository: Repository, name: str) -> RemoteFile:
    from huggingface_hub import hf_hub_url

    sha256 = repository.sha256[name]
    return RemoteFile(
        name=name,
        url=hf_hub_url(repository.source.repo, name, revision=repository.commit),
        size_bytes=repository.sizes[name],
        sha256=sha256,
        path=shared_cache.model_folder(repository.source.repo) / "blobs" / sha256,
    )


def _fetch_large(files: list[RemoteFile], report: _Report) -> None:
    from huggingface_hub import get_session

    def tell(progress: list[FileProgress]) -> None:
        under_way = tuple(file for file in progress if file.done_bytes < file.total_bytes)
        report(sum(file.done_bytes for file in progress), under_way)

    transfer.fetch(files, get_session(), _headers(), tell)


def _fetch_rest(repository: Repository, report: _Report, done_before: int) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils._xet import abort_xet_session

    # The library joins its download threads before an interrupt gets out; from beside it they can be ended.
    with ThreadPoolExecutor(max_workers=1) as executor:
        snapshot = executor.submit(
            snapshot_download,
            repository.source.repo,
            revision=repository.source.revision,
            allow_patterns=list(repository.sizes),
            tqdm_class=_byte_bar(lambda done_bytes: report(done_before + done_bytes)),
        )
        try:
            return Path(snapshot.result())
        except BaseException as exc:
            report.failure = report.failure or exc
            abort_xet_session()  # type: ignore[no-untyped-call]
            raise


def _byte_bar(report: Callable[[int], None]) -> type:
    """A progress bar class that shows nothing and calls `report` with the bytes done, one call at a time."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    lock = threading.RLock()
    furthest = 0

    class ByteBar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that wakes up to redraw

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            with lock:
                self.n += n or 0
                # One bar counts files, and two count bytes: received and written.
                if self.unit == "B" and self.n > furthest:
                    furthest = int(self.n)
                    report(furthest)

        def display(self, *args: object, **kwargs: object) -> None:
            pass

        def close(self) -> None:
            pass

    ByteBar.set_lock(lock)
    return ByteBar
