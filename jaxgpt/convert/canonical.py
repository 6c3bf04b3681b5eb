"""The canonical form of a model config: configs with the same form are the same model.

Several configs can describe the same model: some settings have no effect, a size of 0 means a derived value, and linear
RoPE scaling is a case of Llama 3 scaling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert.rope import is_linear, linear_scaling
from jaxgpt.convert.windows import period, window_letters

OF_LLAMA3 = ("rope_low_freq_factor", "rope_high_freq_factor")
OF_YARN = ("rope_beta_slow", "rope_beta_fast", "rope_attention_factor")
SCALING = ("rope_scaling", *OF_LLAMA3, *OF_YARN, "rope_original_context")
# Settings without effect in a model without experts.
OF_EXPERTS = ("experts_per_token", "shared_experts", "router", "router_normalize", "router_scale", "router_bias")


def canonical(config: ModelConfig) -> ModelConfig:
    """Convert a config to its canonical form: explicit sizes, a float32 epsilon, one form of windows, RoPE and biases.

    Settings that have no effect get their defaults, because a family may lack them.
    """
    unused: dict[str, Any] = {}
    if not config.qk_norm:
        unused |= defaults("qk_norm_per_head")
    if not config.n_experts:
        unused |= defaults(*OF_EXPERTS)
    return replace(
        config,
        norm_eps=float(str(np.float32(config.norm_eps))),  # 1e-05, not 9.999999747378752e-06, as GGUF files store it
        n_kv_head=config.kv_heads,
        head_dim=config.head_width,
        n_inner=config.mlp_width,
        qkv_bias=config.qkv_bias and not config.bias,
        **unused,
        **_canonical_rope(config),
        **_canonical_windows(config),
    )


def _canonical_rope(config: ModelConfig) -> dict[str, Any]:
    """Return defaults for the RoPE settings that have no effect, and express linear scaling as Llama 3 scaling."""
    if config.positions != "rope":
        return defaults("rope_theta", "rope_fraction", "rope_factor", *SCALING)
    if config.rope_factor == 1.0:
        return defaults(*SCALING)
    if is_linear(config):
        return defaults(*OF_YARN) | linear_scaling(config.block_size)
    if config.rope_scaling == "yarn":
        return defaults(*OF_LLAMA3)
    return defaults(*OF_YARN)


def _canonical_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the canonical sliding windows: the shortest pattern, and `rope_local_theta` 0 if all layers have the same RoPE."""
    pattern = period(window_letters(config))
    if "L" not in pattern:
        return {"sliding_window": 0, "window_pattern": "L", "rope_local_theta": 0.0}
    has_one_rope = config.rope_factor == 1.0 and config.rope_local_theta == config.rope_theta
    return {
        "sliding_window": config.sliding_window,
        "window_pattern": pattern,
        "rope_local_theta": 0.0 if has_one_rope else config.rope_local_theta,
    }


def defaults(*names: str) -> dict[str, Any]:
    """Return the defaults of settings of `ModelConfig`."""
    return {name: getattr(ModelConfig, name) for name in names}
