"""Calls of functions in messages: convert the forms in data sets to a single form, and list the names of functions.

The form matches OpenAI's `tool_calls`. The descriptions of the functions are the `tools` of a conversation (`chat.records`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxgpt.data.files.lenient_json import parse_field, repeats_key
from jaxgpt.errors import UserError, short_repr

# Other names for the arguments of a call in data sets; templates read only `arguments`.
ARGUMENTS = ("parameters", "args", "input", "kwargs")


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Convert calls to `{"type": "function", "function": {"name": ..., "arguments": ...}}`, with any other fields.

    Args:
        calls: a call, a list of calls, or their JSON; a call may also be the function alone.
        where: the message, such as "message 2", for errors.

    Raises:
        UserError: if JSON is invalid, or a call lacks a name, has arguments under a different name or of a wrong type, or has
            a duplicate key.
    """
    calls = parse_field(calls, f"the call of {where}")
    if not isinstance(calls, list):
        calls = [calls]
    converted = list[dict[str, Any]]()
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{where} has a call without the name of a function: {short_repr(call)}; add the name")
        others = {}  # fields next to the function, such as an id
        if function is not call:
            others = {name: value for name, value in call.items() if value is not None}
        _check_arguments(function, where)
        arguments = _arguments(function.get("arguments"), where)
        converted.append({**others, "type": "function", "function": {**function, "arguments": arguments}})
    return converted


def _check_arguments(function: Mapping[str, Any], where: str) -> None:
    """Check that the arguments of a call have the name `arguments`: under a different name, they would be lost."""
    if function.get("arguments") is not None:
        return
    for name in ARGUMENTS:
        if function.get(name):
            raise UserError(
                f"{where} has a call with {name!r} instead of 'arguments': rename this field to 'arguments'"
            )


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """Check the arguments of a call, an object or its JSON, and return them unchanged; return {} if they are missing."""
    if arguments is None or arguments == "":
        return {}
    parsed = parse_field(arguments, f"the arguments of a call of {where}")
    if not isinstance(parsed, dict):
        raise UserError(
            f"{where} has a call with arguments that are not an object: {short_repr(arguments)}; write an object"
        )
    if repeats_key(parsed):
        raise UserError(f"{where} has a call with a key that is given twice: {short_repr(parsed)}; remove one")
    return arguments if isinstance(arguments, str) else parsed


def with_names(functions: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Copy descriptions of functions, or calls, with new names.

    Args:
        functions: descriptions of functions, or calls.
        names: new names, keyed by old name; other names are unchanged.
    """
    renamed = list[Mapping[str, Any]]()
    for item in functions:
        match item:
            case {"function": {"name": str(name)} as function}:
                renamed.append({**item, "function": {**function, "name": names.get(name, name)}})
            case {"name": str(name)} if "function" not in item:
                renamed.append({**item, "name": names.get(name, name)})
            case _:
                renamed.append(item)
    return renamed


def function_names(functions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names in descriptions of functions, or in calls; a description may have no name."""
    names = set[str]()
    for item in functions:
        match item.get("function", item):
            case {"name": str(name)}:
                names.add(name)
    return names
