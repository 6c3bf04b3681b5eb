"""llama.cpp metadata: a `Family` for each architecture, with metadata keys as its options, for import and export.

Some settings have no key. For them, names of tensors (`HEAD`, `OUTPUT_BIAS`, `QUERY_BIAS`, `ROPE_DIVISORS`) are options, too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family, period
from jaxgpt.convert.llamacpp.architectures import SOFTCAP, WIDTH, Architecture, SlidingWindows
from jaxgpt.convert.llamacpp.divisors import ORIGINAL_CONTEXT, ROPE_DIVISORS
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import is_linear, linear_scaling

HEAD = "output.weight"
OUTPUT_BIAS = "blk.0.attn_output.bias"
QUERY_BIAS = "blk.0.attn_q.bias"
PATTERN = "attention.sliding_window_pattern"
MAX_PERIOD = 1024  # maximum length of a pattern; files of published models have at most 6
# Metadata keys, without the name of the architecture: (setting, default of llama.cpp, or type if the key is required).
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", int),
    "context_length": ("block_size", int),
    "block_count": ("n_layer", int),
    "embedding_length": ("n_embd", int),
    "attention.head_count": ("n_head", int),
    "attention.head_count_kv": ("n_kv_head", 0),
    "attention.key_length": ("head_dim", 0),
}
OF_EXPERTS: dict[str, tuple[str, Any]] = {
    "expert_count": ("n_experts", int),
    "expert_used_count": ("experts_per_token", int),
}
ONLY = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}
# Metadata that llama.cpp only prints, or reads only for YaRN scaling, which is rejected.
UNREAD = (ORIGINAL_CONTEXT, "rope.scaling.finetuned", "tensor_data_layout")
YARN = ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")


def family(architecture: Architecture) -> Family:
    """Return a family with metadata keys, and names of tensors that show a setting, as its options."""
    keys = KEYS | {architecture.width: ("n_inner", int), architecture.eps: ("norm_eps", float)}
    fixed: dict[str, Any] = {"activation": architecture.activation}
    if architecture.normalized is not None:
        keys |= OF_EXPERTS
        fixed["router_normalize"] = architecture.normalized
    keys |= architecture.more_keys

    return architecture.family._replace(
        name=f"llama.cpp {architecture.name}",
        options=keys,
        settings=architecture.family.settings | fixed,
        only={key: value for key, value in ONLY.items() if key not in keys},
        read=partial(_read, architecture),
        write=partial(_write, architecture),
    )


def _read(architecture: Architecture, options: Options, config: ModelConfig) -> dict[str, Any]:
    """Return the settings that the table of keys lacks: the inverse of `_write`."""
    options.only("attention.value_length", config.head_width)
    if architecture.width != WIDTH:
        options.skip(WIDTH)  # the width of layers without experts
    settings = _read_biases(options)
    if config.positions == "rope":
        settings |= _read_rope(architecture, options, config)
    if architecture.windows:
        theta = architecture.windows.theta or settings["rope_theta"]
        settings |= _read_windows(architecture.windows, options, config, theta)
    return settings


def _write(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata and facts that the table of keys lacks: the inverse of `_read`."""
    values: dict[str, Any] = {
        HEAD: not config.tie_embeddings,
        OUTPUT_BIAS: config.bias,
        QUERY_BIAS: config.bias or config.qkv_bias,
        "attention.value_length": config.head_width,
    }
    if architecture.width != WIDTH:
        values[WIDTH] = config.mlp_width
    if SOFTCAP in architecture.more_keys:
        values[SOFTCAP] = config.logit_softcap or None  # None: the file has no such key
    if config.positions == "rope":
        values |= _write_rope(architecture, config)
    if architecture.windows and any(config.windows):
        theta = config.rope_local_theta or config.rope_theta
        values |= _write_windows(architecture.windows, config, theta)
    return values


def _read_biases(options: Options) -> dict[str, Any]:
    """Read whether the file has a separate head, all biases, or only the biases of queries, keys and values."""
    all_biases = options.read(OUTPUT_BIAS, False)
    query_bias = options.read(QUERY_BIAS, False)
    return {
        "tie_embeddings": not options.read(HEAD, True),
        "bias": all_biases,
        "qkv_bias": query_bias and not all_biases,
    }


def _read_rope(architecture: Architecture, options: Options, config: ModelConfig) -> dict[str, Any]:
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


def _write_rope(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
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


def _read_windows(
    windows: SlidingWindows, options: Options, config: ModelConfig, default_theta: float
) -> dict[str, Any]:
    """Read the sliding window and its pattern. RoPE in layers with a window has its own base, and no scaling."""
    window = options.read("attention.sliding_window", 0)
    value = options.take(PATTERN, windows.period)
    letters = _letters(value)
    if not letters:
        raise options.refuse(PATTERN, value, "it must be a period or a list of booleans")

    theta = options.read("rope.freq_base_swa", default_theta)
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        options.only(name, config.head_width)

    repeats = math.ceil(config.n_layer / len(letters))
    layers = period((letters * repeats)[: config.n_layer])
    if not window or "L" not in layers:
        return {}
    return {"sliding_window": window, "window_pattern": layers, "rope_local_theta": theta}


def _write_windows(windows: SlidingWindows, config: ModelConfig, theta: float) -> dict[str, Any]:
    """Return the metadata of sliding windows; the default pattern is omitted."""
    values: dict[str, Any] = {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": theta}
    layers = "".join("L" if window else "G" for window in config.windows)
    default = _pattern(windows.period)
    repeats = math.ceil(config.n_layer / windows.period)
    if layers != (default * repeats)[: config.n_layer]:
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
