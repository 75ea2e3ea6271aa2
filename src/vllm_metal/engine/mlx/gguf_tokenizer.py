"""Builds the tokenizer that a GGUF file describes: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`)."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.gguf_pre_tokenizers import COMPOSED, PRE_TOKENIZERS, WHOLE_WORDS
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.errors import NotAModel, UnsupportedModel
from vllm_metal.hub.gguf_header import damaged

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_END_TOKEN_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Many files name the end of a text alone, and leave these to who reads them.
_ENDS_OF_TURNS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"}


def load_tokenizer(file: GGUFFile, *, chat_template: str | None = None) -> Tokenizer:
    """The file's tokenizer with its template and end tokens.

    Raises UnsupportedModel for a kind of tokenizer that is not known, NotAModel where its parts do not fit.
    """
    architecture = str(file.metadata.get("general.architecture"))
    settings = {"add_space_prefix": not architecture.startswith("gemma")} | {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = str(settings.get("model"))
    if kind not in builders:
        raise UnsupportedModel(
            f"`{file.path}` has a tokenizer of kind `{kind}`, which is not supported",
            hint="pass the folder of the model's tokenizer with `--tokenizer`",
        )
    try:
        backend = builders[kind](settings)
        _add_tokens(backend, settings)
        _set_template_processor(backend, settings, adds_bos=kind == "llama" or settings["pre"] in WHOLE_WORDS)
        special_tokens = {
            name: _token(settings, settings[key])
            for name, key in {
                "bos_token": "bos_token_id",
                "eos_token": "eos_token_id",
                "unk_token": "unknown_token_id",
                "pad_token": "padding_token_id",
            }.items()
            if key in settings
        }
        own_template = file.metadata.get("tokenizer.chat_template")
        if not isinstance(own_template, str | None):
            raise TypeError("its chat template is not a text")
        renderer = PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=own_template, **special_tokens
        )
    except UnsupportedModel:
        raise
    # The tokenizers library raises bare Exceptions for merges outside the vocabulary and the like.
    except Exception as exc:
        raise NotAModel(f"the tokenizer of `{file.path}` is damaged: {exc!r}") from exc
    return Tokenizer(renderer, eos_token_ids=end_token_ids(file), chat_template=chat_template)


def end_token_ids(file: GGUFFile) -> frozenset[int]:
    """Ids that end an answer: of the text, of a turn, of a message. Raises NotAModel for one of no token."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    named = [file.metadata[key] for key in _END_TOKEN_KEYS if key in file.metadata]
    for token_id in named:
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise damaged(file.path, f"it has no token {token_id!r}, which would end answers")
    kinds = zip(tokens, file.metadata.get("tokenizer.ggml.token_type", []), strict=False)
    ends_of_turns = frozenset(
        token_id
        for token_id, (token, kind) in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED) and token in _ENDS_OF_TURNS
    )
    return ends_of_turns.union(named)


def _byte_level(settings: dict[str, Any]) -> BackendTokenizer:
    name = settings.get("pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"the tokenizer splits text by rules that are not known: `{name}`",
            hint="pass the folder of the model's tokenizer with `--tokenizer`",
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in settings["merges"])]
    backend = BackendTokenizer(
        models.BPE(vocab=_vocabulary(settings), merges=merges, ignore_merges=name in WHOLE_WORDS)
    )
    if name in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(settings: dict[str, Any]) -> BackendTokenizer:
    vocabulary = _vocabulary(settings)
    unknown = _token(settings, settings.get("unknown_token_id", 0))
    backend = BackendTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, settings["scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if settings["add_space_prefix"]:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: it joins the two neighbours whose joined piece has the best score."""
    merges = [
        (-scores[token_id], token_id, piece[:cut], piece[cut:])
        for piece, token_id in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]


def _vocabulary(settings: dict[str, Any]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(settings["tokens"])}


def _token(settings: dict[str, Any], token_id: int) -> str:
    if token_id < 0:
        raise IndexError(f"it has no token {token_id}")
    return str(settings["tokens"][token_id])


def _add_tokens(backend: BackendTokenizer, settings: dict[str, Any]) -> None:
    kinds = list(zip(settings["tokens"], settings.get("token_type", []), strict=False))
    # At once: each call goes through all that were added before.
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in kinds
            if kind in (_UNKNOWN, _CONTROL)
        ]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )


def _set_template_processor(backend: BackendTokenizer, settings: dict[str, Any], *, adds_bos: bool) -> None:
    template, special_tokens = ["$A"], []
    if settings.get("add_bos_token", adds_bos) and "bos_token_id" in settings:
        bos = _token(settings, settings["bos_token_id"])
        template.insert(0, bos)
        special_tokens.append((bos, settings["bos_token_id"]))
    if settings.get("add_eos_token", False):
        eos = _token(settings, settings["eos_token_id"])
        template.append(eos)
        special_tokens.append((eos, settings["eos_token_id"]))
    if special_tokens:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
