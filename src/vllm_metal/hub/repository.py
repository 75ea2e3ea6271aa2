"""Downloads of repositories from the model hub, into the cache that other programs share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_metal.errors import UnsupportedModel
from vllm_metal.hub.disk import require_space
from vllm_metal.hub.hub_errors import in_our_words
from vllm_metal.hub.names import HubSource
from vllm_metal.hub.progress import OnProgress, PullProgress
from vllm_metal.hub.store import MODEL_FILES, OTHER_FILES, WEIGHTS, describe_weights

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo


def download(source: HubSource, on_progress: OnProgress) -> Path:
    """The folder of the snapshot. Files that are in the cache already are not fetched again."""
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
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    _require_model(source, list(sizes))
    missing_bytes = sum(
        size for name, size in sizes.items() if _is_wanted(name) and not _is_cached(info, name)
    )
    require_space(Path(constants.HF_HUB_CACHE), missing_bytes)
    return _fetch(source, missing_bytes, on_progress)


def _require_model(source: HubSource, names: list[str]) -> None:
    has_weights = any(fnmatchcase(name, WEIGHTS) for name in names if "/" not in name)
    if has_weights and "config.json" in names:
        return
    if "adapter_config.json" in names:
        raise UnsupportedModel(
            f"`{source}` is a LoRA adapter, not a model", hint="pull the model that it was trained on"
        )
    raise UnsupportedModel(
        f"`{source}` {'has no `config.json`' if has_weights else f'holds {describe_weights(names)}'}",
        hint="look for the same model under `mlx-community/`, or download one `.gguf` file and give its path",
    )


def _is_wanted(name: str) -> bool:
    def matches(patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return matches(MODEL_FILES) and not matches(OTHER_FILES)


def _is_cached(info: ModelInfo, name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(info.id, name, revision=info.sha), str)


def _fetch(source: HubSource, total_bytes: int, on_progress: OnProgress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils._xet import abort_xet_session

    failure: BaseException | None = None

    def report(done_bytes: int) -> None:
        nonlocal failure
        if failure is None:
            try:
                on_progress(
                    PullProgress(f"downloading `{source}`", min(done_bytes, total_bytes), total_bytes)
                )
            except BaseException as exc:
                failure = exc
        if failure is not None:
            raise CancelledError

    # The library joins its download threads before an interrupt gets out; from beside it they can be ended.
    with ThreadPoolExecutor(max_workers=1) as executor:
        snapshot = executor.submit(
            snapshot_download,
            source.repo,
            revision=source.revision,
            allow_patterns=MODEL_FILES,
            ignore_patterns=OTHER_FILES,
            tqdm_class=_byte_bar(report),
        )
        try:
            with in_our_words(source):
                return Path(snapshot.result())
        except BaseException as exc:
            failure = failure or exc
            abort_xet_session()  # type: ignore[no-untyped-call]
    raise failure


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
