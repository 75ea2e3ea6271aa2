"""OpenAI's embeddings: requests and replies."""

from __future__ import annotations

import base64
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from vllm_metal.api.request_body import NUM_TOKENS, RequestBody
from vllm_metal.errors import InvalidRequest

EncodingFormat = Literal["float", "base64"]

#: How many inputs OpenAI takes at once.
MAX_INPUTS = 2048


class PoolingRequest(RequestBody, kw_only=True):
    """What requests to models that write nothing have in common.

    `truncate_prompt_tokens` cuts an input to so many tokens, -1 to as many as the model reads.
    """

    without_effect: ClassVar[frozenset[str]] = frozenset({"metadata", "store", "user"})

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None

    def max_tokens(self, max_model_len: int) -> int | None:
        """What inputs are cut to, None to leave them. Raises InvalidRequest."""
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return None
        if wanted == 0 or wanted > max_model_len:
            raise InvalidRequest(
                f"`truncate_prompt_tokens` must be -1 or between 1 and {max_model_len}",
                param="truncate_prompt_tokens",
            )
        return max_model_len if wanted == -1 else wanted


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """`prompt_name` is one of the model's prompts, which stands before each text."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "normalize": (True,),
    }

    input: str | Annotated[list[str | int | list[int]], NUM_TOKENS]
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    prompt_name: str | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """All as texts, or all as token ids. Raises InvalidRequest for a mixture, none or too many."""
        if isinstance(self.input, str):
            return [self.input]
        texts = [item for item in self.input if isinstance(item, str)]
        lists = [item for item in self.input if isinstance(item, list)]
        token_ids = [item for item in self.input if isinstance(item, int)]
        if not self.input:
            raise InvalidRequest("`input` is empty", param="input")
        if len(self.input) not in (len(texts), len(lists), len(token_ids)):
            raise InvalidRequest("`input` must not mix texts and token ids", param="input")
        if token_ids:
            return [token_ids]
        if len(self.input) > MAX_INPUTS:
            raise InvalidRequest(
                f"`input` has {len(self.input)} texts, and at most {MAX_INPUTS} are embedded at once",
                param="input",
            )
        return texts or lists


class Embedding(Struct, tag_field="object", tag="embedding"):
    """As numbers, or as float32, little-endian, in base64."""

    index: int
    embedding: list[float] | str

    @classmethod
    def of(cls, index: int, vector: bytes, encoding_format: EncodingFormat) -> Embedding:
        if encoding_format == "base64":
            return cls(index, base64.b64encode(vector).decode())
        return cls(index, numbers(vector))


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> PoolingUsage:
        return cls(num_tokens, num_tokens)


class EmbeddingList(Struct, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: PoolingUsage


def numbers(vector: bytes) -> list[float]:
    """Of float32 in this machine's order, which is little-endian wherever MLX runs."""
    return list(memoryview(vector).cast("f"))
