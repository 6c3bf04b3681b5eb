"""Settings: dataclass fields declared with default, help and limits, and their validation."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

from jaxgpt.errors import UserError, short_repr
from jaxgpt.suggestions import did_you_mean

INF = math.inf
INT_MAX = 2**31 - 1
MAX_VOCAB = 2**24  # maximum vocab_size; published models: at most about 2**18
MAX_TOKENS = 2**24  # maximum number of tokens of a generated text; equals the maximum block_size


class Limits(NamedTuple):
    """Range of a number; `above` and `below` are exclusive.

    A float must be finite even without limits; `setting` limits an int to 32 bits.
    """

    low: float = -INF
    high: float = INF
    above: float = -INF
    below: float = INF


def setting(
    default: Any,
    about: str,
    low: float = -INF,
    high: float = INF,
    *,
    above: float = -INF,
    below: float = INF,
    private: bool = False,
) -> Any:
    """Declare a field of a `Section`: `setting(4, "number of blocks", 1, 1024)`.

    `private`: the value, such as a path, stays out of model cards.
    """
    if type(default) is int:
        low = max(low, -INT_MAX - 1)
        high = min(high, INT_MAX)
    limits = Limits(low, high, above, below)
    return field(default=default, metadata={"help": about, "limits": limits, "private": private})


@dataclass(frozen=True)
class Section:
    """Base class of settings; a new instance converts and checks its values.

    The error for an invalid value contains the setting, the value, and the expected type or limits. Numbers of any kind
    (Python's, NumPy's, 0-d arrays) become `int` and `float`, so that equal settings share a compiled program.
    """

    prefix = ""  # section in names such as train.steps; empty: names without a section

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Suggest a name in the error for an unknown setting, as in `ModelConfig(n_layers=2)`."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise UserError(f"{cls.__name__} has no setting {name!r}{did_you_mean(name, names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        for each in fields(self):
            name = f"{self.prefix}.{each.name}" if self.prefix else each.name
            limits = each.metadata.get("limits", Limits())
            value = _checked(name, getattr(self, each.name), kinds[each.name], limits)
            object.__setattr__(self, each.name, value)
        for name, value in self.converted().items():
            object.__setattr__(self, name, value)
        problem = next(iter(self.check()), "")
        if problem:
            raise UserError(problem)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with changed values, keyed by field."""
        return replace(self, **values)

    def converted(self) -> Mapping[str, Any]:
        """Return the values to store for fields that accept several types, keyed by field; called before `check`."""
        return {}

    def check(self) -> Iterable[str]:
        """Yield error messages, such as for conflicting settings; the first is raised as `UserError`."""
        return ()


def _kinds(section: Any) -> dict[str, Any]:
    """Return the type of each field of a section.

    Each call looks up the named Literals, such as `model_settings.ActivationName`, because a program may extend them.
    """
    module = vars(sys.modules[section.__module__])
    named = tuple(module.get(str(each.type)) for each in fields(section))  # annotations are strings
    return _type_hints(section, named)


@lru_cache(maxsize=64)
def _type_hints(section: type, named: tuple[Any, ...]) -> dict[str, Any]:
    """Return the type hints of a section; `named`, the types in its annotations, is only part of the cache key."""
    return get_type_hints(section)


def _checked(name: str, value: Any, kind: Any, limits: Limits) -> Any:
    """Check the value of a setting of type `kind`; convert numbers of any type, and lists to tuples.

    Raises:
        UserError: if the value has the wrong type or is not allowed.
    """
    if kind == int | None:
        return None if value is None else _checked_number(name, value, int, limits)
    if get_origin(kind) is Literal:
        return _checked_choice(name, value, get_args(kind))
    if kind in (int, float):
        return _checked_number(name, value, kind, limits)
    if kind == tuple[str, ...]:
        return _checked_words(name, value)

    if isinstance(kind, type) and type(value) is not kind:
        raise UserError(f"{name} must be of type {kind.__name__}, not {short_repr(value)}")
    if isinstance(value, str):
        check_text(name, value)
    return value


def _checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {short_repr(value)}{near}")
    return value


def _checked_number(name: str, value: Any, kind: type, limits: Limits) -> float:
    number = _number(value, kind)
    if number is None:
        raise UserError(f"{name} must be {'an integer' if kind is int else 'a number'}, not {short_repr(value)}")
    violated = _violated_limits(number, limits)
    if violated:
        raise UserError(f"{name} must be {violated}, not {short_repr(value)}")
    return number


def _checked_words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
        raise UserError(f"{name} must be a list of strings, not {short_repr(value)}")
    for word in value:
        check_text(name, word)
    return tuple(value)


def as_int(name: str, value: Any, low: int, high: int) -> int:
    """Convert an integer of any type to `int`; bools, floats and values outside `[low, high]` are errors."""
    return int(_checked_number(name, value, int, Limits(low, high)))


def check_text(name: str, value: str) -> None:
    """Raise `UserError` if a string has a NUL or an unpaired surrogate (from a non-UTF-8 byte)."""
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise UserError(f"{name} {short_repr(value)} contains a NUL or an unpaired surrogate: use UTF-8 text")


def _number(value: Any, kind: type) -> float | None:
    """Convert a Python number, NumPy scalar or 0-d array to `kind`; return None for other values."""
    is_array = getattr(value, "shape", None) == () and value.dtype.kind in "iuf"
    if isinstance(value, bool) or not (isinstance(value, Real) or is_array):
        return None
    try:
        return operator.index(value) if kind is int else float(value)
    except TypeError:
        return None
    except OverflowError:
        return INF


def _violated_limits(value: float, limits: Limits) -> str:
    """Return the limits, such as "at least 0 and below 1", if `value` violates them; otherwise "".

    NaN violates all limits. A large limit is omitted unless violated, because it is far from any sensible value.
    """
    low, high, above, below = limits
    if low <= value <= high and above < value < below:
        return ""
    bounds = (
        ("at least", low, not value >= low),
        ("above", above, not value > above),
        ("at most", high, not value <= high),
        ("below", below, not value < below),
    )
    allowed = []
    for word, limit, is_violated in bounds:
        is_large = abs(limit) >= 1e6
        if abs(limit) < INF and (is_violated or not is_large):
            shown = str(limit) if isinstance(limit, int) else f"{limit:g}"
            allowed.append(f"{word} {shown}")
    if not abs(value) < INF:
        allowed.append("finite")
    return " and ".join(allowed)
