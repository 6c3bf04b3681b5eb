"""Names of activations in all layers, such as `h.0.attn.pattern` and `resid.pre.0`."""

from __future__ import annotations

import re

from jaxgpt.config import ModelConfig


def activation_name(path: str) -> str:
    """Return the name of the activation at a module path: `h.3.attn.q` for `h_3/attn/q`, `resid.pre.3` for `h_3/resid.pre`."""
    name = re.sub(r"^h_(\d+)\.", r"h.\1.", path.replace("/", "."))
    return re.sub(r"^h\.(\d+)\.(resid\.\w+)$", r"\2.\1", name)


def layer_names(config: ModelConfig, activation: str) -> list[str]:
    """Return the names of an activation, such as `resid.pre` or `attn.pattern`, in all layers."""
    layers = range(config.n_layer)
    if activation.startswith("resid."):
        return [f"{activation}.{layer}" for layer in layers]
    return [f"h.{layer}.{activation}" for layer in layers]


def stream_names(config: ModelConfig) -> list[str]:
    """Return names of residual stream activations: each block's input, and the last block's output."""
    return [*layer_names(config, "resid.pre"), f"resid.post.{config.n_layer - 1}"]


def hidden_names(config: ModelConfig) -> list[str]:
    """Return the names of the hidden states that `capture` returns."""
    *inputs, last = stream_names(config)
    if config.final_norm and config.norm != "none":
        last = "ln_f.out"
    return [*inputs, last]
