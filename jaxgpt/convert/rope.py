"""Settings of RoPE in config.json: default, linear scaling and Llama 3 scaling."""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.options import Options


def read_rope(options: Options, config: ModelConfig, theta: float = 10_000.0) -> dict[str, Any]:
    """Read `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (transformers 4).

    Args:
        options: the options.
        config: the settings read so far.
        theta: default of `rope_theta` in transformers.
    """
    old = {"rope_theta": options.read("rope_theta", theta)}
    new = options.read("rope_parameters", {})
    rope = merged_rope(options, old, new)
    return rope_settings(options, rope, config.block_size)


def merged_rope(options: Options, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge RoPE options: `new` (`rope_parameters`) overrides `old`, and must agree with `rope_scaling`."""
    scaling = options.read("rope_scaling", {})
    rope: dict[str, Any] = old | scaling | new
    if any(rope[name] != value for name, value in scaling.items()):
        raise options.refuse("rope_scaling", scaling, "it contradicts rope_parameters")
    return rope


def rope_settings(options: Options, rope: dict[str, Any], block_size: int) -> dict[str, Any]:
    """Convert the RoPE options of one layer type to model settings."""
    inner = options.inner("rope_parameters", rope)
    kinds = {name: name for name in ("default", "linear", "llama3")}
    kind = inner.choice("rope_type", kinds, inner.read("type", "default"))
    inner.only("partial_rotary_factor", 1.0)
    settings: dict[str, Any] = {"rope_theta": inner.read("rope_theta", float)}
    if kind != "default":
        settings["rope_factor"] = inner.read("factor", float)
    if kind == "llama3":
        settings |= {
            "rope_low_freq_factor": inner.read("low_freq_factor", float),
            "rope_high_freq_factor": inner.read("high_freq_factor", float),
            "rope_original_context": inner.read("original_max_position_embeddings", block_size),
        }
    if kind == "linear":
        settings |= linear(block_size)
    inner.skip("original_max_position_embeddings")  # option used only by Llama 3 scaling
    inner.done()
    return settings


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Convert a model's RoPE settings to `rope_parameters` (of the global layers, for Gemma 3)."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_factor == 1.0:
        return rope
    if is_linear(config):
        return rope | {"rope_type": "linear", "factor": config.rope_factor}
    return rope | {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_context,
    }


def linear(block_size: int) -> dict[str, Any]:
    """Express linear scaling as Llama 3 scaling of wavelengths above 1; the shortest wavelength is 2 pi."""
    return {
        "rope_low_freq_factor": float(block_size),
        "rope_high_freq_factor": 2.0 * block_size,
        "rope_original_context": block_size,
    }


def is_linear(config: ModelConfig) -> bool:
    """Return whether Llama 3 scaling is linear: the full factor applies even to the shortest wavelength."""
    return config.rope_low_freq_factor >= config.rope_original_context / (2 * math.pi)
