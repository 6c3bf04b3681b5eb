"""transformers Qwen2, Qwen2.5 and Qwen3. Qwen2: Llama with biases on queries, keys and values; Qwen3: with QK-norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxgpt.config import MAX_LAYERS, ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options

DEFAULTS = llama.DEFAULTS | {  # Qwen2Config's
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
WINDOWS = ("sliding_window", "window_pattern")


def qwen2_from_hf(options: Options) -> ModelConfig:
    """Convert a config.json of Qwen2."""
    options.only("use_mrope", False)
    return llama.read_config(options, DEFAULTS, windows=_windows, qkv_bias=True)


def qwen3_from_hf(options: Options) -> ModelConfig:
    """Convert a config.json of Qwen3."""
    if options.flag("attention_bias", False):
        raise options.refuse("attention_bias", True, "a model here has biases in all matrices or in none")
    return llama.read_config(options, DEFAULTS | {"head_dim": 128}, windows=_windows, qk_norm=True)


def _windows(o: Options, n_layer: int) -> dict[str, Any]:
    """Read the sliding window: if `use_sliding_window` is true, layers starting at `max_window_layers` have it."""
    window, begin = o.take("sliding_window", 4096), o.integer("max_window_layers", 28)
    if not o.flag("use_sliding_window", False) or window is None:
        window, begin = None, n_layer
    full = max(0, min(begin, n_layer, MAX_LAYERS))
    return llama.read_windows(o, n_layer, window, "G" * full + "L" * (min(n_layer, MAX_LAYERS) - full))


def adapt_to_qwen2(config: ModelConfig) -> ModelConfig:
    """Return a config of the same function with the options of Qwen2. Missing biases become zeros.

    Raises:
        UserError: if a setting has no Qwen2 equivalent.
    """
    config = llama.adapt_to(config, "qwen2", free=(*WINDOWS, "qkv_bias"))
    return config if config.qkv_bias else replace(config, qkv_bias=True)


def adapt_to_qwen3(config: ModelConfig) -> ModelConfig:
    """Return a config of the same function with the options of Qwen3.

    Raises:
        UserError: if a setting has no Qwen3 equivalent.
    """
    return llama.adapt_to(config, "qwen3", free=WINDOWS, qk_norm=True)


def qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Convert a config that `adapt_to_qwen2` returned to a config.json."""
    return llama.write_config(config, QWEN2) | _write_windows(config)


def qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Convert a config that `adapt_to_qwen3` returned to a config.json."""
    heads = {"head_dim": config.head_width, "attention_bias": False}
    return llama.write_config(config, QWEN3) | heads | _write_windows(config)


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    kinds = llama.layer_types(config)
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else config.n_layer
    return {
        "use_sliding_window": first < config.n_layer,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": first,
        "layer_types": kinds,
    }


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    form=llama.FAMILY.form,
    config_from_hf=qwen2_from_hf,
    adapt=adapt_to_qwen2,
    config_to_hf=qwen2_to_hf,
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    form=llama.FAMILY.form,
    config_from_hf=qwen3_from_hf,
    adapt=adapt_to_qwen3,
    config_to_hf=qwen3_to_hf,
)
