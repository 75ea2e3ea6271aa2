"""Text and chat messages to token ids, through the model's own tokenizer and template.

All that renders belongs to one executor thread; texts are encoded, and detokenizers run, in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from vllm_metal.api.chat import RENDERING_PARAMETERS
from vllm_metal.engine.mlx import agent_turns, content_format, request_template, system_messages
from vllm_metal.engine.mlx.detokenizer import Detokenizer, TokenBytes
from vllm_metal.engine.mlx.fill_in_middle import END_TOKENS, FillInMiddle
from vllm_metal.errors import InvalidRequest, PromptTooLong
from vllm_metal.parsing.detection import Model
from vllm_metal.parsing.output_formats import OutputFormats


class Tokenizer:
    """Wraps a fast tokenizer of transformers. `chat_template` (Jinja text) replaces the model's own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self.template_renderer = tokenizer
        # Encoding goes to the backend itself: transformers would set padding and truncation on every call,
        # which fails while another thread reads.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.token_bytes = TokenBytes(self.backend)
        own_eos = (tokenizer.eos_token_id, *map(self.backend.token_to_id, END_TOKENS))
        self.eos_token_ids = frozenset(eos_token_ids).union(own_eos) - {None}
        self._fill_in_middle = FillInMiddle.detect(self.backend.token_to_id)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        # In the vocabulary's spelling, which never takes fewer bytes than the text.
        self._max_token_bytes = max(len(token.encode()) for token in self.backend.get_vocab())

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of tokens that stand for themselves, special or not."""
        return {
            token.content: token_id for token_id, token in self.backend.get_added_tokens_decoder().items()
        }

    @property
    def has_chat_template(self) -> bool:
        return self.template_renderer.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The text of the template, or of several; empty where there is none."""
        template = self.template_renderer.chat_template or ""
        if isinstance(template, dict):  # one with tools, one without
            template = "\n".join(template.values())
        return template

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        only_end: bool = False,
        param: str = "prompt",
    ) -> list[int]:
        """Token ids of `text`, which its sender calls `param`.

        Raises InvalidRequest where it is not valid Unicode, and PromptTooLong, without the work of encoding,
        for a text that cannot but have more than `max_tokens`. With `only_end` that is not raised, and what
        cannot be in the last `max_tokens` is left out.
        """
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as exc:  # a lone surrogate, which JSON can spell
            raise InvalidRequest(
                "the text is not valid Unicode: it holds half a surrogate pair", param=param
            ) from exc
        if max_tokens is not None and len(utf8) > (most := max_tokens * self._max_token_bytes):
            if not only_end:
                raise PromptTooLong.of_size(f"{len(utf8)} bytes", max_tokens, param=param)
            text = utf8[-most:].decode(errors="ignore")
        # A batch of one, because only for a batch the backend lets other threads run; fast: without offsets.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_around(self, before: str, after: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids that ask for what stands between two texts.

        Raises InvalidRequest for a model that never learnt to, and as `encode` does.
        """
        if self._fill_in_middle is None:
            raise InvalidRequest("this model cannot fill in the middle of a text", param="suffix")
        encoded = [
            self.encode(text, add_special_tokens=False, max_tokens=max_tokens, param=param)
            for text, param in ((before, "prompt"), (after, "suffix"))
        ]
        return self._bos_token_ids() + self._fill_in_middle.token_ids(*encoded)

    def _bos_token_ids(self) -> list[int]:
        """What stands before every text."""
        begins = self.encode("")[:1]
        return begins if begins == [self.template_renderer.bos_token_id] else []

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """What the model's template makes of messages; `variables` (`tools` and the like) are its own.

        Raises InvalidRequest when the model has no template or its template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "the model has no chat template",
                param="messages",
                hint="use `/v1/completions`, or serve the model with `--chat-template`",
            )
        if reserved := sorted(RENDERING_PARAMETERS & variables.keys()):
            raise InvalidRequest(
                f"`{reserved[0]}` cannot be set as a variable of the chat template",
                param="chat_template_kwargs",
            )
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, **variables)
        # The template is the model's program over the client's messages: any failure means they do not fit.
        except Exception as exc:
            raise InvalidRequest(f"the chat template refused the messages: {exc}", param="messages") from exc

    def _render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        adapted = self._agent_turns.adapt(self._system_messages.adapt(messages))
        return self._render_as_they_are(adapted, **variables)

    def _render_as_they_are(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        text: str = self.template_renderer.apply_chat_template(
            self._content_format.adapt(messages), tokenize=False, **variables
        )
        return text

    def render_request_template(
        self, chat_template: str, messages: list[dict[str, Any]], **variables: Any
    ) -> str:
        """What a request's own template makes of its messages. Any thread may ask. Raises InvalidRequest."""
        as_text = content_format.ContentFormat(text=True, parts=False)
        variables = {**self.template_renderer.special_tokens_map, **variables}
        return request_template.render(chat_template, as_text.adapt(messages), variables)

    @cached_property
    def _content_format(self) -> content_format.ContentFormat:
        return content_format.detect(partial(self.template_renderer.apply_chat_template, tokenize=False))

    @cached_property
    def _system_messages(self) -> system_messages.SystemMessages:
        return system_messages.detect(self._render_as_they_are)

    @cached_property
    def _agent_turns(self) -> agent_turns.AgentTurns:
        return agent_turns.detect(self._render_as_they_are)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, special ones left out or by name."""
        detokenizer = self.detokenizer((), skip_special_tokens)
        return "".join(map(detokenizer.add, token_ids)) + detokenizer.flush()

    def token_ids(self, tokens: Iterable[str]) -> frozenset[int]:
        """The ids of those of `tokens` that the vocabulary has."""
        return frozenset(map(self.backend.token_to_id, tokens)) - {None}

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """A fresh detokenizer for one answer to the prompt."""
        return Detokenizer(self.token_bytes, prompt_token_ids, skip_special_tokens, visible)

    def output_formats(self, *, tools: str = "auto", reasoning: str = "auto") -> OutputFormats:
        """How answers are to be read, found unless named. Raises ConfigError for a name of no format."""
        model = Model(self.chat_template, self.backend.get_vocab(), self._render)
        return OutputFormats.of(model, tools=tools, reasoning=reasoning)
