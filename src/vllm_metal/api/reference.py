"""The page `docs/api.md`, made from the wire types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import msgspec

from vllm_metal.api import message_errors
from vllm_metal.api.errors import HTTP_CODES, KINDS, http_body
from vllm_metal.api.openapi import Operation, Schema
from vllm_metal.api.request_body import RequestBody

_RULES = """\
Point any client of OpenAI's API at `http://localhost:8000/v1`, and any of Anthropic's at
`http://localhost:8000`. `/openapi.json` holds this page for programs.

A field is honoured or refused, never silently dropped: what is listed as not supported may only hold
values that ask for nothing. Fields that nobody knows are ignored, as OpenAI's clients expect, and a null
field counts as absent. `model` may be left out. Query strings are ignored but for those of lists.

- **Ids.** `X-Request-Id` is kept if it is printable ASCII of at most 128 characters, else made; it comes
  back in the headers and, behind `chatcmpl-` or `cmpl-`, as the id of the reply. Responses have ids of
  their own, since they can be asked for again.
- **Errors** are always `{"error": {"message", "type", "param", "code"}}`. In a stream that has begun, an
  error is one more event, before `[DONE]`; of a response it is `response.failed`.
- **Keys** come as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`.
- **Anthropic's API.** `/v1/messages` and what is below it have their errors in that API's shape:
  `{"type": "error", "error": {"type", "message"}, "request_id"}`. Tools of Anthropic's own are left out, and
  deferred ones are told where a message refers to them. Reasoning is off unless `thinking` says otherwise;
  what of it is not to be shown is in its signature, and comes back with that. Headers of bills in the system
  prompt are left out, since a prompt that begins anew each time finds no kept prefix. With `max_tokens` 0 the
  prompt is only read, which keeps it for the next one.
- **System messages** stay in their place. What the chat template does not take there is said by the user,
  between `<system>` and `</system>`. A user's words behind the result of a call join it, and reasoning the
  text that comes with a call, where the template takes them in no other way.
- **Structure.** One of `response_format`, the members of `structured_outputs` and the `guided_*` fields
  says what an answer must follow, whether `strict` or not; a schema that cannot be followed to the letter is
  refused with the reason. JSON has at most a space behind commas and colons unless `whitespace_pattern` or
  `disable_any_whitespace` says otherwise, and its numbers have at most 32 characters. Objects get no
  properties but those that their schema names, unless it says `additionalProperties` or combines several
  schemas, as `allOf` and `oneOf` do. An answer ends where nothing may follow; `finish_reason` is `length` for
  one that was cut off before.
- **Time limits.** `timeout` is in seconds, from the arrival of the body. A reply that has not begun ends
  with 408, and with `x-should-retry: false`, since OpenAI's clients would ask again; a stream begins as soon
  as its model is loaded, so from then on it is an event.
- **Waiting.** Streams carry a comment every ten seconds in which nothing else is sent. With
  `stream_options.include_progress` they tell by comments how far the request is from its first token.
- **Tools and reasoning.** `metal show` tells in which formats a model's calls and reasoning are read.
  Calls that `tool_choice` requires are enforced by grammar: names, and arguments by the tools' schemas; under
  `auto` too if one is `strict` and a single token begins calls. Reasoning comes as both `reasoning` and
  `reasoning_content`, and a message may bring either. Structures and stop strings hold for what is neither
  reasoning nor a call, and `thinking_token_budget` ends the reasoning.
- **Responses** are made by way of chats, so what holds for chats holds for them. They are kept for their
  API key, in memory and for a day at most: the oldest go once there are 4096 or they take 64 MiB.
  `previous_response_id` and items of type `item_reference` need what they name to be kept. Reasoning is
  told as `reasoning_text`, and summaries are not made; if `include` names `reasoning.encrypted_content` it
  comes sealed too, for clients that bring nothing else back. Tools of a `namespace` are called
  `namespace__name` in the prompt, and by their own names in replies. Tools of type `custom` take free text:
  the model is told of a grammar for that, but not held to it. Those that OpenAI runs itself are left out.
  `input_items` takes `limit`, `order` and `after`. With `truncation` `auto` the oldest turns are
  left out of a prompt that is too long, until the answer has room for `max_output_tokens` or a quarter of
  the context.
- **Embeddings.** `/v1/models` tells which models are for that: of kind `embed`, or `score` for those that
  compare. An input longer than the model reads, or than 8192 tokens unless `engine.max_model_len` says
  more, is refused; `truncate_prompt_tokens` has it cut, with -1 to what is read. `dimensions` is for models
  that were trained to have their vectors cut. `prompt_name` is one of the prompts in the model's folder;
  queries and documents that a model compares by its vectors get those of these names. Scores are what the
  model's makers meant them to be: often, but not always, between 0 and 1.
- **Leaving.** A client that closes its connection ends its request. Half a close looks the same on the
  wire and counts as one: keep the sending side open until the reply is there.
- **Rates.** `server.max_requests_per_minute` and `server.max_concurrent_requests` hold for each API key.
  A request too many is answered 429, with `Retry-After`; `x-ratelimit-limit-requests`,
  `x-ratelimit-remaining-requests` and `x-ratelimit-reset-requests` tell how much is left."""


_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minItems": "at least",
    "maxItems": "at most",
    "maxProperties": "at most",
    "minLength": "length at least",
    "maxLength": "length at most",
}


def markdown(operations: Iterable[Operation]) -> str:
    operations = list(operations)
    families = _families(operations)
    _, schemas = msgspec.json.schema_components(families, ref_template="{name}")
    lines = [
        "# The API",
        "",
        _RULES,
        "",
        "## Routes",
        "",
        "| Route | What it gives | Body |",
        "|---|---|---|",
    ]
    for each in operations:
        bodies = " or ".join(_link(body.__name__) for body in each.bodies)
        lines.append(f"| `{each.method.upper()} {each.path}` | {each.summary} | {bodies} |")
    lines += ["", "## Bodies"]
    for body in families:
        lines += ["", f"### {body.__name__}", "", *_body(body, schemas)]
    for name in sorted(schemas.keys() - {body.__name__ for body in families}):
        lines += ["", f"### {name}", "", *_fields(schemas[name], schemas[name]["properties"])]
    lines += ["", "## Errors", "", "| Status | `type` | `code` | Anthropic's `type` |", "|---|---|---|---|"]
    lines += [
        f"| {status} | `{error_type}` | {f'`{code}`' if code else ''} | `{message_errors.type_of(status)}` |"
        for status, error_type, code in _errors()
    ]
    return "\n".join(lines) + "\n"


def _families(operations: Iterable[Operation]) -> list[type[RequestBody]]:
    """The types of bodies, each behind the one that it extends."""
    lines = (reversed(body.__mro__) for operation in operations for body in operation.bodies)
    return list(dict.fromkeys(each for line in lines for each in line if issubclass(each, RequestBody)))


def _body(body: type[RequestBody], schemas: dict[str, Schema]) -> Iterator[str]:
    parent = body.__mro__[1]
    schema, inherited = schemas[body.__name__], {}
    unsupported, without_effect = dict(body.unsupported), set(body.without_effect)
    if issubclass(parent, RequestBody):
        inherited = schemas[parent.__name__]["properties"]
        unsupported = {name: unsupported[name] for name in unsupported.keys() - parent.unsupported.keys()}
        without_effect -= parent.without_effect
        yield f"All of {_link(parent.__name__)}, and:"
        yield ""
    own = {name: each for name, each in schema["properties"].items() if inherited.get(name) != each}
    yield from _fields(schema, own)
    if unsupported:
        yield ""
        yield "Not supported yet, with the values that may be sent all the same:"
        yield ""
        for name, neutral_values in sorted(unsupported.items()):
            values = ", ".join(f"`{json.dumps(value)}`" for value in (*neutral_values, None))
            yield f"- `{name}`: {values}"
    if without_effect:
        yield ""
        yield f"Accepted without effect: {', '.join(f'`{name}`' for name in sorted(without_effect))}."


def _fields(schema: Schema, properties: dict[str, Schema]) -> Iterator[str]:
    yield "| Field | Type | Default |"
    yield "|---|---|---|"
    for name, each in sorted(properties.items()):
        default = "required" if name in schema.get("required", ()) else ""
        if each.get("default") is not None:
            default = f"`{json.dumps(each['default'])}`"
        yield f"| `{name}` | {_type(each)} | {default} |"


def _type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "$ref" in schema:
        return _link(schema["$ref"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}{_limits(schema)}"
    return f"{schema.get('type', 'anything')}{_limits(schema)}"


def _limits(schema: Schema) -> str:
    found = [f"{word} {schema[key]}" for key, word in _LIMITS.items() if key in schema]
    return f" ({', '.join(found)})" if found else ""


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _errors() -> list[tuple[int, str, str | None]]:
    ours = {(kind.status, kind.type, kind.code) for kind in KINDS.values()}
    https = {(status, http_body(status, "").error.type, code) for status, code in HTTP_CODES.items()}
    return sorted(ours | https, key=lambda each: (each[0], each[2] or ""))
