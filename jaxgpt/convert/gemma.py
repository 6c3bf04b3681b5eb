"""transformers Gemma 3, the text model. Gains are stored as their difference from 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxgpt.config import MAX_LAYERS, ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.family import Family
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import WeightTable
from jaxgpt.convert.weights import Format
from jaxgpt.errors import UserError

NORMS = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_1_out",
    "pre_feedforward_layernorm": "ln_2",
    "post_feedforward_layernorm": "ln_2_out",
}
DEFAULTS: dict[str, Any] = {  # Gemma3TextConfig's
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
SCALAR = 256


def _table(q_gain: float = 1.0) -> WeightTable:
    return llama.make_table(NORMS, offset=1.0, q_gain=q_gain)


def form_of(values: Mapping[str, Any]) -> Format:
    """Return the names of the tensors.

    Gemma divides scores by `sqrt(query_pre_attn_scalar)` and jaxgpt by `sqrt(head_dim)`; the gain of the norm of queries is
    multiplied by the ratio.
    """
    scalar, width = values.get("query_pre_attn_scalar") or SCALAR, values.get("head_dim") or DEFAULTS["head_dim"]
    return llama.make_format(_table(math.sqrt(width / scalar)))


def _from_hf(options: Options) -> ModelConfig:
    o = options
    o.only("attention_bias", False)
    o.only("attn_logit_softcapping", None)
    o.only("use_bidirectional_attention", False)
    o.skip("cache_implementation")
    if o.number("query_pre_attn_scalar", SCALAR) <= 0:
        raise UserError(f"{o.where}: query_pre_attn_scalar must be above 0")
    return llama.read_config(
        o,
        DEFAULTS,
        activation="hidden_activation",
        rope=_rope,
        windows=_windows,
        norm_position="both",
        qk_norm=True,
        embed_scale=True,
        logit_softcap=o.number("final_logit_softcapping", 0.0),
    )


def _windows(o: Options, n_layer: int) -> dict[str, Any]:
    """Read the sliding window; by default, all layers except every sixth have it."""
    every = o.integer("sliding_window_pattern", 6)
    if every < 1:
        raise o.refuse("sliding_window_pattern", every, "it must be at least 1")
    return llama.read_windows(o, n_layer, o.take("sliding_window", 4096), "L" * min(every - 1, MAX_LAYERS) + "G")


def _rope(o: Options, block_size: int) -> dict[str, Any]:
    """Read the rotary settings: `rope_parameters` for each kind of layers in transformers 5; in 4, other options."""
    old = {
        "full_attention": {"rope_theta": o.number("rope_theta", GLOBAL_THETA)},
        "sliding_attention": {"rope_theta": o.number("rope_local_base_freq", LOCAL_THETA)},
    }
    scaling, new = o.object("rope_scaling"), o.object("rope_parameters")
    if not all(kind in llama.LAYER_LETTERS and isinstance(rope, dict) for kind, rope in new.items()):
        raise o.refuse("rope_parameters", new, f"it must have an object for each of {', '.join(llama.LAYER_LETTERS)}")
    full = old["full_attention"] | scaling | new.get("full_attention", {})
    if any(full[name] != value for name, value in scaling.items()):
        raise o.refuse("rope_scaling", scaling, "it contradicts rope_parameters")
    settings = llama.rope_settings(o, full, block_size)
    sliding = llama.rope_settings(o, old["sliding_attention"] | new.get("sliding_attention", {}), block_size)
    theta = sliding.pop("rope_theta")
    if sliding:
        raise o.refuse("rope_parameters", new, "scaling is not supported in layers of type sliding_attention")
    return settings | {"rope_local_theta": theta}


def _adapt(config: ModelConfig) -> ModelConfig:
    if config.sliding_window and not config.rope_local_theta:
        if config.rope_factor != 1.0:
            raise UserError(
                f"model.rope_factor {config.rope_factor:g} has no gemma3_text equivalent in layers with a sliding window: "
                f"set model.rope_local_theta"
            )
        config = replace(config, rope_local_theta=config.rope_theta)
    free = ("sliding_window", "window_pattern", "rope_local_theta", "logit_softcap")
    return llama.adapt_to(config, "gemma3_text", free, norm_position="both", qk_norm=True, embed_scale=True)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    values = llama.write_config(config)
    local = config.rope_local_theta or LOCAL_THETA
    return values | {
        "hidden_activation": {"gelu_new": "gelu_pytorch_tanh"}.get(name := values.pop("hidden_act"), name),
        "head_dim": config.head_width,
        "query_pre_attn_scalar": config.head_width,
        "attention_bias": False,
        "final_logit_softcapping": config.logit_softcap or None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "sliding_window": config.sliding_window or 4096,
        "layer_types": llama.layer_types(config),
        "rope_parameters": {
            "full_attention": llama.write_rope(config),
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
        "rope_local_base_freq": local,  # for transformers 4
    }


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    form=llama.make_format(_table()),
    config_from_hf=_from_hf,
    adapt=_adapt,
    to_hf=_to_hf,
    served=("gelu_new",),
    form_of=form_of,
)
