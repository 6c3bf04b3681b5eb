"""Schedule of mixtures: the words of `data.mix`, and their meaning.

A mixture is a list of `PATH=WEIGHT`. A word `@TOKENS` begins the next mixture, after this number of training tokens:

    web=0.7 code=0.3 @1000000 web=0.2 code=0.3 math=0.5

If the first word is `@TOKENS`, training begins with `data.path` or the built-in text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxgpt.errors import UserError, short_repr

MIX_PARTS = 2**20  # maximum sum of the integer mixture weights, up to rounding
START = "@"  # first character of the word that begins a mixture


class Phase(NamedTuple):
    """A mixture, and the number of training tokens before it.

    Attributes:
        tokens: number of tokens in the training windows before the mixture.
        words: a `PATH=WEIGHT` for each source; empty: a single source, `data.path` or the built-in text.
    """

    tokens: int
    words: tuple[str, ...]


def split_phases(words: Sequence[str]) -> list[Phase]:
    """Split the words of `data.mix` into mixtures; without words, a single phase without words.

    Raises:
        UserError: if a word `@TOKENS` is malformed or not above the previous one, or no mixture follows.
    """
    starts = [0]
    groups: list[list[str]] = [[]]
    for word in words:
        if not word.startswith(START) or "=" in word:
            groups[-1].append(word)
            continue
        digits = word.removeprefix(START)
        if not re.fullmatch(r"\d{1,18}", digits) or int(digits) <= starts[-1]:
            raise UserError(f"data.mix needs ascending numbers of tokens, as in @1000000: {short_repr(word)}")
        starts.append(int(digits))
        groups.append([])

    for tokens, group in zip(starts[1:], groups[1:], strict=True):
        if not group:
            raise UserError(
                f"data.mix has no PATH=WEIGHT after {START}{tokens}: add the mixture, or omit {START}{tokens}"
            )
    return [Phase(tokens, tuple(group)) for tokens, group in zip(starts, groups, strict=True)]


def join_phases(phases: Sequence[Phase]) -> tuple[str, ...]:
    """Return the words of `data.mix` for mixtures in ascending order; the first begins at 0 tokens."""
    words: list[str] = []
    for phase in phases:
        if phase.tokens:
            words.append(f"{START}{phase.tokens}")
        words.extend(phase.words)
    return tuple(words)


def has_starts(words: Sequence[str]) -> bool:
    """Return whether the words of `data.mix` are a schedule of mixtures, not a single mixture."""
    return len(split_phases(words)) > 1


def path_of(word: str) -> str:
    """Return the path in `PATH=WEIGHT`."""
    path, _, _ = word.rpartition("=")
    return path


def with_paths(words: Sequence[str], new: Mapping[str, str]) -> tuple[str, ...]:
    """Replace paths in the words of `data.mix`; `new` maps old paths to new paths."""
    changed = []
    for word in words:
        path, equals, weight = word.rpartition("=")
        changed.append(f"{new.get(path, path)}{equals}{weight}" if equals else word)
    return tuple(changed)


def integer_weights(words: Sequence[str]) -> dict[str, int]:
    """Return the integer weight of each path of a mixture.

    The weights are multiplied by their common denominator if the sum is then at most `MIX_PARTS`. Otherwise, they are
    scaled to a sum of `MIX_PARTS`, and each weight is rounded to an integer of at least 1.

    Raises:
        UserError: if a word is not `PATH=WEIGHT` with a weight above 0 and at most 1e6, or a path occurs twice.
    """
    exact: dict[str, Fraction] = {}
    for word in words:
        path, _, weight = word.rpartition("=")
        if not path or not re.fullmatch(r"\d+\.?\d*|\.\d+", weight) or not 0 < float(weight) <= 1e6:
            raise UserError(f"data.mix needs PATH=WEIGHT with a weight above 0, at most 1e6: {short_repr(word)}")
        if path in exact:
            raise UserError(f"data.mix lists {path} twice: add up its weights")
        exact[path] = Fraction(weight)

    factor = math.lcm(*(weight.denominator for weight in exact.values()))
    total = sum(exact.values())
    if total * factor > MIX_PARTS:
        shares = {path: weight / total for path, weight in exact.items()}
        return {path: max(round(share * MIX_PARTS), 1) for path, share in shares.items()}
    return {path: max(round(weight * factor), 1) for path, weight in exact.items()}


def same_shares(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether two mixtures have the same sources with the same shares, in any order."""
    return _shares(one) == _shares(other)


def _shares(weights: Mapping[str, int]) -> dict[str, Fraction]:
    total = sum(weights.values())
    return {path: Fraction(weight, total) for path, weight in weights.items()}
