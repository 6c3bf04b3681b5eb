"""transformers OLMo 2: Llama with norms on the outputs of sublayers, and one norm for all heads of queries or keys."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options

NORMS = {"post_attention_layernorm": "ln_1_out", "post_feedforward_layernorm": "ln_2_out"}
DEFAULTS = llama.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5}  # Olmo2Config's
SETTINGS: dict[str, Any] = {"norm_position": "output", "qk_norm": True, "qk_norm_per_head": False}


def _from_hf(options: Options) -> ModelConfig:
    options.only("attention_bias", False)
    return llama.read_config(options, DEFAULTS, **SETTINGS)


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    form=llama.make_format(llama.make_table(NORMS)),
    config_from_hf=_from_hf,
    adapt=partial(llama.adapt_to, family="olmo2", **SETTINGS),
    to_hf=lambda config: llama.write_config(config) | {"attention_bias": False},
)
