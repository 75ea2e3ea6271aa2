"""What there is to know of an embedding model before it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_metal.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTraits:
    """`compares` is for a model that judges pairs, and has no vectors; others have `dimensions`, of which the
    first `shorter` ones can be had too. `prompts` stand before a text, by what it is, and `default_prompt`
    where nothing is said.
    """

    max_model_len: int
    compares: bool = False
    dimensions: int = 1
    shorter: tuple[int, ...] | range = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    def check_dimensions(self, wanted: int) -> None:
        """Raises InvalidRequest."""
        if wanted == self.dimensions or wanted in self.shorter:
            return
        hint = f"leave `dimensions` out for all {self.dimensions}"
        if isinstance(self.shorter, range) and self.shorter:
            hint += f", or set it to {self.shorter[0]} or more"
        elif self.shorter:
            hint += f", or set it to one of {', '.join(map(str, self.shorter))}"
        raise InvalidRequest(
            f"this model's vectors cannot have {wanted} dimensions", param="dimensions", hint=hint
        )

    def prompt(self, name: str | None) -> str:
        """What stands before a text. Raises InvalidRequest for a name that the model does not know."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(f"`{each}`" for each in self.prompts)
            raise InvalidRequest(
                f"this model has no prompt `{name}`",
                param="prompt_name",
                hint=f"it has {known}" if known else "leave `prompt_name` out",
            )
        return self.prompts[name]
