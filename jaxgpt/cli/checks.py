"""Checks of options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgpt.errors import UserError


def check_unused(options: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` if an option is set that has no effect.

    Args:
        options: value of each option, keyed by its name, such as --limit; an empty value, 0, False or None: not set.
        where: reason for no effect, such as "without --tasks".
    """
    for option, value in options.items():
        if value:
            raise UserError(f"{option} has no effect {where}: omit it")
