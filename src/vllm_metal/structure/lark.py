"""Grammars of every kind as llguidance takes them: a Lark grammar or a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from vllm_metal.structure import json_schema
from vllm_metal.structure.grammar import Grammar

_ANY_TEXT = r"/(.|\n)*/"


def translate(grammar: Grammar, special_token_ids: Mapping[str, int]) -> str:
    """llguidance's own format. Raises ValueError for a source that cannot be read as its kind.

    `special_token_ids` are the tokens that no text in quotes ever matches.
    """
    match grammar.kind:
        case "json_schema":
            body: dict[str, Any] = {"json_schema": json.loads(grammar.source)}
        case "regex":
            [body] = json.loads(LLMatcher.grammar_from_regex(grammar.source))["grammars"]
        case "choice":
            # One terminal, not a rule with so many alternatives.
            choices = " | ".join(map(json.dumps, json.loads(grammar.source)))
            body = {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}
        case "grammar":
            body = {"lark_grammar": _any_to_lark(grammar.source)}
        case "structural_tag":
            body = {"lark_grammar": _tags(json.loads(grammar.source), special_token_ids)}
        case "lark":
            body = {"lark_grammar": grammar.source}
    if not grammar.prefix:
        return json.dumps({"grammars": [body]})
    start = {"name": "start", "lark_grammar": f"start: {grammar.prefix} @answer"}
    return json.dumps({"grammars": [start, {**body, "name": "answer"}]})


def literal(text: str, special_token_ids: Mapping[str, int]) -> str:
    """Lark for exactly `text`, in which special tokens stand for themselves."""
    return " ".join(_literals(text, special_token_ids))


def _literals(text: str, special_token_ids: Mapping[str, int]) -> list[str]:
    found = [(place, name) for name in special_token_ids if (place := text.find(name)) >= 0]
    if not found:
        return [json.dumps(text)] if text else []
    # The longest of those that begin first.
    place, name = min(found, key=lambda each: (each[0], -len(each[1])))
    before, after = text[:place], text[place + len(name) :]
    return [
        *([json.dumps(before)] if before else []),
        f"<[{special_token_ids[name]}]>",
        *_literals(after, special_token_ids),
    ]


def _any_to_lark(source: str) -> str:
    try:
        lark: str = any_to_lark(source)
    # Its reader of GBNF raises bare exceptions.
    except Exception as exc:
        raise ValueError(f"the grammar is neither GBNF nor Lark: {exc}") from exc
    return lark


def _tags(asked: dict[str, Any], special_token_ids: Mapping[str, int]) -> str:
    """Free text, in which each of `triggers` begins one of the `structures` whose beginning it is."""

    def as_lark(text: str) -> str:
        return literal(text, special_token_ids)

    triggers: list[str] = asked["triggers"]
    structures: list[dict[str, Any]] = asked["structures"]
    rules = [
        "start: (" + " | ".join(f"tags_{i}" for i in range(len(triggers))) + ")* text",
        f"text: {_ANY_TEXT}",
    ]
    for structure in structures:
        if not any(structure["begin"].startswith(trigger) for trigger in triggers):
            raise ValueError(f"{json.dumps(structure['begin'])} begins with none of the triggers")
    for i, trigger in enumerate(triggers):
        tags = [structure for structure in structures if structure["begin"].startswith(trigger)]
        if not tags:
            raise ValueError(f"no structure begins with the trigger {json.dumps(trigger)}")
        rules += _triggered(i, trigger, tags, as_lark)
    return "\n".join(rules)


def _triggered(i: int, trigger: str, tags: list[dict[str, Any]], as_lark: Callable[[str], str]) -> list[str]:
    beginning = as_lark(trigger)
    if beginning.startswith("<["):
        # Text ends by itself at a special token.
        rules = [f"begin_{i}: text {beginning}"]
    else:
        rules = [f"begin_{i}[lazy]: {_ANY_TEXT} {beginning}"]
    bodies = [
        " ".join(
            (
                as_lark(tag["begin"].removeprefix(trigger)),
                f"%json {json.dumps(json_schema.bounded(tag['schema']))}",
                as_lark(tag["end"]),
            )
        )
        for tag in tags
    ]
    return [*rules, f"tags_{i}: begin_{i} (" + " | ".join(f"tag_{i}_{j}" for j in range(len(tags))) + ")"] + [
        f"tag_{i}_{j}: {body}" for j, body in enumerate(bodies)
    ]
