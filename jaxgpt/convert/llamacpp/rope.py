"""RoPE in llama.cpp metadata: the base, the rotated channels, and scaling."""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.llamacpp.architectures import Architecture
from jaxgpt.convert.llamacpp.divisors import ORIGINAL_CONTEXT, ROPE_DIVISORS
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import is_linear, linear_scaling

# Metadata that llama.cpp only prints, or reads only for YaRN scaling, which is rejected.
UNREAD = (ORIGINAL_CONTEXT, "rope.scaling.finetuned", "tensor_data_layout")
YARN = ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")


def read_rope(architecture: Architecture, options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read the base, the rotated channels, and linear scaling or the scaling that the divisors represent."""
    settings: dict[str, Any] = {"rope_theta": options.read("rope.freq_base", 10_000.0)}

    # Rotated channels.
    if architecture.rotates_part:
        rotated = options.read("rope.dimension_count", config.head_width)
        settings["rope_fraction"] = _fraction(rotated, config.head_width)
    else:
        options.only("rope.dimension_count", config.head_width)

    # Linear scaling, under its current or its old key.
    kind = options.read("rope.scaling.type", "linear")
    old_factor = options.read("rope.scale_linear", 0.0)
    factor = options.read("rope.scaling.factor", old_factor)
    if kind not in ("none", "linear"):
        raise options.refuse("rope.scaling.type", kind, "expected none or linear")
    options.skip(*UNREAD, *(f"rope.scaling.yarn_{name}" for name in YARN))
    scaled = kind == "linear" and factor not in (0.0, 1.0)
    if scaled:
        settings |= {"rope_factor": factor} | linear_scaling(config.block_size)

    if architecture.reads_divisors:
        divisors = options.read(ROPE_DIVISORS, {})
        if divisors and scaled:
            raise options.refuse("rope.scaling.factor", factor, f"{ROPE_DIVISORS} also scales RoPE")
        settings |= divisors
    return settings


def write_rope(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata of RoPE, and the settings of the scaling that divisors represent."""
    values: dict[str, Any] = {"rope.freq_base": config.rope_theta, "rope.dimension_count": config.rotary_width}
    if config.rope_factor == 1.0:
        return values
    if is_linear(config):
        return values | {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    if not architecture.reads_divisors or config.rope_scaling == "yarn":
        return values
    # A file has no other settings of the scaling: the lower and upper factors have their defaults.
    scaling = {"rope_factor": config.rope_factor, "rope_original_context": config.rope_original_context}
    return values | {ROPE_DIVISORS: scaling, ORIGINAL_CONTEXT: config.rope_original_context}


def _fraction(part: int, width: int) -> float:
    """Return the fraction of the channels of a head, such that `int(width * fraction) == part`."""
    fraction = part / width
    if int(width * fraction) < part:  # such as 26 of 46
        fraction = math.nextafter(fraction, math.inf)
    return fraction
