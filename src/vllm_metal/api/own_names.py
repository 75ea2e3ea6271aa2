"""What is wrong with a chat, told of the request of another API that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm_metal.errors import InvalidRequest


@contextmanager
def in_own_names(names: Mapping[str, str]) -> Iterator[None]:
    """`names` has what that API calls fields of the chat, or words for their values."""
    try:
        yield
    except InvalidRequest as exc:
        for theirs, own in names.items():
            exc.message = exc.message.replace(f"`{theirs}`", f"`{own}`")
            exc.hint = exc.hint and exc.hint.replace(f"`{theirs}`", f"`{own}`")
            if exc.param is not None and exc.param.partition("[")[0] == theirs:
                exc.param = own
        raise
