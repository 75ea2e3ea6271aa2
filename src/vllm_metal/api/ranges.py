"""The ranges of the numbers that sampling goes by: those that are enforced are those that are published."""

from __future__ import annotations

from operator import ge, gt, le

from msgspec import Meta

N = Meta(ge=1, le=128)
LOGIT_BIAS = Meta(ge=-100, le=100)
LOGPROBS = Meta(ge=0, le=20)

#: By the names that SamplingParams has for them.
RANGES = {
    "temperature": Meta(ge=0, le=100),
    "top_p": Meta(gt=0, le=1),
    "top_k": Meta(ge=-1),
    "min_p": Meta(ge=0, le=1),
    "presence_penalty": Meta(ge=-2, le=2),
    "frequency_penalty": Meta(ge=-2, le=2),
    "repetition_penalty": Meta(gt=0, le=100),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "max_tokens": Meta(ge=0),
    "min_tokens": Meta(ge=0),
}


def broken_bound(allowed: Meta, number: float) -> str | None:
    """What `number` had to be and is not, in words."""
    bounds = ((allowed.ge, ge, "at least"), (allowed.gt, gt, "above"), (allowed.le, le, "at most"))
    for bound, holds, words in bounds:
        # Not the opposite comparison: nothing holds of NaN.
        if bound is not None and not holds(number, bound):
            return f"{words} {bound}"
    return None
