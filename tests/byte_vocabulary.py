"""Grammars for the tokenizer of `tiny_folder`: a token a byte, and one that ends an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import tiny_folder
from vllm_metal.structure.compiler import CompiledGrammar, Compiler
from vllm_metal.structure.grammar import Grammar

TOKENIZER = tiny_folder.tokenizer()
EOS = 256


def compiler(*, special_tokens: tuple[str, ...] = ()) -> Compiler:
    """`special_tokens` come after the others."""
    backend = tiny_folder.tokenizer().backend_tokenizer
    backend.add_special_tokens([*special_tokens])
    added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    return Compiler(backend.to_str, added_tokens=added, eos_token_ids={EOS})


def compiled(grammar: Grammar, by: Compiler) -> CompiledGrammar:
    return asyncio.run(by.compile(grammar))


def of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids
