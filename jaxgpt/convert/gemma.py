"""Gemma 3 family: tensors and options of the transformers text model.

Norm gains are stored as differences from 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import merged_rope, rope_settings, write_rope
from jaxgpt.convert.tensors import Format
from jaxgpt.convert.windows import LETTERS, layer_types, read_windows

NORMS = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_1_out",
    "pre_feedforward_layernorm": "ln_2",
    "post_feedforward_layernorm": "ln_2_out",
}
OPTIONS = llama.changed_options(  # defaults of Gemma3TextConfig
    "hidden_act",
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
) | {
    "hidden_activation": ("activation", "gelu_pytorch_tanh"),
    "final_logit_softcapping": ("logit_softcap", 0.0),
}
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
SCALAR = 256  # default of query_pre_attn_scalar


def form_of(values: Mapping[str, Any], config: ModelConfig) -> Format:
    """Return the names and layout of the tensors.

    Gemma divides scores by `sqrt(query_pre_attn_scalar)`, but jaxgpt by `sqrt(head_dim)`; to compensate, the gain of the
    query norm is multiplied by `sqrt(head_dim / query_pre_attn_scalar)`.
    """
    scalar = values.get("query_pre_attn_scalar") or SCALAR
    return llama.make_form(NORMS, offset=1.0, q_gain=math.sqrt(config.head_width / scalar))


def _read(options: Options, config: ModelConfig) -> dict[str, Any]:
    """Read RoPE and the sliding window; by default, every sixth layer has no sliding window."""
    scalar = options.read("query_pre_attn_scalar", float(SCALAR))
    if scalar <= 0:
        raise options.refuse("query_pre_attn_scalar", scalar, "it must be above 0")
    period = options.read("sliding_window_pattern", 6)
    if period < 1:
        raise options.refuse("sliding_window_pattern", period, "it must be at least 1")

    rope = _read_rope(options, config.block_size)
    window = options.read("sliding_window", 4096)
    pattern = "L" * min(period - 1, config.n_layer) + "G"
    windows = read_windows(options, config.n_layer, window, pattern)
    if not windows:
        rope["rope_local_theta"] = 0.0  # no local layers
    return rope | windows


def _read_rope(options: Options, block_size: int) -> dict[str, Any]:
    """Read the options of RoPE: `rope_parameters` (transformers 5) or older options (transformers 4)."""
    new = options.read("rope_parameters", {})
    if not all(kind in LETTERS and isinstance(rope, dict) for kind, rope in new.items()):
        raise options.refuse("rope_parameters", new, f"it must contain only objects named {' or '.join(LETTERS)}")

    old_global = {"rope_theta": options.read("rope_theta", GLOBAL_THETA)}
    old_local = {"rope_theta": options.read("rope_local_base_freq", LOCAL_THETA)}
    scaling = options.read("rope_scaling", {})
    global_rope = merged_rope(options, old_global, scaling, new.get("full_attention", {}))
    local_rope = old_local | new.get("sliding_attention", {})

    local = rope_settings(options, local_rope, block_size)
    if len(local) > 1:
        raise options.refuse("rope_parameters", new, "scaling is not supported in layers of type sliding_attention")
    return rope_settings(options, global_rope, block_size) | {"rope_local_theta": local["rope_theta"]}


def _write(config: ModelConfig) -> dict[str, Any]:
    """Return the options that are converted: activation, soft cap of logits, scale of scores, windows and RoPE."""
    local = config.rope_local_theta or config.rope_theta
    rope = write_rope(config)
    return rope | {
        "hidden_activation": {"gelu_new": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "query_pre_attn_scalar": config.head_dim,
        "final_logit_softcapping": config.logit_softcap or None,
        "sliding_window": config.sliding_window or 4096,
        "layer_types": layer_types(config),
        "rope_parameters": {
            "full_attention": rope["rope_parameters"],
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
        "rope_local_base_freq": local,
    }


FAMILY = llama.LLAMA._replace(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    form=llama.make_form(NORMS, offset=1.0),
    options=OPTIONS,
    settings=llama.LLAMA.settings | {"norm_position": "both", "qk_norm": True, "embed_scale": True},
    only=llama.PLAIN_ATTENTION | {"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    read=_read,
    write=_write,
    vllm_activations=("gelu_new",),
    form_of=form_of,
)
