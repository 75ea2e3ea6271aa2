"""What a request says its answer must follow: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vllm_metal.errors import InvalidRequest
from vllm_metal.structure import json_schema
from vllm_metal.structure.grammar import Grammar

Choices = Annotated[list[str], Meta(min_length=1, max_length=65_536)]
Schema = dict[str, Any]


class NamedSchema(Struct):
    schema: Schema = msgspec.field(default_factory=dict)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Structure(Struct):
    """`begin`, then JSON that follows `schema`, then `end`."""

    begin: Annotated[str, Meta(min_length=1)]
    schema: Schema
    end: str = ""


class StructuralTag(Struct):
    """Free text in which each of `triggers` begins one of `structures`."""

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=1024)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class StructuralTagFormat(StructuralTag, tag_field="type", tag="structural_tag"):
    pass


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(Struct):
    """Schemas and tags may come as text. Unless told otherwise, JSON has whitespace at most behind commas and
    colons, a space.
    """

    json: Schema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    def grammars(self, param: str = "structured_outputs.") -> list[Grammar]:
        """One for each thing asked for; `param` is what their names begin with. Raises InvalidRequest."""
        found = []
        if self.json is not None:
            schema = _parsed(self.json, Schema, f"{param}json")
            closed = bool(self.disable_additional_properties)
            found.append(_of_schema(schema, f"{param}json", self._json_options, closed=closed))
        if self.json_object:
            found.append(_of_schema({"type": "object"}, f"{param}json_object", self._json_options))
        if self.regex is not None:
            found.append(Grammar("regex", self.regex, param=f"{param}regex"))
        if self.choice is not None:
            found.append(Grammar("choice", _json(self.choice), param=f"{param}choice"))
        if self.grammar is not None:
            found.append(Grammar("grammar", self.grammar, param=f"{param}grammar"))
        if self.structural_tag is not None:
            tag = _parsed(self.structural_tag, StructuralTag, f"{param}structural_tag")
            found.append(Grammar("structural_tag", _json(tag), param=f"{param}structural_tag"))
        return found

    @property
    def _json_options(self) -> dict[str, Any]:
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        if self.whitespace_pattern is not None:
            return {"whitespace_pattern": self.whitespace_pattern}
        return json_schema.OPTIONS


def of_response_format(asked: ResponseFormat) -> Grammar | None:
    """None where any text will do."""
    match asked:
        case JsonObjectFormat():
            return _of_schema({"type": "object"}, "response_format")
        case JsonSchemaFormat(json_schema):
            return _of_schema(json_schema.schema, "response_format")
        case StructuralTagFormat():
            return Grammar("structural_tag", _json(asked), param="response_format")
    return None


def _of_schema(
    schema: Schema, param: str, options: dict[str, Any] = json_schema.OPTIONS, *, closed: bool = False
) -> Grammar:
    bounded = json_schema.bounded(schema, options, in_any_case=closed)
    return Grammar("json_schema", _json(bounded), param=param)


def _parsed(value: Any, kind: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest(f"`{param}`: {exc}", param=param) from exc


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
