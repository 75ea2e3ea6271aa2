"""The `openai` package's parse helpers: facts out of a text, by a real model, into types."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import openai
import pytest
from pydantic import BaseModel

from server_process import ServerProcess

pytestmark = pytest.mark.slow


class Role(StrEnum):
    DOCTOR = "doctor"
    TEACHER = "teacher"
    PILOT = "pilot"


class Person(BaseModel):
    name: str
    age: int
    role: Role


class People(BaseModel):
    people: list[Person]


TEXT = "Ava Stone is a pilot and 25 years old. Tom Reed, aged 61, is a teacher."
ASKED = [{"role": "user", "content": f"Extract the people as JSON. Text: {TEXT}"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parses_whole_and_streamed_answers(client):
    asked = {"model": "smollm2", "messages": ASKED, "temperature": 0, "max_tokens": 200}
    whole = client.chat.completions.parse(response_format=People, **asked)
    people = whole.choices[0].message.parsed
    assert people.people
    assert "Ava" in people.people[0].name
    with client.chat.completions.stream(response_format=People, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == people


def test_an_answer_that_is_cut_off_is_told_as_such(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="smollm2", messages=ASKED, response_format=People, max_tokens=5, temperature=0
        )


def test_a_type_that_cannot_be_followed(client):
    schema = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(
            model="smollm2", messages=ASKED, response_format={"type": "json_schema", "json_schema": schema}
        )
    assert refused.value.param == "response_format"
