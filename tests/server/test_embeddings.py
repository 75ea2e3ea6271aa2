"""Embeddings, reranking and scores from a real server that has models of every kind beside one for chats."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest

import tiny_embedders
import tiny_folder
from server_process import ServerProcess

CHAT, ENCODER, DECODER, RERANKER, JUDGE = "chat", "encoder", "decoder", "cross-encoder", "tiny-reranker"
LONG = "a " * 99
PROMPTS = {"prompts": {"query": "q", "document": ""}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    tiny_folder.save(folder / CHAT)
    tiny_embedders.save_encoder(folder / ENCODER, matryoshka_dimensions=[8, 32])
    tiny_embedders.save_decoder(folder / DECODER, config_sentence_transformers=PROMPTS)
    tiny_embedders.save_encoder(folder / RERANKER, compares=True)
    tiny_embedders.save_decoder(folder / JUDGE, head="judge")
    with ServerProcess(str(folder / CHAT), env={"METAL_MODELS_DIR": str(folder)}) as process:
        yield process.ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def embed(server: ServerProcess, texts: Any, model: str = ENCODER, **fields: Any) -> list[np.ndarray]:
    status, reply = server.post("/v1/embeddings", {"model": model, "input": texts, **fields})
    assert status == 200, reply
    assert [each["index"] for each in reply["data"]] == list(range(len(reply["data"])))
    return [np.array(each["embedding"]) for each in reply["data"]]


def refusal(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    status, reply = server.post(path, body)
    assert status == 400, reply
    return reply["error"]


def test_openais_client_gets_vectors(server, client):
    reply = client.embeddings.create(model=ENCODER, input=["ab", "a b c"], user="someone")
    assert reply.model == ENCODER
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 4 + 5
    wanted = tiny_embedders.hidden_states("bert", tiny_embedders.weights("bert"), [2, 4, 31, 3]).mean(0)
    assert reply.data[0].embedding == pytest.approx(list(wanted / np.linalg.norm(wanted)), abs=1e-4)
    assert [len(each.embedding) for each in reply.data] == [32, 32]


def test_base64_holds_the_same_numbers(server):
    status, reply = server.post(
        "/v1/embeddings", {"model": ENCODER, "input": "ab", "encoding_format": "base64"}
    )
    assert status == 200
    packed = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    assert packed == pytest.approx(embed(server, "ab")[0])


@pytest.mark.parametrize("asked", ["a b c", ["a b c"], [2, 4, 5, 6, 3], [[2, 4, 5, 6, 3]]])
def test_every_shape_of_input_is_the_same_text(server, asked):
    [vector] = embed(server, asked)
    assert vector == pytest.approx(embed(server, ["a b c", "z"])[0], abs=1e-5)


def test_what_is_computed_together_changes_nothing(server):
    texts = [" ".join("abcdefghij"[: 1 + number % 10]) for number in range(300)]
    together = embed(server, texts, DECODER)
    for number in (0, 5, 299):
        assert together[number] == pytest.approx(embed(server, texts[number], DECODER)[0], abs=1e-5)


def test_requests_at_once_all_get_their_own(server):
    texts = ["a", "b c", "d e f"] * 20
    with ThreadPoolExecutor(16) as pool:
        vectors = list(pool.map(lambda text: embed(server, text)[0], texts))
    for text, vector in zip(texts, vectors, strict=True):
        assert vector == pytest.approx(embed(server, text)[0], abs=1e-5)


def test_vectors_can_be_shorter_where_the_model_was_trained_so(server):
    [whole], [short] = embed(server, "text"), embed(server, "text", dimensions=8)
    assert short == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-5)
    error = refusal(server, "/v1/embeddings", model=ENCODER, input="text", dimensions=9)
    assert error["param"] == "dimensions"


def test_prompts_of_the_model_stand_before_texts(server):
    assert embed(server, "text", DECODER, prompt_name="query")[0] == pytest.approx(
        embed(server, "qtext", DECODER)[0], abs=1e-5
    )
    assert (
        refusal(server, "/v1/embeddings", model=DECODER, input="a", prompt_name="x")["param"] == "prompt_name"
    )


def test_a_text_that_is_too_long_is_refused_or_cut(server):
    long = "a " * 100
    error = refusal(server, "/v1/embeddings", model=ENCODER, input=["a", long])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "64 tokens" in error["message"]
    [cut] = embed(server, long, truncate_prompt_tokens=-1)
    assert cut == pytest.approx(embed(server, "a " * 62)[0], abs=1e-5)
    [shorter] = embed(server, long, truncate_prompt_tokens=4)
    assert shorter == pytest.approx(embed(server, "a a")[0], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "\ud83d"}, None),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({}, "input"),
    ],
)
def test_bad_fields_are_named(server, fields, param):
    assert refusal(server, "/v1/embeddings", model=ENCODER, **fields)["param"] == param


def test_documents_come_in_the_order_of_their_scores(server):
    documents = ["a b", "c d e", "f", "q q q"]
    asked = {"model": RERANKER, "query": "query", "documents": documents}
    status, reply = server.post("/v1/rerank", asked)
    assert status == 200
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {each["index"]: each["document"]["text"] for each in reply["results"]} == dict(
        enumerate(documents)
    )
    assert reply["usage"]["total_tokens"] > 0
    as_objects = {**asked, "documents": [{"text": text} for text in documents], "top_n": 2}
    for path in ("/rerank", "/v2/rerank"):
        status, best = server.post(path, {**as_objects, "return_documents": False})
        assert status == 200
        assert [each.keys() for each in best["results"]] == [{"index", "relevance_score"}] * 2
        assert [each["relevance_score"] for each in best["results"]] == pytest.approx(scores[:2], abs=1e-5)


@pytest.mark.parametrize("model", [RERANKER, JUDGE, ENCODER, DECODER])
def test_scores_are_those_of_reranking(server, model):
    documents = ["a b", "c d e", "f"]
    _, ranked = server.post("/v1/rerank", {"model": model, "query": "w", "documents": documents})
    by_index = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    for path, first in (("/v1/score", "w"), ("/score", ["w"] * 3)):
        status, reply = server.post(path, {"model": model, "text_1": first, "text_2": documents})
        assert status == 200
        assert [each["score"] for each in reply["data"]] == pytest.approx(
            [by_index[i] for i in range(3)], abs=1e-5
        )


def test_a_model_that_embeds_compares_by_its_vectors(server):
    _, reply = server.post("/v1/score", {"model": DECODER, "text_1": "a", "text_2": "b c"})
    [query], [document] = embed(server, "qa", DECODER), embed(server, "b c", DECODER)
    assert reply["data"][0]["score"] == pytest.approx(query @ document, abs=1e-5)


def test_documents_can_be_cut(server):
    asked = {"model": RERANKER, "query": "w"}
    _, whole = server.post("/v1/rerank", {**asked, "documents": ["a b"]})
    _, cut = server.post("/v1/rerank", {**asked, "documents": ["a b " + "c " * 99], "max_tokens_per_doc": 2})
    assert cut["results"][0]["relevance_score"] == pytest.approx(
        whole["results"][0]["relevance_score"], abs=1e-5
    )
    assert cut["results"][0]["document"]["text"].startswith("a b c c")
    error = refusal(server, "/v1/rerank", **asked, documents=["a", "c " * 99])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "documents[1]")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": [LONG]}, "documents"),
        ("/v1/rerank", {"query": LONG, "documents": ["a", "b"]}, "query"),
        ("/v1/score", {"text_1": LONG, "text_2": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", "a", LONG], "text_2": ["a", "b", "c"]}, "text_1[2]"),
        ("/v1/score", {"text_1": ["a", "a", "a"], "text_2": ["a", LONG, "c"]}, "text_2[1]"),
    ],
)
def test_what_is_too_long_to_compare_by_vectors_is_named(server, path, fields, param):
    error = refusal(server, path, model=ENCODER, **fields)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"documents": ["a"]}),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "a"}]}),
        ("/v1/rerank", {"query": "a " * 99, "documents": ["a"], "truncate_prompt_tokens": -1}),
        ("/v1/score", {"text_1": [], "text_2": "a"}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
    ],
)
def test_bad_comparisons_are_refused(server, path, fields):
    assert refusal(server, path, model=RERANKER, **fields)["type"] == "invalid_request_error"


def test_models_do_what_they_are_for(server):
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score"):
        fields = {"input": "a", "query": "a", "documents": ["a"], "text_1": "a", "text_2": "a"}
        error = refusal(server, path, model=CHAT, **fields)
        assert (error["param"], "generates text" in error["message"]) == ("model", True)
    for model in (ENCODER, RERANKER):
        messages = [{"role": "user", "content": "a"}]
        error = refusal(server, "/v1/chat/completions", model=model, messages=messages)
        assert error["param"] == "model"
    error = refusal(server, "/v1/embeddings", model=RERANKER, input="a")
    assert "/v1/rerank" in error["message"]


@pytest.mark.parametrize("model", [ENCODER, DECODER, RERANKER, JUDGE])
def test_texts_are_tokens_of_models_of_every_kind(server, model):
    asked = {"model": model, "prompt": "a b", "return_token_strs": True}
    status, there = server.post("/tokenize", asked)
    assert status == 200, there
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    _, bare = server.post("/tokenize", {**asked, "add_special_tokens": False})
    assert server.post("/detokenize", {"model": model, "tokens": bare["tokens"]}) == (200, {"prompt": "a b"})
    assert refusal(server, "/detokenize", model=model, tokens=[10**9])["param"] == "tokens"


def test_tokens_of_a_text_are_those_that_are_embedded(server):
    _, there = server.post("/tokenize", {"model": ENCODER, "prompt": "a b"})
    assert there == {"count": 4, "max_model_len": 64, "tokens": [2, 4, 5, 3], "token_strs": None}
    assert embed(server, there["tokens"])[0] == pytest.approx(embed(server, "a b")[0], abs=1e-5)


def test_a_client_that_leaves_holds_nothing_up(server):
    address = urlsplit(server.url)
    body = json.dumps({"model": DECODER, "input": ["a b c d e f g h " * 60] * 500})
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    connection.close()
    assert len(embed(server, "text", DECODER)) == 1
    assert server.chat("Hi", max_tokens=1) is not None


def test_the_list_tells_what_models_are_for(server):
    _, reply = server.get("/v1/models")
    assert {each["id"]: each["kind"] for each in reply["data"]} == {
        CHAT: "generate",
        ENCODER: "embed",
        DECODER: "embed",
        RERANKER: "score",
        JUDGE: "score",
    }
