"""transformers Qwen2, Qwen2.5 and Qwen3. Qwen2: Llama with biases on queries, keys and values; Qwen3: with QK-norm."""

from __future__ import annotations

from functools import partial
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


def _qwen2_from_hf(options: Options) -> ModelConfig:
    options.only("use_mrope", False)
    return llama.read_config(options, DEFAULTS, windows=_windows, qkv_bias=True)


def _qwen3_from_hf(options: Options) -> ModelConfig:
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


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    kinds = llama.layer_types(config)
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else config.n_layer
    return {
        "use_sliding_window": first < config.n_layer,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": first,
        "layer_types": kinds,
    }


def _qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    heads = {"head_dim": config.head_width, "attention_bias": False}
    return llama.write_config(config) | heads | _write_windows(config)


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    form=llama.FORM,
    config_from_hf=_qwen2_from_hf,
    adapt=partial(llama.adapt_to, family="qwen2", free=WINDOWS, adds=("qkv_bias",)),
    to_hf=lambda config: llama.write_config(config) | _write_windows(config),
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    form=llama.FORM,
    config_from_hf=_qwen3_from_hf,
    adapt=partial(llama.adapt_to, family="qwen3", free=WINDOWS, qk_norm=True),
    to_hf=_qwen3_to_hf,
)
