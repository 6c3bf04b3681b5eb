"""Chat templates of exported models: the variables of a run become defaults of the template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.data.tokenizers.special import SpecialTokens

NULL = ("documents",)  # variables that transformers sets to none if the caller does not pass them


def with_default_variables(
    special: SpecialTokens, variables: Mapping[str, Any], always: Collection[str] = ()
) -> SpecialTokens:
    """Return special tokens with chat templates that use `variables` unless the caller passes other values.

    Args:
        special: special tokens of a model, with its chat templates.
        variables: variables of the run.
        always: names of variables that a program sets for the exported model, even if its caller passes no value. The template
            overrides these variables, as well as names of tokens, with the values of the run.
    """
    templates = special.tokenizer.get("chat_template")
    overridden = {*always, *special.variables}
    changed: Any
    if isinstance(templates, str):
        changed = _prefixed(templates, variables, overridden)
    elif isinstance(templates, list):
        changed = [each | {"template": _prefixed(each["template"], variables, overridden)} for each in templates]
    else:
        return special
    tokenizer = dict(special.tokenizer) | {"chat_template": changed}
    return SpecialTokens(special.generation, tokenizer, special.missing)


def definition(name: str, value: Any) -> str:
    """Return the Jinja statement that sets a variable to a JSON value."""
    return f"{{% set {name} = {_literal(value)} %}}"


def _prefixed(source: str, variables: Mapping[str, Any], overridden: Collection[str]) -> str:
    """Return a template that begins with a definition of each of the variables that it reads.

    Variables outside `overridden` are defined only if the caller does not pass them.
    """
    read = ChatTemplate(source).names
    lines = []
    for name, value in variables.items():
        if name not in read:
            continue
        statement = definition(name, value)
        if name not in overridden:
            missing = f"{name} is not defined"
            if name in NULL:
                missing += f" or {name} is none"
            statement = f"{{% if {missing} %}}{statement}{{% endif %}}"
        lines.append(statement + "\n")  # Jinja removes a line break after a statement
    return "".join(lines) + source


def _literal(value: Any) -> str:
    """Format a JSON value as a Jinja expression."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        entries = [f"{_literal(name)}: {_literal(each)}" for name, each in value.items()]
        return f"{{{', '.join(entries)}}}"
    return json.dumps(value, ensure_ascii=False)
