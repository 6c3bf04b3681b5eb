"""Settings of RoPE in config.json: default, linear scaling, Llama 3 scaling and YaRN."""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.options import Options

KINDS = ("default", "linear", "llama3", "yarn")  # supported values of `rope_type`


def read_rope(options: Options, config: ModelConfig, theta: float = 10_000.0) -> dict[str, Any]:
    """Read `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (transformers 4).

    Args:
        options: the options of config.json.
        config: the settings read so far.
        theta: default of `rope_theta` in transformers.
    """
    old = {"rope_theta": options.read("rope_theta", theta)}
    scaling = options.read("rope_scaling", {})
    new = options.read("rope_parameters", {})
    rope = merged_rope(options, old, scaling, new)

    if scaling:
        # transformers then reads only the older options. The name of the kind, which has two spellings, is not compared.
        read_there = old | scaling
        names = [name for name in new if name not in ("rope_type", "type")]
        ignored = [name for name in names if read_there.get(name) != new[name]]
        if ignored:
            fix = f"transformers then ignores {', '.join(ignored)} in rope_parameters; remove one of the two options"
            raise options.refuse("rope_scaling", scaling, fix)
    return rope_settings(options, rope, config.block_size)


def merged_rope(options: Options, old: dict[str, Any], scaling: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge RoPE options: `new` (`rope_parameters`) overrides `old`, and must agree with `scaling` (`rope_scaling`)."""
    rope: dict[str, Any] = old | scaling | new
    if any(rope[name] != value for name, value in scaling.items()):
        raise options.refuse("rope_scaling", scaling, "it contradicts rope_parameters")
    return rope


def rope_settings(options: Options, rope: dict[str, Any], block_size: int) -> dict[str, Any]:
    """Convert the RoPE options of one layer type to model settings."""
    inner = options.inner("rope_parameters", rope)
    old_kind = inner.read("type", "default")  # older spelling of rope_type
    kind = inner.read("rope_type", old_kind)
    if kind not in KINDS:
        raise inner.refuse("rope_type", kind, f"expected one of {', '.join(KINDS)}")
    inner.only("partial_rotary_factor", 1.0)

    settings: dict[str, Any] = {"rope_theta": inner.read("rope_theta", float)}
    if kind != "default":
        settings["rope_factor"] = inner.read("factor", float)
    if kind == "linear":
        settings |= linear_scaling(block_size)
    elif kind == "llama3":
        settings |= _read_llama3(inner, block_size)
    elif kind == "yarn":
        settings |= _read_yarn(inner, settings["rope_factor"], block_size)

    inner.skip("original_max_position_embeddings")  # option used only by Llama 3 scaling and YaRN
    inner.done()
    return settings


def _read_llama3(options: Options, block_size: int) -> dict[str, Any]:
    """Read the options of Llama 3 scaling."""
    return {
        "rope_low_freq_factor": options.read("low_freq_factor", float),
        "rope_high_freq_factor": options.read("high_freq_factor", float),
        "rope_original_context": options.read("original_max_position_embeddings", block_size),
    }


def _read_yarn(options: Options, factor: float, block_size: int) -> dict[str, Any]:
    """Read the options of YaRN; a factor of 1 without an attention factor has no effect."""
    options.skip("finetuned")  # whether the weights were trained with the scaling; does not change the logits
    options.only("truncate", True)  # the bounds of the ramp are rounded to whole channels

    # The attention factor, or DeepSeek's two numbers that define it.
    attention = options.read("attention_factor", 0.0)
    numerator = options.read("mscale", 0.0)
    denominator = options.read("mscale_all_dim", 0.0)
    if not attention and numerator and denominator:
        growth = 0.1 * math.log(max(factor, 1.0))
        attention = (numerator * growth + 1.0) / (denominator * growth + 1.0)

    if factor == 1.0:
        if attention not in (0.0, 1.0):
            raise options.refuse("attention_factor", attention, "with a factor of 1, it must be 1")
        options.skip("beta_slow", "beta_fast")
        return {}
    return {
        "rope_scaling": "yarn",
        "rope_beta_slow": options.read("beta_slow", 1.0),
        "rope_beta_fast": options.read("beta_fast", 32.0),
        "rope_attention_factor": attention,
        "rope_original_context": options.read("original_max_position_embeddings", block_size),
    }


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the options of RoPE, as transformers 5 and 4 read them."""
    rope = _rope_parameters(config)
    values: dict[str, Any] = {"rope_parameters": rope, "rope_theta": config.rope_theta}  # rope_theta for transformers 4
    if config.rope_factor != 1.0:
        values["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return values


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Convert a model's RoPE settings to `rope_parameters` (of the global layers, for Gemma 3)."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_factor == 1.0:
        return rope

    if config.rope_scaling == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "beta_slow": config.rope_beta_slow,
            "beta_fast": config.rope_beta_fast,
            "original_max_position_embeddings": config.rope_original_context,
        }
        if config.rope_attention_factor:
            rope["attention_factor"] = config.rope_attention_factor
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


def linear_scaling(block_size: int) -> dict[str, Any]:
    """Express linear scaling as Llama 3 scaling of wavelengths above 1; the shortest wavelength is 2 pi."""
    return {
        "rope_low_freq_factor": float(block_size),
        "rope_high_freq_factor": 2.0 * block_size,
        "rope_original_context": block_size,
    }


def is_linear(config: ModelConfig) -> bool:
    """Return whether Llama 3 scaling is linear: the full factor applies even to the shortest wavelength."""
    is_llama3 = config.rope_scaling == "llama3"
    return is_llama3 and config.rope_low_freq_factor >= config.rope_original_context / (2 * math.pi)
