"""What there is to say of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """`number_format` is a quantization, like "4-bit", or a dtype; `mode` how steps are run."""

    number_format: str
    device: Literal["CPU", "GPU"]
    mode: str
    weight_bytes: int
    load_s: float
