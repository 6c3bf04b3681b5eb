"""Variables of a chat template that a user sets, such as `enable_thinking`: parse and check them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxgpt.errors import UserError, short_repr
from jaxgpt.strict_json import parse_json

SET_VARIABLES = ("messages", "tools", "add_generation_prompt")  # variables of chat templates that jaxgpt sets


def parse_variables(text: str, where: str) -> dict[str, Any]:
    """Parse the variables of a chat template, a JSON object; "": no variables.

    Raises:
        UserError: if the text is not a JSON object, or has the name of a variable that jaxgpt sets. The message begins with
            `where`.
    """
    variables = parse_json(text, where) if text else {}
    try:
        return check_variables(variables)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None


def check_variables(variables: Any) -> dict[str, Any]:
    """Check and copy the variables of a chat template.

    Raises:
        UserError: if they are not a mapping from names to JSON values, or have the name of a variable that jaxgpt sets.
    """
    if not isinstance(variables, Mapping):
        raise UserError(
            f'variables of a template must be an object such as {{"enable_thinking": false}}, not {short_repr(variables)}'
        )
    for name in variables:
        if not isinstance(name, str) or name in SET_VARIABLES:
            raise UserError(f"{short_repr(name)} cannot be set as a variable of a template: omit it")
    try:
        json.dumps(dict(variables), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise UserError(f"variables of a template must be JSON values ({e}): {short_repr(variables)}") from None
    return dict(variables)
