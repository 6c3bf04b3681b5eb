"""transformers Mistral: Llama with a sliding window in all layers or in none."""

from __future__ import annotations

from functools import partial
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


def _windows(options: Options, n_layer: int) -> dict[str, Any]:
    window = options.take("sliding_window", 4096)
    return {} if window is None else {"sliding_window": window}


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    options = {"head_dim": config.head_width, "sliding_window": config.sliding_window or None}
    return llama.write_config(config) | options


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    form=llama.FORM,
    config_from_hf=partial(llama.read_config, defaults=DEFAULTS, windows=_windows),
    adapt=partial(llama.adapt_to, family="mistral", free=("sliding_window",)),
    to_hf=_to_hf,
)
