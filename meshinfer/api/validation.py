"""What pydantic finds wrong with a client's input, as all our errors say it: what it is, and what was expected. Pure.

Of what a client sent, numbers and words are shown, and only the size of anything longer: it may be a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshinfer.api.errors import BadParameter, UnsupportedParameter
from meshinfer.api.sse import to_json

SHOWN_CHARACTERS = 32
"""Enough for the name of a model or a role."""

_WHOLE, _NUMBER, _OBJECT = "a whole number", "a number", "an object"

# By pydantic's name of what is wrong; in braces, what it says of the bound.
_EXPECTED: Mapping[str, str] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length}",
    "string_too_long": "at most {max_length}",
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    # Ours, which brings its own words for what it is.
    "part": "text parts, and no others",
}


def bad_parameter(error: ValidationError) -> BadParameter:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    param = ".".join(str(part) for part in first["loc"])
    if kind == "extra_forbidden":
        return UnsupportedParameter(param, f"unknown parameter '{param}'", do="leave it out")
    if kind == "missing":
        return BadParameter(param, f"'{param}' is missing", do="add it")
    bounds = {name: _short(bound) for name, bound in first.get("ctx", {}).items()}
    is_of_size = kind.endswith(("too_short", "too_long"))
    what = bounds.get("what") or (f"has {_size(value)}" if is_of_size else f"is {shown(value)}")
    return BadParameter(param, f"'{param}' {what}", expected=_EXPECTED.get(kind, "").format(**bounds))


def _short(bound: Any) -> Any:
    """10, where pydantic says 10.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def shown(value: Any) -> str:
    """A JSON value in an error."""
    if isinstance(value, dict):
        return _OBJECT
    if isinstance(value, list):
        return f"a list of {_size(value)}"
    text = repr(value) if isinstance(value, str) else to_json(value).decode()
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"a text of {_size(value)}" if isinstance(value, str) else f"{text[:SHOWN_CHARACTERS]}…"


def _size(value: Any) -> str:
    one, many = ("character", "characters") if isinstance(value, str) else ("entry", "entries")
    return f"{len(value)} {one if len(value) == 1 else many}"
