"""instructor: a type out of a text, by a required call and by a schema, whole and in pieces."""

from __future__ import annotations

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


FACTS = {"name": "Ava Stone", "age": 25}
client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked = {
    "model": "smollm2",
    "response_model": Person,
    "messages": [
        {
            "role": "user",
            "content": "Extract the person as JSON. Text: Ava Stone is a pilot and 25 years old.",
        }
    ],
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 1,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    extracting = instructor.from_openai(client, mode=mode)
    person = extracting.create(**asked)
    assert isinstance(person, Person)
    assert person.model_dump() == FACTS, mode
    pieces = list(extracting.create_partial(**asked))
    assert pieces[-1].model_dump() == FACTS, mode
    assert pieces[0] != pieces[-1], mode
