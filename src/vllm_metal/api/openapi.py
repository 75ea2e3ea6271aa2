"""The API's description in OpenAPI 3.1, made from the wire types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from vllm_metal.api.errors import ErrorBody
from vllm_metal.api.request_body import RequestBody

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"

#: What can go wrong with any request, and with one that has a body.
_ERRORS = {
    401: "The API key is missing or unknown.",
    403: "This host or origin may not ask.",
    500: "The server is at fault.",
}
_BODY_ERRORS = {
    400: "The request can never be served as it stands; `param` names the field.",
    404: "The model is not served here.",
    408: "The request did not end in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or in an unknown encoding.",
    429: "Too many requests; `Retry-After` tells when to come back.",
    503: "No model is ready; `Retry-After` tells when to come back.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. A `reply` is a type of JSON bodies, or the media type of another kind.

    `bodies` are the types that the body may have, `events` those of a streamed reply's events: one,
    or several that go by their tags. `replies` are bodies of statuses other than 200 that are no `error`. An
    `open` one needs no API key.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    reply: type[Struct] | str
    bodies: tuple[type[RequestBody], ...] = ()
    events: tuple[type[Struct], ...] = ()
    query: type[Struct] | None = None
    error: type[Struct] = ErrorBody
    replies: Mapping[int, type[Struct]] = field(default_factory=dict)
    open: bool = False

    @property
    def types(self) -> set[type[Struct]]:
        types = {*self.bodies, *self.events, self.error, *self.replies.values()}
        return types | {self.reply} if isinstance(self.reply, type) else types


def document(operations: Iterable[Operation], *, version: str, with_keys: bool) -> Schema:
    """The document. `with_keys` tells whether the server asks for API keys."""
    operations = list(operations)
    types = set[type[Struct]]().union(*(each.types for each in operations))
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda each: each.__name__), ref_template=_REF
    )
    for body in {body for each in operations for body in each.bodies}:
        _add_what_decoding_knows(schemas[body.__name__], body)
    paths: dict[str, Schema] = {}
    for operation in operations:
        described = _describe(operation)
        if with_keys and not operation.open:
            described["security"] = [{"key": []}]
        paths.setdefault(operation.path, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-metal", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_what_decoding_knows(schema: Schema, body: type[RequestBody]) -> None:
    """A null field is an absent one, and some fields may hold nothing that asks for anything."""
    properties = schema["properties"]
    for name, each in properties.items():
        if name not in schema.get("required", ()) and {"type": "null"} not in each.get("anyOf", ()):
            default = {"default": each.pop("default")} if "default" in each else {}
            properties[name] = {"anyOf": [each, {"type": "null"}], **default}
    for name, neutral_values in body.unsupported.items():
        properties[name] = {
            "enum": [*neutral_values, None],
            "description": "Not supported yet: these values ask for nothing.",
        }
    for name in body.without_effect:
        properties[name] = {"description": "Accepted without effect."}


def _describe(operation: Operation) -> Schema:
    described: Schema = {"summary": operation.summary, "operationId": _operation_id(operation)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if parameters := [*map(_path_parameter, names), *_query_parameters(operation.query)]:
        described["parameters"] = parameters
    if operation.bodies:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _any_of(operation.bodies)}},
        }
    described["responses"] = _responses(operation, with_404=bool(names))
    return described


def _path_parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(query: type[Struct] | None) -> list[Schema]:
    if query is None:
        return []
    _, schemas = msgspec.json.schema_components([query], ref_template=_REF)
    properties = schemas[query.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


def _responses(operation: Operation, *, with_404: bool) -> Schema:
    content: Schema
    if isinstance(operation.reply, str):
        content = {operation.reply: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _any_of([operation.reply])}}
    if operation.events:
        content["text/event-stream"] = _events(operation.events)
    errors = _ERRORS | (_BODY_ERRORS if operation.bodies else {})
    if operation.query or (operation.method == "post" and with_404):
        errors = errors | {400: _BODY_ERRORS[400]}
    if with_404:
        errors = errors | {404: "There is none by this id."}
    if operation.open:
        errors = {status: errors[status] for status in errors if status != 401}
    responses: Schema = {"200": {"description": "Done.", "content": content}}
    for status, description in sorted(errors.items()):
        responses[str(status)] = _json(description, operation.error)
        if status in (429, 503):
            responses[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    for status, reply in operation.replies.items():
        responses[str(status)] = _json("Not now.", reply)
    return responses


def _events(types: tuple[type[Struct], ...]) -> Schema:
    # The schema is of no type: to some readers it is of the whole stream, to others of each event.
    if len(types) > 1:
        about = "Server-sent events, each by the name that is its `type`."
        return {"schema": {"description": about}, "x-event": _any_of(types)}
    about = f"Server-sent events. Each `data` is a {types[0].__name__}, an error, or `[DONE]`."
    return {"schema": {"description": about}, "x-event": _any_of([*types, ErrorBody])}


def _json(description: str, body: type[Struct]) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _any_of([body])}}}


def _any_of(types: Iterable[type[Struct]]) -> Schema:
    references: list[Schema] = [{"$ref": _REF.format(name=each.__name__)} for each in types]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _operation_id(operation: Operation) -> str:
    words = operation.path.strip("/").replace("{", "").replace("}", "").replace(".", "_")
    return "_".join([operation.method, *words.split("/")]).rstrip("_")
