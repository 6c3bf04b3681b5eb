"""transformers OLMo 2: Llama with norms on the outputs of sublayers, and one norm for all heads of queries or keys."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options

NORMS = {"post_attention_layernorm": "ln_1_out", "post_feedforward_layernorm": "ln_2_out"}
DEFAULTS = llama.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5}  # Olmo2Config's
SETTINGS: dict[str, Any] = {"norm_position": "output", "qk_norm": True, "qk_norm_per_head": False}


def config_from_hf(options: Options) -> ModelConfig:
    """Convert a config.json."""
    options.only("attention_bias", False)
    return llama.read_config(options, DEFAULTS, **SETTINGS)


def adapt(config: ModelConfig) -> ModelConfig:
    """Return a config of the same function with the options of OLMo 2.

    Raises:
        UserError: if a setting has no OLMo 2 equivalent.
    """
    return llama.adapt_to(config, "olmo2", **SETTINGS)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Convert a config that `adapt` returned to a config.json."""
    return llama.write_config(config, FAMILY) | {"attention_bias": False}


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    form=llama.make_format(llama.make_table(NORMS)),
    config_from_hf=config_from_hf,
    adapt=adapt,
    config_to_hf=config_to_hf,
)
