"""Sliding windows in llama.cpp metadata: the window, the pattern of layers, and RoPE in layers with a window."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.llamacpp.architectures import SlidingWindows
from jaxgpt.convert.options import Options
from jaxgpt.convert.windows import period, repeated, window_letters

PATTERN = "attention.sliding_window_pattern"
MAX_PERIOD = 1024  # maximum length of a pattern; files of published models have at most 6


def read_windows(
    windows: SlidingWindows, options: Options, config: ModelConfig, default_theta: float
) -> dict[str, Any]:
    """Read the sliding window and its pattern. RoPE in layers with a window has a separate base, and no scaling."""
    window = options.read("attention.sliding_window", 0)
    value = options.take(PATTERN, windows.period)
    letters = _letters(value)
    if not letters:
        raise options.refuse(PATTERN, value, "it must be a period or a list of booleans")

    theta = options.read("rope.freq_base_swa", default_theta)
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        options.only(name, config.head_width)

    layers = period(repeated(letters, config.n_layer))
    if not window or "L" not in layers:
        return {}
    return {"sliding_window": window, "window_pattern": layers, "rope_local_theta": theta}


def write_windows(windows: SlidingWindows, config: ModelConfig, theta: float) -> dict[str, Any]:
    """Return the metadata of sliding windows; the default pattern is omitted."""
    values: dict[str, Any] = {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": theta}
    layers = window_letters(config)
    if layers != repeated(_pattern(windows.period), config.n_layer):
        # The key holds a length only, which means windows in all layers but the last of the pattern. `Family.express` reads
        # the value back, and rejects other patterns, such as GL.
        pattern = period(layers)
        values[PATTERN] = len(pattern) if "G" in pattern else 0
    return values


def _letters(value: Any) -> str:
    """Convert a pattern of layers, a period or a list of booleans, to L (window) and G; return "" for other values."""
    if type(value) is int and 0 <= value <= MAX_PERIOD:
        return _pattern(value)
    if isinstance(value, list) and value and all(type(each) is bool for each in value):
        return "".join("L" if each else "G" for each in value)
    return ""


def _pattern(length: int) -> str:
    """Return the pattern of a period: all layers but the last have a window; 0: all layers."""
    return "L" * (length - 1) + "G" if length else "L"
