"""How a family of models marks what it thinks before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.parsing.marks import special_tokens


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`; the marks in `silent` mean nothing to a reader.

    A model writes `resume` behind reasoning, whatever comes then, and `content_begin` before its content.
    """

    name: str
    begin: str
    end: str
    silent: tuple[str, ...] = ()
    resume: str = ""
    content_begin: str = ""

    @property
    def visible_tokens(self) -> frozenset[str]:
        """The marks that may be special tokens of a model, which the parser has to see."""
        return special_tokens(self.begin, self.end, *self.silent)

    def is_open_in(self, prompt: str) -> bool:
        """Whether the template has begun the reasoning itself, at the very end of the prompt."""
        return prompt.rstrip().endswith(self.begin.rstrip())

    def is_over_in(self, prompt: str) -> bool:
        """Whether the template has ended the reasoning itself, at the very end of the prompt."""
        return prompt.rstrip().endswith(self.end)

    def is_left_open_by(self, answer: str) -> bool:
        """Whether an answer that is to be gone on with has begun to reason and not ended it."""
        return answer.rfind(self.begin) > answer.rfind(self.end)
