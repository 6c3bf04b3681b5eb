"""llama.cpp metadata: a `Family` for each architecture, with metadata keys as its options, for import and export.

Some settings have no key. For them, names of tensors are options, too. The value of `HEAD`, `OUTPUT_BIAS` and `QUERY_BIAS` is
whether the file has the tensor. The value of `ROPE_DIVISORS` is a dict of the settings that the tensor represents.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.llamacpp.architectures import SOFTCAP, WIDTH, Architecture
from jaxgpt.convert.llamacpp.rope import read_rope, write_rope
from jaxgpt.convert.llamacpp.windows import read_windows, write_windows
from jaxgpt.convert.options import Options

HEAD = "output.weight"
OUTPUT_BIAS = "blk.0.attn_output.bias"
QUERY_BIAS = "blk.0.attn_q.bias"
# Metadata keys, without the name of the architecture: (setting, default of llama.cpp, or type if the key is required).
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", int),
    "context_length": ("block_size", int),
    "block_count": ("n_layer", int),
    "embedding_length": ("n_embd", int),
    "attention.head_count": ("n_head", int),
    "attention.head_count_kv": ("n_kv_head", 0),
    "attention.key_length": ("head_dim", 0),
}
OF_EXPERTS: dict[str, tuple[str, Any]] = {
    "expert_count": ("n_experts", int),
    "expert_used_count": ("experts_per_token", int),
}
ONLY = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}


def family(architecture: Architecture) -> Family:
    """Return a family with metadata keys, and names of tensors that show a setting, as its options."""
    rules = architecture.expert_rules
    width = rules.width if rules else WIDTH
    keys = KEYS | {width: ("n_inner", int), architecture.eps: ("norm_eps", float)}
    fixed: dict[str, Any] = {"activation": architecture.activation}
    if rules:
        keys |= OF_EXPERTS
        fixed["router_normalize"] = rules.normalized
    keys |= architecture.more_keys

    return architecture.family._replace(
        name=f"llama.cpp {architecture.name}",
        options=keys,
        settings=architecture.family.settings | fixed,
        only={key: value for key, value in ONLY.items() if key not in keys},
        read=partial(_read, architecture),
        write=partial(_write, architecture),
    )


def _read(architecture: Architecture, options: Options, config: ModelConfig) -> dict[str, Any]:
    """Return the settings that the table of keys lacks: the inverse of `_write`."""
    options.only("attention.value_length", config.head_width)
    if _has_unused_width(architecture):
        options.skip(WIDTH)
    settings = _read_biases(options)
    if config.positions == "rope":
        settings |= read_rope(architecture, options, config)
    if architecture.windows:
        theta = architecture.windows.theta or settings["rope_theta"]
        settings |= read_windows(architecture.windows, options, config, theta)
    return settings


def _write(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata and facts that the table of keys lacks: the inverse of `_read`."""
    values: dict[str, Any] = {
        HEAD: not config.tie_embeddings,
        OUTPUT_BIAS: config.bias,
        QUERY_BIAS: config.bias or config.qkv_bias,
        "attention.value_length": config.head_width,
    }
    if _has_unused_width(architecture):
        values[WIDTH] = config.mlp_width
    if SOFTCAP in architecture.more_keys:
        values[SOFTCAP] = config.logit_softcap or None  # None: the file has no such key
    if config.positions == "rope":
        values |= write_rope(architecture, config)
    if architecture.windows and any(config.windows):
        theta = config.rope_local_theta or config.rope_theta
        values |= write_windows(architecture.windows, config, theta)
    return values


def _has_unused_width(architecture: Architecture) -> bool:
    """Return whether `WIDTH` is only the width of layers without experts, which the models of an architecture lack."""
    rules = architecture.expert_rules
    return rules is not None and rules.width != WIDTH


def _read_biases(options: Options) -> dict[str, Any]:
    """Read whether the file has a separate head, all biases, or only the biases of queries, keys and values."""
    all_biases = options.read(OUTPUT_BIAS, False)
    query_bias = options.read(QUERY_BIAS, False)
    return {
        "tie_embeddings": not options.read(HEAD, True),
        "bias": all_biases,
        "qkv_bias": query_bias and not all_biases,
    }
