"""How byte-level tokenizers split text before their merges, by the names that GGUF files give these rules."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers


def _split(*expressions: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


# The expressions are those of the models' own tokenizers.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(max_digits: str) -> pre_tokenizers.PreTokenizer:
    return _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{max_digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
    )


def _cased_words(suffix: str, max_digits: str) -> pre_tokenizers.PreTokenizer:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
        rf"|\p{{N}}{max_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES
    )


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_LLAMA3 = _words("{1,3}")
_QWEN2 = _words("")
_GPT4O = _cased_words(f"{_CONTRACTIONS}?", "{1,3}")
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"

PRE_TOKENIZERS = {
    "default": _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": _split(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]"),
    "tekken": _cased_words("", ""),
    "seed-coder": _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+" + _SPACES
    ),
    "deepseek-coder": _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-llm": _split(
        r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+"
    ),
    "deepseek-v3": _split(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
    ),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}

#: Descendants of tiktoken: a word that is a token is taken whole, and texts begin with BOS.
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
#: Whose models' own tokenizers normalize to composed characters.
COMPOSED = {"qwen2", "deepseek-r1-qwen", "megrez"}
