"""The ranges of numbers that `/openapi.json` publishes are those that are enforced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from in_process import Reply, send, with_server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True},
    "/v1/completions": {"prompt": "Hi", "echo": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi"},
}
#: In place of a bound that there is none of.
FAR = 10**9
#: What must be so for any number to do.
BESIDE = {
    "best_of": lambda number: {"n": number},
    "min_tokens": lambda number: {"max_tokens": max(number, 1)},
}

Schema = dict[str, Any]
#: The path of a field, its schema, and the fields of a body in which it has a value.
Number = tuple[str, Schema, Callable[[float], dict[str, Any]]]


class Description:
    def __init__(self, document: Schema) -> None:
        self._document = document
        self._seen: set[str] = set()

    def body(self, path: str) -> Schema:
        content: Schema = self._document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        return self._resolved(content["schema"])

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def numbers(self, schema: Schema) -> Iterator[Number]:
        """Of an object, and of what is in it but for what needs other fields beside it."""
        for name, field in schema["properties"].items():
            for path, each, value in self._within(field):
                yield f"{name}{path}", each, lambda number, name=name, value=value: {name: value(number)}

    def _within(self, schema: Schema) -> Iterator[tuple[str, Schema, Callable[[float], Any]]]:
        if (name := schema.get("$ref")) in self._seen:
            return  # Some hold others of their kind.
        if name:
            self._seen.add(name)
        schema = self._resolved(schema)
        for each in schema.get("anyOf", ()):
            yield from self._within(each)
        match schema.get("type"):
            case "integer" | "number":
                yield "", schema, lambda number: number
            case "array":
                for path, each, value in self._within(schema.get("items", {})):
                    yield f"[]{path}", each, lambda number, value=value: [value(number)]
            case "object" if "properties" in schema:
                properties = schema["properties"]
                fixed = {name: each["enum"][0] for name, each in properties.items() if "enum" in each}
                for path, each, value in self.numbers(schema):
                    if {*schema.get("required", ())} <= {*fixed, path}:
                        yield f".{path}", each, lambda number, value=value: fixed | value(number)
            case "object" if isinstance(schema.get("additionalProperties"), dict):
                for path, each, value in self._within(schema["additionalProperties"]):
                    yield f"{{}}{path}", each, lambda number, value=value: {"5": value(number)}


def limits(schema: Schema) -> tuple[list[float], list[float]]:
    """The numbers just inside of the range, and just outside."""
    step = 1 if schema["type"] == "integer" else 1 / 1024
    least, above, most = map(schema.get, ("minimum", "exclusiveMinimum", "maximum"))
    inside, outside = [], []
    if least is None and above is None:
        inside.append(-FAR)
    else:
        inside.append(above + step if least is None else least)
        outside.append(above if least is None else least - step)
    inside.append(FAR if most is None else most)
    if most is not None:
        outside.append(most + step)
    return inside, outside


@pytest.mark.parametrize("path", BODIES)
def test_what_is_published_is_enforced(path: str) -> None:
    def talk(urls: list[str]) -> set[str]:
        def ask(fields: dict[str, Any]) -> Reply:
            return send(urls[0], "POST", path, {**BODIES[path], **fields})

        description = Description(send(urls[0], "GET", "/openapi.json").json)
        body = description.body(path)
        names = set()
        for name, schema, fields in description.numbers(body):
            names.add(name)
            inside, outside = limits(schema)
            for number in inside:
                beside = BESIDE.get(name, lambda _: {})(number)
                beside = {
                    other: each for other, each in beside.items() if "enum" not in body["properties"][other]
                }
                # There is no model: whatever has nothing wrong ends there.
                reply = ask(beside | fields(number))
                assert reply.status == 503, (name, number, reply.body)
            for number in outside:
                reply = ask(fields(number))
                assert reply.status == 400, (name, number, reply.body)
                assert re.split(r"[\[{]", name)[0] in reply.body.decode()
        return names

    found = with_server(talk)
    assert found >= {"temperature", "top_p", "top_k"}
    if path == "/v1/messages":
        assert "thinking.budget_tokens" in found
    else:
        assert found >= {"logit_bias{}", "allowed_token_ids[]", "seed", "min_tokens"}
