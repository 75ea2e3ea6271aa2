"""Builds the tokenizer that a GGUF file describes: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`)."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.errors import NotAModel, UnsupportedModel

# How the `pre` of byte-level files splits text before its merges; expressions of the models' own tokenizers.
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])


def _split(*expressions: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _words(max_digits: str) -> pre_tokenizers.PreTokenizer:
    return _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + max_digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _words("{1,3}")
_QWEN2 = _words("")
_TEKKEN = _split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = _split(
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# Descendants of tiktoken: a word that is a token is taken whole, and texts begin with BOS.
_TIKTOKEN_LIKE = (_LLAMA3, _TEKKEN)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_END_TOKEN_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def load_tokenizer(file: GGUFFile, *, chat_template: str | None = None) -> Tokenizer:
    """The file's tokenizer with its template and end tokens.

    Raises UnsupportedModel for a kind of tokenizer that is not known, NotAModel where its parts do not fit.
    """
    settings = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = settings.get("model")
    if kind not in builders:
        raise UnsupportedModel(
            f"`{file.path}` has a tokenizer of kind `{kind}`, which is not supported",
            hint="pass the folder of the model's tokenizer with `--tokenizer`",
        )
    try:
        backend = builders[kind](settings)
        _add_tokens(backend, settings)
        _set_template_processor(
            backend, settings, adds_bos=kind == "llama" or _pre(settings) in _TIKTOKEN_LIKE
        )
        special_tokens = {
            name: settings["tokens"][settings[key]]
            for name, key in {
                "bos_token": "bos_token_id",
                "eos_token": "eos_token_id",
                "unk_token": "unknown_token_id",
                "pad_token": "padding_token_id",
            }.items()
            if key in settings
        }
        renderer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=file.metadata.get("tokenizer.chat_template"),
            **special_tokens,
        )
    except UnsupportedModel:
        raise
    # The tokenizers library raises bare Exceptions for merges outside the vocabulary and the like.
    except Exception as exc:
        raise NotAModel(f"the tokenizer of `{file.path}` is damaged: {exc!r}") from exc
    return Tokenizer(renderer, eos_token_ids=end_token_ids(file), chat_template=chat_template)


def end_token_ids(file: GGUFFile) -> frozenset[int]:
    """Ids that end an answer: of the text, of a turn, of a message."""
    return frozenset(file.metadata[key] for key in _END_TOKEN_KEYS if key in file.metadata)


def _byte_level(settings: dict[str, Any]) -> BackendTokenizer:
    pre_tokenizer = _pre(settings)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in settings["merges"])]
    backend = BackendTokenizer(
        models.BPE(vocab=_vocabulary(settings), merges=merges, ignore_merges=pre_tokenizer in _TIKTOKEN_LIKE)
    )
    if pre_tokenizer is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(settings: dict[str, Any]) -> BackendTokenizer:
    vocabulary = _vocabulary(settings)
    unknown = settings["tokens"][settings.get("unknown_token_id", 0)]
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
    if settings.get("add_space_prefix", True):
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


def _pre(settings: dict[str, Any]) -> pre_tokenizers.PreTokenizer | None:
    if settings["model"] != "gpt2":
        return None
    name = settings.get("pre")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"the tokenizer splits text by rules that are not known: `{name}`",
            hint="pass the folder of the model's tokenizer with `--tokenizer`",
        )
    return _PRE_TOKENIZERS[name]


def _add_tokens(backend: BackendTokenizer, settings: dict[str, Any]) -> None:
    for token, kind in zip(settings["tokens"], settings.get("token_type", []), strict=False):
        if kind in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])


def _set_template_processor(backend: BackendTokenizer, settings: dict[str, Any], *, adds_bos: bool) -> None:
    template, special_tokens = ["$A"], []
    if settings.get("add_bos_token", adds_bos) and "bos_token_id" in settings:
        bos = settings["bos_token_id"]
        template.insert(0, settings["tokens"][bos])
        special_tokens.append((settings["tokens"][bos], bos))
    if settings.get("add_eos_token", False):
        eos = settings["eos_token_id"]
        template.append(settings["tokens"][eos])
        special_tokens.append((settings["tokens"][eos], eos))
    if special_tokens:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
