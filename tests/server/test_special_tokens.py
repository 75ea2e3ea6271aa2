"""Whether the tokenizer's own first token stands before a prompt."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import tiny_folder
from server_process import ServerProcess


def test_texts_get_the_first_token_and_chats_do_not_unless_asked(tmp_path):
    folder = tiny_folder.save(tmp_path / "tiny")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 256)])
    tokenizer.save(file)
    text = tokenizer.encode("Hi", add_special_tokens=False).ids
    with ServerProcess(str(folder), env={}) as server:

        def prompt(path: str, **fields: object) -> list[int]:
            status, answer = server.post(path, {"max_tokens": 1, "return_token_ids": True, **fields})
            assert status == 200, answer
            return {**answer["choices"][0], **answer}["prompt_token_ids"]

        bodies = {
            "/v1/completions": {"prompt": "Hi"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        }
        for path, body in bodies.items():
            assert prompt(path, **body, add_special_tokens=True) == [256, *text]
            assert prompt(path, **body, add_special_tokens=False) == text
            assert prompt(path, **body) == ([256, *text] if "prompt" in body else text)
