"""transformers Mistral: Llama with a sliding window in all layers or in none."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options

DEFAULTS = llama.DEFAULTS | {  # MistralConfig's
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
}


def config_from_hf(options: Options) -> ModelConfig:
    """Convert a config.json."""

    def windows(o: Options, n_layer: int) -> dict[str, Any]:
        window = o.take("sliding_window", 4096)
        return {} if window is None else {"sliding_window": window}

    return llama.read_config(options, DEFAULTS, windows=windows)


def adapt(config: ModelConfig) -> ModelConfig:
    """Return a config of the same function with the options of Mistral.

    Raises:
        UserError: if a setting has no Mistral equivalent.
    """
    return llama.adapt_to(config, "mistral", free=("sliding_window",))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Convert a config that `adapt` returned to a config.json."""
    windows = {"head_dim": config.head_width, "sliding_window": config.sliding_window or None}
    return llama.write_config(config, FAMILY) | windows


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    form=llama.FAMILY.form,
    config_from_hf=config_from_hf,
    adapt=adapt,
    config_to_hf=config_to_hf,
)
