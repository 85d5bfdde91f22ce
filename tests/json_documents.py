"""Documents of `--json`, read as a strict reader would, and held against their schema."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from harness.core.report.documents import SCHEMA_FILE

SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def read(text: str) -> dict[str, Any]:
    """The one document that this is, with nothing before it and one end of line behind it."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text.encode("utf-8")
    assert text.endswith("}\n") and text.count("\n") == 1, text
    return json.loads(text, parse_constant=refused)


def wrong(document: dict[str, Any]) -> list[str]:
    """What the schema of its kind says against it; empty where it is valid."""
    kinds = {one["properties"]["document"]["const"]: one for one in SCHEMA["oneOf"]}
    of_its_kind = Draft202012Validator({**kinds[document["document"]], "$defs": SCHEMA["$defs"]})
    found = [f"{list(error.absolute_path)}: {error.message[:300]}" for error in of_its_kind.iter_errors(document)]
    assert VALIDATOR.is_valid(document) == (not found)
    return found


def valid(text: str, kind: str) -> dict[str, Any]:
    """The document, which is of this kind and as the schema says."""
    found = read(text)
    assert (found["document"], wrong(found)) == (kind, []), (wrong(found), text[:1000])
    return found
