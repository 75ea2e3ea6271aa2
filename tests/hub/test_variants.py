"""GGUF files as repositories of the hub name them."""

from __future__ import annotations

import pytest

from vllm_metal.errors import ModelNotFound
from vllm_metal.hub.variants import choose, variants


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_0.gguf", "Q4_0"),
        ("Llama-3.2-1B-Instruct.Q8_0.gguf", "Q8_0"),
        ("gemma-3-1b-it-IQ2_XXS.gguf", "IQ2_XXS"),
        ("Qwen3-8B-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("model-BF16.gguf", "BF16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("Q5_K_S/weights.gguf", "Q5_K_S"),
        ("plain.gguf", "plain"),
    ],
)
def test_quantization_is_read_from_the_name(path: str, quant: str) -> None:
    assert [variant.quant for variant in variants({path: 1})] == [quant]


def test_smallest_first_and_nothing_but_models() -> None:
    sizes = {"m-Q8_0.gguf": 8, "m-Q4_0.gguf": 4, "mmproj-F16.gguf": 1, "m.imatrix.gguf": 1, "README.md": 1}
    assert [(each.quant, each.size_bytes) for each in variants(sizes)] == [("Q4_0", 4), ("Q8_0", 8)]


def test_parts_are_one_model() -> None:
    parts = {f"Q8_0/m-Q8_0-0000{n}-of-00003.gguf": n for n in (3, 1, 2)}
    (variant,) = variants(parts)
    assert (variant.quant, variant.size_bytes, variant.is_whole) == ("Q8_0", 6, True)
    assert variant.files == tuple(sorted(parts))
    del parts["Q8_0/m-Q8_0-00002-of-00003.gguf"]
    assert not variants(parts)[0].is_whole


def test_two_models_of_one_quantization_go_by_their_names() -> None:
    found = variants({"small-Q4_0.gguf": 1, "large-Q4_0.gguf": 2, "large-Q8_0.gguf": 3})
    assert [variant.quant for variant in found] == ["small-Q4_0", "large-Q4_0", "Q8_0"]


def test_the_only_one_needs_no_name_and_case_does_not_matter() -> None:
    found = variants({"m-Q4_0.gguf": 1})
    assert choose(found, None, "org/m") == choose(found, "q4_0", "org/m") == found[0]


@pytest.mark.parametrize(
    ("quant", "problem"), [(None, "holds 2 quantizations"), ("Q5_0", "has no quantization `Q5_0`")]
)
def test_several_are_listed_with_what_to_type(quant: str | None, problem: str) -> None:
    found = variants({"m-Q4_0.gguf": 1_000_000, "m-Q8_0.gguf": 2_000_000})
    with pytest.raises(ModelNotFound) as caught:
        choose(found, quant, "org/m")
    assert caught.value.message == f"`org/m` {problem}: `Q4_0` (1.0 MB), `Q8_0` (2.0 MB)"
    assert "`metal pull org/m --quant Q4_0`" in str(caught.value.hint)
