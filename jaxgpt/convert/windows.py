"""Sliding windows: the option `layer_types` of config.json, and patterns of layers.

A pattern has a letter per layer, L for a sliding window and G for none, and is repeated over the layers.
"""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.options import Options

LETTERS = {"full_attention": "G", "sliding_attention": "L"}  # map from layer_types to letters of window_pattern


def read_windows(options: Options, n_layer: int, window: int, pattern: str) -> dict[str, Any]:
    """Return the settings of the sliding window, from `layer_types` or, by default, from `pattern`.

    The result is {} if no layer has a window. Raises `UserError` if `layer_types` is invalid, or a layer needs a window and
    `window` is below 1.
    """
    kinds = options.read("layer_types", [])
    if kinds:
        if len(kinds) != n_layer or any(kind not in [*LETTERS] for kind in kinds):
            raise options.refuse(
                "layer_types", kinds, f"it must list {n_layer} layers, each one of {', '.join(LETTERS)}"
            )
        pattern = "".join(LETTERS[kind] for kind in kinds)
    pattern = period(repeated(pattern, n_layer))
    if "L" not in pattern:
        return {}
    if window < 1:
        raise options.refuse("sliding_window", window, "layers of type sliding_attention need a window of at least 1")
    return {"sliding_window": window, "window_pattern": pattern}


def layer_types(config: ModelConfig) -> list[str]:
    """Return the kind of attention of each layer, for transformers' option `layer_types`."""
    return ["sliding_attention" if window else "full_attention" for window in config.windows]


def window_letters(config: ModelConfig) -> str:
    """Return the letter of each layer of a model."""
    return "".join("L" if window else "G" for window in config.windows)


def repeated(pattern: str, n_layer: int) -> str:
    """Return a pattern, repeated and truncated to the letters of `n_layer` layers."""
    repeats = math.ceil(n_layer / len(pattern))
    return (pattern * repeats)[:n_layer]


def period(pattern: str) -> str:
    """Return the shortest prefix of a pattern that, when repeated and truncated, equals the pattern."""
    for n in range(1, len(pattern)):
        if pattern[n:] == pattern[:-n]:
            return pattern[:n]
    return pattern
