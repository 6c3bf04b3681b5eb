"""RoPE in llama.cpp metadata: the base, the rotated channels, and scaling."""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.llamacpp.architectures import Architecture
from jaxgpt.convert.llamacpp.divisors import ORIGINAL_CONTEXT, ROPE_DIVISORS
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import is_linear, linear_scaling

UNREAD = ("rope.scaling.finetuned", "tensor_data_layout")  # metadata that llama.cpp only prints
# Metadata that llama.cpp reads only for YaRN scaling, which is rejected; `divisors` also reads the original context.
YARN = (
    ORIGINAL_CONTEXT,
    *(
        f"rope.scaling.yarn_{name}"
        for name in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
    ),
)


def read_rope(architecture: Architecture, options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read the base, the rotated channels, and linear scaling or Llama 3 scaling.

    The value of the option `ROPE_DIVISORS` is the dict of the settings of Llama 3 scaling, which the tensor represents.
    """
    settings: dict[str, Any] = {"rope_theta": options.read("rope.freq_base", 10_000.0)}

    # Rotated channels.
    if architecture.rotates_part:
        rotated = options.read("rope.dimension_count", config.head_width)
        settings["rope_fraction"] = _fraction(rotated, config.head_width)
    else:
        options.only("rope.dimension_count", config.head_width)

    # Linear scaling, under its current or its old key. As in llama.cpp, a factor without a type is linear scaling.
    kind = options.read("rope.scaling.type", "linear")
    old_factor = options.read("rope.scale_linear", 0.0)
    factor = options.read("rope.scaling.factor", old_factor)
    if kind not in ("none", "linear"):
        raise options.refuse("rope.scaling.type", kind, "expected none or linear")
    options.skip(*UNREAD, *YARN)
    scaled = kind == "linear" and factor not in (0.0, 1.0)
    if scaled:
        settings |= {"rope_factor": factor} | linear_scaling(config.block_size)

    # Llama 3 scaling.
    if architecture.reads_divisors:
        divisors = options.read(ROPE_DIVISORS, {})
        if divisors and scaled:
            raise options.refuse("rope.scaling.factor", factor, f"{ROPE_DIVISORS} also scales RoPE")
        settings |= divisors
    return settings


def write_rope(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata of RoPE, and the option `ROPE_DIVISORS` for Llama 3 scaling: the inverse of `read_rope`.

    Scaling that the architecture lacks is omitted: `Family.express` reads the values back, and rejects the difference.
    """
    values: dict[str, Any] = {"rope.freq_base": config.rope_theta, "rope.dimension_count": config.rotary_width}
    is_scaled = config.rope_factor != 1.0
    if is_scaled and is_linear(config):
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    elif is_scaled and architecture.reads_divisors and config.rope_scaling == "llama3":
        # The divisors represent no other settings: the lower and upper factors have their defaults.
        represented = {"rope_factor": config.rope_factor, "rope_original_context": config.rope_original_context}
        values |= {ROPE_DIVISORS: represented, ORIGINAL_CONTEXT: config.rope_original_context}
    return values


def _fraction(part: int, width: int) -> float:
    """Return the fraction of the channels of a head, such that `int(width * fraction) == part`."""
    fraction = part / width
    if int(width * fraction) < part:  # such as 26 of 46
        fraction = math.nextafter(fraction, math.inf)
    return fraction
