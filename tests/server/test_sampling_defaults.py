"""A model's own `generation_config.json` stands in for what a request leaves open."""

from __future__ import annotations

from pathlib import Path

import tiny_folder
from server_process import ServerProcess


def test_the_models_defaults_and_the_requests_own_values(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "tiny", do_sample=True, temperature=5.0, top_k=1, top_p=0.9)
    with ServerProcess(str(folder), env={}) as server:

        def text(**fields: object) -> str:
            body = {"prompt": "Once", "max_tokens": 24, "ignore_eos": True, **fields}
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            return answer["choices"][0]["text"]

        greedy = text(temperature=0)
        assert text(seed=1) == text(seed=2) == greedy
        assert text(seed=1, top_k=0) != greedy
        assert server.chat("Once", temperature=None, max_tokens=24, ignore_eos=True) == greedy


def test_defaults_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "tiny", temperature="hot", top_k=1)
    with ServerProcess(str(folder), env={}) as server:
        server.ready()
        assert "the sampling defaults of `generation_config.json` are ignored" in server.log


def test_the_configurations_defaults_win_over_the_models(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "tiny", do_sample=True, temperature=5.0, top_k=50)
    env = {"METAL_MODELS_TEMPERATURE": "0", "METAL_MODELS_MAX_TOKENS": "7"}
    with ServerProcess(str(folder), env=env) as server:
        body = {"messages": [{"role": "user", "content": "Once"}], "ignore_eos": True}
        answers = [server.post("/v1/chat/completions", {**body, "seed": seed})[1] for seed in (1, 2)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [7, 7]
        first, second = (answer["choices"][0]["message"]["content"] for answer in answers)
        assert first == second
        _, longer = server.post("/v1/chat/completions", {**body, "max_tokens": 9})
        assert longer["usage"]["completion_tokens"] == 9
